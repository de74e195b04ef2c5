"""What a replay of a trace needs of it, inferred from its steps: requests, acceptance, costs."""

"""What an operator asks a running controller, and how the answer is printed."""

"""What the learned policy knows: acceptance of drafts and cost of steps."""

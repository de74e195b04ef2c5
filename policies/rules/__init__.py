"""What stands around a choice: exploration, switching, vetoes, recovery, an operator's bounds."""

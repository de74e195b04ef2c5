"""``specpilot launch``: an SGLang server with the controller beside it."""

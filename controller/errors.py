"""What a command ends with when it cannot do what it was asked: the texts are for the operator."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration or an option that cannot be used; the text names file, key or option, and the remedy."""


class CommandError(Exception):
    """What a command could not do, though it was asked rightly; the text says why and what to do."""

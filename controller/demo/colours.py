"""The colours of K in the terminal."""

from __future__ import annotations

COLOURS = {0: "#d9772b", 1: "#7fb8da", 3: "#1f6fb2"}
"""Colours of the demo's K, readable on light and on dark."""
OTHER_COLOUR = "#6a51a3"


def colour(steps: int | None) -> str:
    """Return the colour of K = ``steps``; None is no step at all."""
    return COLOURS.get(steps, OTHER_COLOUR) if steps is not None else "default"

"""Folders as they are, without making any: what is there of a path, and who may write into it."""

from __future__ import annotations

import os
from pathlib import Path


def existing(path: Path) -> Path:
    """Return ``path`` or the nearest of its parents that is there."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def writable(folder: Path) -> bool:
    """Return whether this user may make files in ``folder``."""
    return os.access(folder, os.W_OK | os.X_OK)

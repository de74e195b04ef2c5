"""The file of a ``specpilot.policies.neural.Model``: arrays in numpy's ``.npz``, read without unpickling anything."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from specpilot.controller.errors import ConfigError
from specpilot.controller.files import replacement
from specpilot.policies.neural import Model

MAX_BYTES = 1 << 20
"""Largest file that is read: a model has some thirty kB."""


def load_model(path: Path) -> Model:
    """Return the model in ``path``; ConfigError says why it cannot be used."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 10} kB")
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
                raise ValueError(f"unpacked it is larger than {MAX_BYTES >> 10} kB")
        with np.load(path, allow_pickle=False) as file:
            return Model.of({name: file[name] for name in file.files})
    except OSError as error:
        raise ConfigError(f"policy.model = {str(path)!r}: {error.strerror or error}") from error
    except Exception as error:  # what zipfile, zlib and numpy raise for a file that is none has no common base
        raise ConfigError(f"policy.model = {str(path)!r} is no model of specpilot fit-neural: {error}") from error


def save_model(model: Model, path: Path) -> None:
    """Write ``model`` in one step; ConfigError if that fails."""
    arrays: dict[str, Any] = model.arrays()
    with replacement(path) as file:
        np.savez(file, **arrays)

"""Files that commands write: JSON for people and scripts, and files that are replaced in one step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from specpilot.controller.errors import ConfigError


def json_text(content: object) -> bytes:
    """Return ``content`` (what msgspec can encode) as indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def write_json(path: Path, content: object) -> None:
    """Write ``content`` to ``path``; ConfigError if that fails."""
    try:
        path.write_bytes(json_text(content))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def replace_json(path: Path, content: object) -> None:
    """Replace ``path`` in one step; ConfigError if that fails, and then nothing has changed."""
    with replacement(path) as file:
        file.write(json_text(content))


@contextmanager
def replacement(path: Path, *, public: bool = False, synced: bool = False, keep: bool = False) -> Iterator[IO[bytes]]:
    """Give a new file that takes the place of ``path`` when the block ends without an error.

    ``public``: its mode is what the umask leaves, else this user alone may read it. ``synced``: it is on disk before it
    has its name. ``keep``: FileExistsError, and nothing is replaced, if there is a file of that name by then.

    Raises ConfigError if it cannot be written, and then nothing has changed.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".specpilot-", delete=False) as file:
            temporary = Path(file.name)
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        if public:
            temporary.chmod(0o666 & ~_umask())
        if not (keep and _link(temporary, path)):
            os.replace(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> bool:
    """Give the file its name unless that is taken; False on a file system without hard links."""
    try:
        os.link(temporary, path)
    except PermissionError:
        return False
    return True


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current

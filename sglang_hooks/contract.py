"""Which versions of SGLang are supported, and the check that one has all that the hooks use.

What that is is written down once, in ``uses.py`` (ENTRY and HOOKS: without these a server cannot be hooked) and
``skip_uses.py`` (SKIP: without these K=0 cannot be a decode step). The check reads SGLang's source
(``source.py``) and imports nothing of it, at every start; ``tests/contract`` makes it on every supported version.

What moved is named with the module here that uses it, as in

    EAGLEWorkerV2.verify: parameter pp_proxy_tensors is gone in SGLang 0.5.24, used by sglang_hooks/skip.py
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specpilot.sglang_hooks.source import Function, Source, parameters, places

TESTED_VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
RIG_VERSION = "0.5.17"
"""Version that runs on the GPU rig of this project only; its adaptive mode must start at the widest step."""


@dataclass(frozen=True)
class Use:
    """One function or class of SGLang, and what the hooks take for granted about it."""

    target: str
    """Dotted path of the function, method or class."""
    by: str
    """Modules of this package that use it."""
    forms: tuple[str, ...] = ()
    """Parameters of a function, in every form that was read; empty if only its name is used."""
    does: tuple[str, ...] = ()
    """Calls and assignments in a function's body, each once and in this order (see ``source.places``)."""
    has: str = ""
    """Attributes of a class, separated by spaces."""
    since: str = ""
    """First version that has it; older ones are not asked for it."""
    until: str = ""
    """Last version that has it."""


def moved(uses: Iterable[Use], source: Source, version: str) -> list[str]:
    """Return a line for everything that is not as the hooks know it, naming what moved and who uses it."""
    return [
        f"{'.'.join(use.target.split('.')[-2:])}: {what} in SGLang {version}, used by "
        + ", ".join(f"sglang_hooks/{name}" for name in use.by.split())
        for use in sorted(uses, key=lambda use: use.target.split("."))
        if applies(use, version)
        for what in _moved(use, source)
    ]


def _moved(use: Use, source: Source) -> Iterator[str]:
    node = source.find(use.target)
    if isinstance(node, str):
        yield f"{node} any more"
        return
    if use.has:
        attributes = source.attributes(use.target)
        for name in use.has.split():
            if name not in attributes:
                yield f"attribute {name} is gone"
        return
    if not (use.forms or use.does):
        return
    if not isinstance(node, Function):
        yield "it is no function"
        return
    found = parameters(node)
    if use.forms and " ".join(found) not in use.forms:
        yield from _differing(found, [tuple(form.split()) for form in use.forms])
    after = (0, 0)
    for pattern in use.does:
        at = places(node, pattern)
        if len(at) != 1:
            yield f"it does `{pattern}` {len(at)} times, not once"
        elif at[0] < after:
            yield f"it does `{pattern}` in another order"
        else:
            after = at[0]


def _differing(found: tuple[str, ...], forms: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Say what is different from the form that is most like it."""
    known = min(forms, key=lambda form: len(set(form) ^ set(found)))
    gone, new = [one for one in known if one not in found], [one for one in found if one not in known]
    for name in gone:
        yield f"parameter {name} is gone"
    for name in new:
        yield f"parameter {name} is new"
    if not gone and not new:
        yield f"its parameters come in the order {', '.join(found)}"


def applies(use: Use, version: str) -> bool:
    """Return whether ``use`` is asked of this version of SGLang."""
    at = _numbers(version)
    return not ((use.since and at < _numbers(use.since)) or (use.until and at > _numbers(use.until)))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> _numbers("0.5.23.post1"), _numbers("0.5.24rc1")
    ((0, 5, 23), (0, 5, 24))
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@functools.cache
def installed() -> Source:
    """Return the source of the SGLang of this process."""
    import sglang

    assert sglang.__file__ is not None
    return Source(Path(sglang.__file__).parent.parent)


def installed_moved(uses: tuple[Use, ...]) -> tuple[str, ...]:
    """Return ``moved`` of the SGLang of this process: reads some sixty of its files once, in a second or two."""
    import sglang

    return _moved_once(uses, installed(), sglang.__version__)


@functools.cache
def _moved_once(uses: tuple[Use, ...], source: Source, version: str) -> tuple[str, ...]:
    return tuple(moved(uses, source, version))

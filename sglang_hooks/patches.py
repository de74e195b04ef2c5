"""Attributes of SGLang that are replaced through its hook registry, and put back.

The registry applies a target's hooks once, swallows what goes wrong and knows no way back; this adds
the three. Hooks of other plugins on the same target stay, before and after.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.plugins.hook_registry import HookSource

Hook = tuple[str, Any, str]
"""Dotted path of the target, what hooks it, and SGLang's kind of hook: BEFORE, AFTER, AROUND or REPLACE."""


class PatchError(RuntimeError):
    """A target that is not there, or that SGLang did not patch; the text names it."""


@dataclass(frozen=True)
class Patch:
    """One patched attribute, and what ``revert`` puts back."""

    target: str
    owner: Any
    name: str
    original: Any
    wraps_others: bool
    """Another plugin's hooks were applied already: ``original`` is their wrapper."""


def apply(hooks: Sequence[Hook], made: list[Patch]) -> None:
    """Register and apply ``hooks``, append to ``made``, and make sure that each is really in place: PatchError."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    owners = [pkgutil.resolve_name(target.rpartition(".")[0]) for target, _, _ in hooks]
    for owner, (target, _, _) in zip(owners, hooks, strict=True):
        if not hasattr(owner, target.rpartition(".")[2]):
            raise PatchError(f"{target} is gone")
    patches = []
    foreign: dict[str, list[Any]] = {}
    for owner, (target, hook, kind) in zip(owners, hooks, strict=True):
        if target in HookRegistry._patched:
            # SGLang would skip ours: it applies a target's hooks once. Wrap what is there.
            foreign[target] = HookRegistry._hooks.pop(target)
            HookRegistry._patched.discard(target)
        name = target.rpartition(".")[2]
        patches.append(Patch(target, owner, name, inspect.getattr_static(owner, name), target in foreign))
        HookRegistry.register(target, hook, HookType[kind], source=_source())
    made.extend(patches)
    HookRegistry.apply_hooks()
    for target, others in foreign.items():
        HookRegistry._hooks[target] = others + HookRegistry._hooks[target]
    for patch in patches:
        if inspect.getattr_static(patch.owner, patch.name) is patch.original:
            raise PatchError(f"{patch.target} could not be patched, see SGLang's log")


def revert(made: Sequence[Patch]) -> None:
    """Leave SGLang's classes as they were before the patches in ``made``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, _propagate_patch

    for patch in reversed(made):
        current = inspect.getattr_static(patch.owner, patch.name)
        setattr(patch.owner, patch.name, patch.original)
        if isinstance(patch.original, type):
            _propagate_patch(current, patch.original, patch.owner)
        hooks = HookRegistry._hooks.pop(patch.target)
        HookRegistry._patched.discard(patch.target)
        if others := [hook for hook in hooks if hook[2] != _source()]:
            HookRegistry._hooks[patch.target] = others
        if patch.wraps_others:
            HookRegistry._patched.add(patch.target)
    HookRegistry.apply_hooks()  # of other plugins that had been applied together with ours


def _source() -> HookSource:
    from sglang.srt.plugins.hook_registry import HookSource

    return HookSource(plugin_name="specpilot", dist_name="specpilot")

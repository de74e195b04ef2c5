"""SGLang's registry looks for what it patches in the modules that may hold it, not in all 8,000 of a test run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

HOLDERS = ("sglang", "specpilot", "tests")


class _Interpreter:
    """``sys`` as the registry sees it."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in HOLDERS}


@pytest.fixture(scope="session", autouse=True)
def few_modules() -> Iterator[None]:
    """A look takes 60 ms of a core otherwise, and the hooks of one test need twenty."""
    if "sglang" not in sys.modules:  # nothing here needs it
        yield
        return
    from sglang.srt.plugins import hook_registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook_registry, "sys", _Interpreter())
        yield

"""What holds for every test: Hypothesis judges none by how fast the machine is, and SGLang is imported once."""

import importlib.util
import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.warm import program

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:  # noqa: ARG001
    """Fork the workers from a process that has imported SGLang."""
    if importlib.util.find_spec("sglang") is not None:
        for spec in specs:
            spec.python = shlex.join(program())

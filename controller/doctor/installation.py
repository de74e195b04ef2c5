"""Checks of what is installed: specpilot, Python, SGLang, and whether SGLang finds the plugin."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from specpilot.controller.doctor.report import VERSIONS, Check
from specpilot.sglang_hooks.contract import RIG_VERSION, TESTED_VERSIONS, installed_moved
from specpilot.sglang_hooks.skip_uses import SKIP
from specpilot.sglang_hooks.uses import ENTRY, HOOKS

GROUP = "sglang.srt.plugins"
PLUGIN = "specpilot"
NO_SGLANG = "SGLang is not installed here"


def installed_sglang() -> str | None:
    """Return the version of SGLang that is installed here, None if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def check_versions(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check specpilot, Python, SGLang, and that SGLang will find the plugin."""
    yield VERSIONS.ok(f"specpilot {version('specpilot')}, Python {platform.python_version()}")
    installed = installed_sglang()
    if installed is None:
        yield VERSIONS.not_checked(f"{NO_SGLANG}: enough for a controller, not for a server")
        return
    yield from check_sglang(installed, environment)
    yield from check_plugin(environment)


def check_sglang(installed: str, environment: Mapping[str, str]) -> Iterator[Check]:
    """Check the version of SGLang, and that its code is what the hooks know."""
    tested = f"install one of {', '.join(TESTED_VERSIONS)}"
    try:
        import sglang  # noqa: F401
    except Exception as error:  # whatever a broken installation raises
        yield VERSIONS.problem(f"SGLang {installed} cannot be imported: {error}", "repair SGLang's installation")
        return
    if installed in (*TESTED_VERSIONS, RIG_VERSION):
        yield VERSIONS.ok(f"SGLang {installed} is a tested version")
    elif environment.get("SPECPILOT_ALLOW_UNTESTED") == "1":
        yield VERSIONS.warning(f"SGLang {installed} is not a tested version, and is allowed", tested)
    else:
        yield VERSIONS.problem(
            f"SGLang {installed} is not a tested version: a server with specpilot refuses to start",
            f"{tested}, or try it with SPECPILOT_ALLOW_UNTESTED=1",
        )
    if moved := installed_moved(ENTRY + HOOKS):
        yield VERSIONS.problem(f"SGLang's code is not what the hooks know: {'; '.join(moved)}", tested)
    elif moved := installed_moved(SKIP):
        yield VERSIONS.warning(
            f"K=0 stays SGLang's own step, and a tree of drafts cannot be skipped: {'; '.join(moved)}", tested
        )
    else:
        yield VERSIONS.ok("SGLang's code is what the hooks know")


def check_plugin(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check that SGLang finds the plugin and would load it."""
    found = next((point for point in entry_points(group=GROUP) if point.name == PLUGIN), None)
    if found is None:
        yield VERSIONS.problem(
            f"SGLang finds no plugin {PLUGIN} here (entry points of {GROUP})",
            "run `pip install .` in Specpilot's checkout with this environment's pip; PYTHONPATH alone is not enough",
        )
        return
    allowed = environment.get("SGLANG_PLUGINS", "")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        yield VERSIONS.problem(
            f"SGLANG_PLUGINS={allowed} does not name {PLUGIN}: SGLang leaves the plugin out, and does not say so",
            f"set SGLANG_PLUGINS={allowed},{PLUGIN}, or unset it",
        )
        return
    try:
        found.load()
    except Exception as error:  # SGLang only logs it
        yield VERSIONS.problem(f"the plugin {found.value} cannot be imported: {error}", "install specpilot again")
        return
    yield VERSIONS.ok(f"SGLang finds the plugin ({found.value})")

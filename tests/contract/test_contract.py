"""What the hooks take for granted of SGLang, held against the source of every supported version."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from specpilot.sglang_hooks import contract, uses
from specpilot.sglang_hooks.contract import Use, moved
from specpilot.sglang_hooks.installed import installed
from specpilot.sglang_hooks.skip_uses import SKIP
from specpilot.sglang_hooks.source import Function, Source, parameters
from specpilot.sglang_hooks.uses import ENTRY, HOOKS, RESULT, RUNNER, SCHEDULER
from tests.contract import wheels
from tests.contract.wheels import VERSIONS, Edited, source

ALL = ENTRY + HOOKS + SKIP
NEWEST = VERSIONS[-1]
WORKER_MODULE = uses.WORKER_MODULE


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("uses", [ENTRY, HOOKS, SKIP], ids=["entry", "hooks", "skip"])
def test_a_supported_version_has_all_that_the_hooks_use(version: str, uses: tuple[Use, ...]) -> None:
    assert moved(uses, source(version), version) == []


def test_wheels_that_cannot_be_had_end_the_download_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels.subprocess, "run", lambda *a, **kw: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match=r"SGLang 0\.5\.17 could not be had .* set PIP_INDEX_URL"):
        wheels.download(tmp_path)
    with pytest.raises(FileNotFoundError, match="run `make test`"):
        source("0.5.17", tmp_path)


# -- what is said of a version to come --

MOVES: list[tuple[str, str, tuple[str, str], str]] = [
    (
        "a parameter is gone",
        WORKER_MODULE,
        ("def verify(self, batch: ScheduleBatch, pp_proxy_tensors=None, grammar_barrier=None)",
         "def verify(self, batch: ScheduleBatch, pp_proxy_tensors=None)"),
        "EAGLEWorkerV2.verify: parameter grammar_barrier is gone in SGLang 0.5.24, "
        "used by sglang_hooks/plugin.py, sglang_hooks/skip.py",
    ),
    (
        "a parameter is new",
        "sglang.srt.managers.scheduler_components.request_receiver",
        ("def _pull_raw_reqs(self)", "def _pull_raw_reqs(self, limit)"),
        "SchedulerRequestReceiver._pull_raw_reqs: parameter limit is new in SGLang 0.5.24, "
        "used by sglang_hooks/plugin.py",
    ),
    (
        "parameters changed places",
        "sglang.srt.mem_cache.memory_pool",
        ("def free(self, req: Req)", "def free(req, self)"),
        "ReqToTokenPool.free: its parameters come in the order req, self in SGLang 0.5.24, "
        "used by sglang_hooks/plugin.py",
    ),
    (
        "a method is gone",
        WORKER_MODULE,
        ("def _stub_skipped_draft_extend(", "def _stub_draft_extend("),
        "EAGLEWorkerV2._stub_skipped_draft_extend: no _stub_skipped_draft_extend in "
        f"{WORKER_MODULE}.EAGLEWorkerV2 any more in SGLang 0.5.24, used by sglang_hooks/plugin.py",
    ),
    (
        "a module is gone",
        "sglang.srt.speculative.adaptive_spec_params",
        ("", ""),
        "adaptive_spec_params.AdaptiveSpeculativeParams: no module sglang.srt.speculative.adaptive_spec_params "
        "any more in SGLang 0.5.24, used by sglang_hooks/plugin.py",
    ),
    (
        "a field is gone",
        "sglang.srt.managers.utils",
        ("speculative_num_draft_tokens:", "num_draft_tokens:"),
        "utils.GenerationBatchResult: attribute speculative_num_draft_tokens is gone in SGLang 0.5.24, "
        "used by sglang_hooks/step_hooks.py, sglang_hooks/agent.py, sglang_hooks/recorder.py",
    ),
    (
        "a member of an enumeration is gone",
        "sglang.srt.model_executor.forward_batch_info",
        ("    DRAFT_EXTEND_V2 =", "    DRAFT_EXTEND ="),
        "forward_batch_info.ForwardMode: attribute DRAFT_EXTEND_V2 is gone in SGLang 0.5.24, "
        "used by sglang_hooks/skip.py, sglang_hooks/resume.py",
    ),
    (
        "K is asked twice for a step",
        WORKER_MODULE,
        ("            self.activate_step_by_batch(batch.seq_lens.shape[0])\n",
         "            self.activate_step_by_batch(batch.seq_lens.shape[0])\n" * 2),
        "EAGLEWorkerV2.forward_batch_generation: it does `self.activate_step_by_batch(batch.seq_lens.shape[0])` "
        "2 times, not once in SGLang 0.5.24, used by sglang_hooks/plugin.py",
    ),
    (
        "K is asked for another batch size",
        WORKER_MODULE,
        ("self.activate_step_by_batch(batch.seq_lens.shape[0])", "self.activate_step_by_batch(batch.batch_size())"),
        "EAGLEWorkerV2.forward_batch_generation: it does `self.activate_step_by_batch(batch.seq_lens.shape[0])` "
        "0 times, not once in SGLang 0.5.24, used by sglang_hooks/plugin.py",
    ),
    (
        "requests are broadcast before they are pulled",
        "sglang.srt.managers.scheduler_components.request_receiver",
        ("        recv_reqs = self._pull_raw_reqs()\n",
         "        recv_reqs = self._broadcast_reqs_across_ranks(recv_reqs, local_reqs)\n"
         "        recv_reqs = self._pull_raw_reqs()\n        if 0:\n            return\n        ()\n"),
        "SchedulerRequestReceiver.recv_requests: it does `self._broadcast_reqs_across_ranks(recv_reqs, ...)` "
        "2 times, not once in SGLang 0.5.24, used by sglang_hooks/plugin.py, sglang_hooks/broadcast.py",
    ),
    (
        "the order of a step changed",
        WORKER_MODULE,
        ("            batch_output = self.verify(\n",
         "            self.draft_worker._draft_extend_for_decode(batch, batch_output)\n"
         "            batch_output = self.verify(\n"),
        "EAGLEWorkerV2.forward_batch_generation: it does "
        "`self.draft_worker._draft_extend_for_decode(batch, batch_output, ...)` 2 times, not once "
        "in SGLang 0.5.24, used by sglang_hooks/plugin.py",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("module", "edit", "says"), [row[1:] for row in MOVES], ids=[row[0] for row in MOVES])
def test_what_moved_is_named_with_who_uses_it(module: str, edit: tuple[str, str], says: str) -> None:
    of_module = [use for use in ALL if use.target.startswith(module)]
    assert says in moved(of_module, Edited(source(NEWEST), module, edit), "0.5.24")


def test_another_order_is_told_from_another_number() -> None:
    use = Use("m.f", "x.py", does=("a()", "b()"))

    class Text(Source):
        def read(self, name: str) -> bytes | None:
            return b"def f():\n  b()\n  a()\n"

    assert moved((use,), Text(Path()), "1") == [
        "m.f: it does `b()` in another order in SGLang 1, used by sglang_hooks/x.py"
    ]


# -- the data is true and complete --


@pytest.mark.parametrize(
    "use", [use for use in ALL if use.since or use.until], ids=lambda use: f"{use.target} {use.by}"
)
def test_a_limit_on_versions_is_needed(use: Use) -> None:
    """Outside of its versions it does not hold: otherwise a version that loses it would not be noticed."""
    everywhere = Use(use.target, use.by, use.forms, use.does, use.has)
    outside = [version for version in VERSIONS if not contract.applies(use, version)]
    assert outside
    assert all(moved((everywhere,), source(version), version) for version in outside)


def test_every_form_is_that_of_a_supported_version() -> None:
    found: dict[Use, set[str]] = {use: set() for use in sorted(ALL, key=lambda use: use.target.split(".")) if use.forms}
    for version in VERSIONS:
        for use, forms in found.items():
            if contract.applies(use, version):
                node = source(version).find(use.target)
                assert isinstance(node, Function)
                forms.add(" ".join(parameters(node)))
    assert [use.target for use, forms in found.items() if forms != set(use.forms)] == []


FOLDER = Path(contract.__file__).resolve().parent
TREES = {path.name: ast.parse(path.read_text()) for path in FOLDER.glob("*.py")}

OWNERS: dict[str, tuple[str, ...]] = {
    "scheduler": (SCHEDULER,),
    "args": ("sglang.srt.server_args.ServerArgs", "Model", "Spec", "Serving", "Parallel"),
    "ranks": ("Parallel", "ParallelState"),
    "batch": (uses.BATCH,),
    "part": (uses.BATCH,),
    "req": (uses.REQ,),
    "last_req": (uses.REQ,),
    "result": (RESULT,),
    "worker": (uses.WORKER,),
    "draft_worker": (uses.DRAFT_WORKER, uses.EAGLE_DRAFT),
    "runner": (RUNNER,),
    "target": (RUNNER,),
    "info": ("EagleDraftInput",),
    "marker": ("EagleVerifyInput",),
    "verify_input": ("EagleVerifyInput",),
    "config": ("ModelConfig",),
    "algorithm": ("SpeculativeAlgorithm",),
    "logits": ("LogitsProcessorOutput",),
    "forward_batch": ("ForwardBatch",),
    "HookRegistry": ("HookRegistry",),
    "ForwardMode": ("ForwardMode",),
    "CaptureHiddenMode": ("CaptureHiddenMode",),
    "envs": ("Envs",),
}
"""Classes behind the names that the hooks give to SGLang's objects."""

NOT_SGLANGS = {("draft_worker", "__dict__"), ("target", "rpartition"), ("part", "append")}
"""Every object's, and other objects of these names."""


def written_down(owner: str, file: str) -> set[str]:
    """Attributes and methods of a class, by its path or its bare name, that the contract says a file uses."""
    names: set[str] = set()
    for use in ALL:
        if file not in use.by.split():
            continue
        path = use.target.split(".")
        if use.target == owner or path[-1] == owner:
            names.update(use.has.split())
        if ".".join(path[:-1]) == owner or path[-2] == owner:
            names.add(path[-1])
    return names


def reads() -> Iterator[tuple[str, str, str]]:
    """(file, name, attribute) of everything read or set on an object of SGLang."""
    for file, tree in TREES.items():
        if file in ("source.py", "contract.py", "uses.py", "skip_uses.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name, attribute = node.value.id, node.attr
                if name in OWNERS and (name, attribute) not in NOT_SGLANGS:
                    yield file, name, attribute


def test_every_attribute_that_the_hooks_touch_is_written_down() -> None:
    missing = [
        f"{file}: {name}.{attribute}"
        for file, name, attribute in reads()
        if not any(attribute in written_down(owner, file) for owner in OWNERS[name])
    ]
    assert sorted(set(missing)) == []
    assert len(set(reads())) > 80


def test_who_is_named_uses_it() -> None:
    wrong = []
    for use in ALL:
        if use.does:
            continue  # what SGLang does by itself, and the hooks rely on
        names = [*use.has.split(), use.target.removesuffix(".__init__").split(".")[-1]]
        for file in use.by.split():
            text = (FOLDER / file).read_text()
            wrong += [f"{file}: {use.target}"] if not any(re.search(rf"\b{name}\b", text) for name in names) else []
    assert wrong == []


def test_every_import_from_sglang_is_written_down() -> None:
    targets = {use.target for use in ALL}
    prefixes = {target.rsplit(".", count)[0] for target in targets for count in (1, 2)}
    imported = {
        f"{node.module}.{alias.name}"
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }
    assert len(imported) > 20
    unknown = sorted(name for name in imported if name not in targets | prefixes | REEXPORTED)
    assert unknown == []


REEXPORTED = {
    "sglang.srt.utils.get_device_name",  # of sglang.srt.utils.common
    "sglang.srt.environ.envs",  # the one Envs
}


@pytest.mark.sglang
def test_every_hooked_function_is_written_down() -> None:
    """Each must have its form there, but for the class that is replaced."""
    from specpilot.sglang_hooks import plugin

    with_forms = {use.target for use in ALL if use.forms}
    assert [target for target in plugin.targets() if target not in with_forms] == [uses.POLICY_CLASS]


# -- the fakes of the other tests are no richer than SGLang --


def test_the_rigs_fake_runner_has_nothing_that_sglangs_lacks() -> None:
    skip_rig = pytest.importorskip("tests.support.skip_rig")
    fake = set(vars(skip_rig.Runner())) | {
        name for name, _ in inspect.getmembers(skip_rig.Runner, inspect.isfunction) if not name.startswith("_")
    }
    assert fake <= source(NEWEST).attributes(RUNNER)


# -- the start, on a version to come --


@pytest.mark.sglang
def test_the_start_on_a_version_to_come_says_whether_its_code_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang

    from specpilot.sglang_hooks import plugin

    monkeypatch.setenv("SPECPILOT_ENDPOINT", "ipc:///tmp/none.ipc")
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(SystemExit, match=r"SGLang 0\.5\.24 is not one of .* \(its code has all that the hooks use\)"):
        plugin.activate()
    _, module, edit, says = MOVES[0]
    monkeypatch.setattr(contract, "installed", lambda: Edited(source(NEWEST), module, edit))
    with pytest.raises(SystemExit, match=re.escape(f"(its code differs: {says})")):
        plugin.activate()


@pytest.mark.sglang
def test_what_moved_ends_the_start_though_the_version_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang

    from specpilot.sglang_hooks import plugin

    monkeypatch.setenv("SPECPILOT_ENDPOINT", "ipc:///tmp/none.ipc")
    monkeypatch.setenv("SPECPILOT_ALLOW_UNTESTED", "1")
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    edited = Edited(source(NEWEST), "sglang.srt.speculative.adaptive_spec_params", ("cfg_path", "config_path"))
    monkeypatch.setattr(contract, "installed", lambda: edited)
    with pytest.raises(SystemExit) as refused:
        plugin.activate()
    text = str(refused.value)
    assert "\n" not in text
    assert "AdaptiveSpeculativeParams.__init__: parameter cfg_path is gone in SGLang 0.5.24" in text
    assert "install one of 0.5.20, 0.5.21, 0.5.22, 0.5.23, or unset SPECPILOT_ENDPOINT" in text
    assert installed.patches == []


def test_the_package_asks_for_the_tested_versions() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    tested = contract.TESTED_VERSIONS
    assert project["optional-dependencies"]["sglang"] == [f"sglang>={tested[0]},<={tested[-1]}"]

"""The neural policy: fitted to a trace, kept in a small file, and no worse than what it is to replace by much."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot.controller.cli import main
from specpilot.controller.config import Config, ControllerConfig, NeuralPolicy, TraceConfig
from specpilot.controller.errors import ConfigError
from specpilot.controller.neural_file import load_model, save_model
from specpilot.controller.replay.policies import ReplayError, parse_policy
from specpilot.controller.replay.run import serve
from specpilot.controller.replay.scenario import Scenario
from specpilot.controller.serve.service import Service
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import Phase, generated_requests
from specpilot.policies.interface import Policy, PolicyError
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.policies.neural import LAYERS, LOAD_FEATURES, TEXT_FEATURES, Context, Model, Net, Neural
from specpilot.sglang_hooks.wire import Hello
from tests.controller.test_replay_trace import Trying, write
from tests.support.messages import hello, record

PATH = tuple(Phase(10.0 * n, "text", acceptance) for n, acceptance in enumerate((0.85, 0.35, 0.6, 0.75, 0.45, 0.9)))
SECONDS = 60.0


def net(inputs: int, outputs: int, bias: list[float] | None = None, past: Any = None) -> Net:
    hidden = 4
    shapes = {
        "first": (inputs, hidden), "first_bias": (hidden,), "second": (hidden, hidden), "second_bias": (hidden,),
        "last": (hidden, outputs), "last_bias": (outputs,), "past": (inputs, outputs),
    }  # fmt: skip
    layers = {name: np.zeros(shape) for name, shape in shapes.items()}
    if bias is not None:
        layers["last_bias"] = np.array(bias)
    if past is not None:
        layers["past"] = np.asarray(past, float)
    return Net(np.zeros(inputs), np.ones(inputs), tuple(layers[name] for name in LAYERS))


def model(seconds: list[float], steps: tuple[int, ...] = (0, 1, 3), per_log_batch: float = 0.0, **of: Any) -> Model:
    """Costs ``seconds`` by K, dearer by ``per_log_batch`` a doubling of the batch and draft; acceptance as of late."""
    past = np.zeros((LOAD_FEATURES, len(steps)))
    past[0] = [per_log_batch * k for k in steps]
    given = {"fingerprints": (fingerprint(hello()),)} | of
    return Model(
        steps, 3, given["fingerprints"], net(LOAD_FEATURES, len(steps), np.log(seconds).tolist(), past),
        net(TEXT_FEATURES + 9, 3),
    )  # fmt: skip


# -- the file --


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    one = model([0.01, 0.012, 0.016], per_log_batch=0.1)
    save_model(one, tmp_path / "m.npz")
    other = load_model(tmp_path / "m.npz")
    assert (other.steps, other.positions, other.fingerprints) == (one.steps, one.positions, one.fingerprints)
    load = np.random.default_rng(1).normal(size=(5, LOAD_FEATURES))
    np.testing.assert_allclose(other.log_seconds(load), one.log_seconds(load), rtol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.npz"]


def test_what_is_no_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    good = model([0.01, 0.012, 0.016]).arrays()
    cases: dict[str, dict[str, Any]] = {
        "it lacks": {name: array for name, array in good.items() if name != "text.past"},
        "version 2": good | {"version": np.array(2)},
        "do not rise": good | {"steps": np.array([3, 1, 0])},
        "positions for K=9": good | {"steps": np.array([0, 1, 9])},
        "have shapes": good | {"seconds.first": np.zeros((2, 2))},
        "no numbers": good | {"seconds.last_bias": np.full(3, np.nan)},
    }
    path = tmp_path / "m.npz"
    for says, arrays in cases.items():
        np.savez(path, **arrays)
        with pytest.raises(ConfigError, match=says):
            load_model(path)
    np.savez(path, version=np.array(1), steps=np.array([object()]))
    with pytest.raises(ConfigError, match="no model of specpilot fit-neural"):
        load_model(path)
    for content in (b"", b"PK\x03\x04 torn", b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="no model of specpilot fit-neural"):
            load_model(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_model(tmp_path / "none.npz")


def test_a_controller_without_its_model_does_not_start(tmp_path: Path) -> None:
    config = Config(
        controller=ControllerConfig(endpoint=f"ipc://{tmp_path}/c.ipc"),
        policy=NeuralPolicy(str(tmp_path / "none.npz")),
        trace=TraceConfig(directory=""),
    )
    with pytest.raises(ConfigError, match=r"policy\.model"):
        Service(config)
    save_model(model([0.01, 0.012, 0.016]), tmp_path / "none.npz")
    Service(config)._endpoint.close()


# -- decisions --


def test_it_chooses_by_value_in_every_cell() -> None:
    """Drafts cost nothing at batch 1 and are dear at 64; three in four are accepted."""
    policy = Neural(model([0.01, 0.0101, 0.0102], per_log_batch=0.1))
    server = hello()
    policy.decide(server, 0.0)
    for seq in range(200):
        policy.learn(record(record_seq=seq, accepted_drafts=[3, 3, 3, 0]))
    plan = policy.decide(server, 1.0)
    columns = plan.grid.shape[1]
    by_batch = [plan.choice[row * columns] for row in range(plan.grid.shape[0])]
    assert by_batch[0] == 3
    assert by_batch[-1] == 0
    assert by_batch == sorted(by_batch, reverse=True)
    assert "drafts accepted 0.7" in plan.reason
    # Where it skips it probes, and nowhere else.
    assert set(plan.explore) == {cell for cell, k in enumerate(plan.choice) if k == 0}
    assert all(0 < p < 0.02 and k in (1, 3) for row in plan.explore.values() for k, p in row)
    assert all(own not in kept for own, kept in zip(plan.choice, plan.keep, strict=True))


def test_text_that_changes_changes_the_choice() -> None:
    policy = Neural(model([0.01, 0.012, 0.0135]))
    server = hello()
    policy.decide(server, 0.0)
    chosen = []
    for accepted in ([3, 3], [0, 0], [3, 3]):
        for seq in range(4000):
            policy.learn(record(record_seq=seq, accepted_drafts=accepted))
        assert policy.urgent or seq % 32
        chosen.append(policy.decide(server, 1.0).choice[0])
    assert chosen == [3, 0, 3]


def test_full_memory_bounds_it() -> None:
    policy = Neural(model([0.01, 0.0101, 0.0102]))
    server = hello(kv_tokens=1000)
    policy.decide(server, 0.0)
    policy.learn(record(kv_used_tokens=995, accepted_drafts=[3, 3]))
    plan = policy.decide(server, 1.0)
    assert set(plan.choice) == {0}
    assert not plan.explore
    assert "KV cache" in plan.reason


def test_servers_that_it_was_not_fitted_to_are_refused() -> None:
    with pytest.raises(PolicyError, match="fit-neural"):
        Neural(model([0.01, 0.012, 0.016])).decide(hello(gpu="another"), 0.0)
    with pytest.raises(PolicyError, match="fewer than two in common"):
        Neural(model([0.01, 0.012, 0.016])).decide(hello(candidate_steps=[0, 2]), 0.0)


def test_the_context_forgets_and_counts() -> None:
    context = Context(positions=3, topk=1)
    for seq in range(400):
        context.steps_of(record(record_seq=seq))
        context.learn(record(record_seq=seq, accepted_drafts=[3, 3], queued=5))
    assert context.since_switch == 399
    assert context.queued == pytest.approx(5.0, rel=1e-3)
    assert context.accepted() == pytest.approx([0.99] * 3, abs=0.02)
    assert context.generated == pytest.approx(1600.0)
    context.steps_of(record(steps=0, draft_tokens=1))
    context.learn(record(steps=0, draft_tokens=1, accepted_drafts=[0, 0], truncated=[0]))
    assert context.since_switch == 0
    assert context.generated == pytest.approx(800.5)
    assert context.accepted() == pytest.approx([0.99] * 3, abs=0.02)  # K=0 tells nothing of drafts
    for seq in range(3000):
        context.learn(record(record_seq=seq, accepted_drafts=[0, 0]))
    assert context.accepted()[0] < 0.05


# -- fitted --


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("fitted")
    made: list[Trying] = []

    def make(server: Hello, truth: object) -> Policy:
        made.append(Trying(folder / "trace", server))
        return made[-1]

    serve("trying", scenario(seed=1, concurrency=12), make)
    made[0].write()
    assert (
        main(["fit-neural", str(folder / "trace"), "-o", str(folder / "m.npz"), "--json", str(folder / "r.json")]) == 0
    )
    return folder


def scenario(seed: int, concurrency: int) -> Scenario:
    requests = generated_requests(300, seed)
    return Scenario(load_surface("h200-sglang"), requests, SECONDS, seed, concurrency=concurrency, acceptance=PATH)


def test_a_fitted_model_is_small_and_says_how_good_it_is(fitted: Path) -> None:
    report = json.loads((fitted / "r.json").read_text())
    assert (fitted / "m.npz").stat().st_size < 40_000
    assert set(report["seconds_error"]) == {"0", "1", "2", "3", "5", "7"}
    assert max(report["seconds_error"].values()) < 0.03
    assert report["text_loss"] < report["text_loss_of_late"] + 0.01
    assert report["left_out"] == []


def test_on_other_seeds_it_comes_near_the_best_k(fitted: Path) -> None:
    policy = f"neural:{fitted / 'm.npz'}"
    own = scenario(seed=9, concurrency=12)
    judged = own.judge(serve(policy, own).decodes)
    assert judged.reference_share() > 0.96
    assert judged.exploration_loss() < 0.006


def test_the_fit_repeats_itself(fitted: Path, tmp_path: Path) -> None:
    assert main(["fit-neural", str(fitted / "trace"), "-o", str(tmp_path / "m.npz")]) == 0
    one, other = (load_model(path).arrays() for path in (fitted / "m.npz", tmp_path / "m.npz"))
    for name, array in one.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, other[name], rtol=1e-3, atol=1e-4)


def test_what_cannot_be_fitted_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    write(tmp_path / "one", [record(record_seq=n, step=n + 1, time=1e9 + n, seconds=0.01) for n in range(600)])
    output = tmp_path / "m.npz"
    for arguments, says in (
        ([str(tmp_path / "one"), "-o", str(output)], "256 are needed of two K at least"),
        ([str(tmp_path / "none"), "-o", str(output)], "No such file"),
    ):
        assert main(["fit-neural", *arguments]) == 2
        assert says in capsys.readouterr().err
    assert not output.exists()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["fit-neural", str(tmp_path / "one"), "-o", str(output)]) == 2
    assert "pip install '.[neural]'" in capsys.readouterr().err


def test_the_figures_of_the_documentation() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs/offline.md").read_text()
    figures = json.loads((root / "benchmarks/neural_vs_goodput.json").read_text())
    rows = {(row["policy"], row["surface"]): row for row in figures["summary"] if row["load"] is None}
    for surface in (figures["fitted_to"], figures["held_out_surface"]):
        policies = ("goodput", "goodput, stored prior", "neural")
        goodput, stored, neural = (rows[policy, surface] for policy in policies)
        difference = neural["minus goodput"]
        points = f"{difference['points']:.2f} ± {difference['half_width']:.2f}".replace("-", "\N{MINUS SIGN}")
        shares = " | ".join(f"{100 * row['share_of_best']:.2f} %" for row in (goodput, stored, neural))
        assert f"| {shares} | {points} |" in text
    assert f"{figures['fit']['records']:,} records" in text
    assert figures["date"] in text


def test_replay_names_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="must follow the colon"):
        parse_policy("neural")
    with pytest.raises(ConfigError, match="No such file"):
        parse_policy(f"neural:{tmp_path}/none.npz")

"""The measured gain: intervals that hold, a truth that is found, a losing policy that is suspended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from specpilot.controller.config import (
    Config,
    ControllerConfig,
    GoodputPolicy,
    PriorConfig,
    StaticPolicy,
    SwitchbackConfig,
    TraceConfig,
    load_config,
)
from specpilot.controller.errors import ConfigError
from specpilot.controller.replay.in_process import InProcessAgent
from specpilot.controller.serve.service import Service
from specpilot.controller.serve.switchback import (
    CLAIM_PAIRS,
    KEPT_PAIRS,
    Arm,
    Switchback,
    SwitchbackStatus,
    measure,
    multiplier,
)
from specpilot.controller.simulation.clock import VirtualClock
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.server import SimServer
from specpilot.controller.simulation.surface import acceptance_length
from specpilot.controller.simulation.workload import Arrival, KeyedDraws, Phase, Workload, generated_requests
from specpilot.policies.interface import Plan, PolicyError
from specpilot.policies.static import Static
from specpilot.sglang_hooks.link import Delivery
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import CompiledTable, TablePolicy
from specpilot.sglang_hooks.wire import (
    DecisionSource,
    DecisionTable,
    Hello,
    HookState,
    Lease,
    StepBatch,
    StepRecord,
    encode,
)
from tests.support.messages import hello, record

BATCH = 8
ACCEPTANCE = 0.7
SURFACE = load_surface("h200-sglang").speculating


def truth(steps: int, fallback: int) -> float:
    """Gain of one K over another at a closed loop of BATCH requests with contexts around 700 tokens."""
    rates = [acceptance_length(ACCEPTANCE, k) / SURFACE.decode_seconds(k, BATCH, 700.0) for k in (steps, fallback)]
    return rates[0] / rates[1] - 1.0


# -- statistics --


def test_the_interval_holds_however_often_one_looks() -> None:
    """A tie of 60 pairs, looked at after every one: fewer than 5 % of runs ever exclude it, 2.5 % as a loss."""
    rng = np.random.default_rng(1)
    runs = 4000
    for noise in (rng.normal(size=(runs, 60)), rng.standard_t(5, size=(runs, 60))):
        counts = np.arange(1, 61)
        means = noise.cumsum(axis=1) / counts
        squares = (noise**2).cumsum(axis=1) - counts * means**2
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.sqrt(np.maximum(squares, 0.0) / (counts - 1) / counts)
        reach = np.array([multiplier(int(n)) if n >= CLAIM_PAIRS else np.inf for n in counts])
        losing = (means + reach * errors < 0.0)[:, CLAIM_PAIRS - 1 :].any(axis=1).mean()
        gaining = (means - reach * errors > 0.0)[:, CLAIM_PAIRS - 1 :].any(axis=1).mean()
        assert losing < 0.025 + 0.005
        assert losing + gaining < 0.05 + 0.007


def test_a_measure_is_symmetric_in_the_arms() -> None:
    ratios = [0.1, 0.03, 0.07, 0.08, 0.02]
    gain, loss = measure(ratios), measure([-ratio for ratio in ratios])
    assert (1 + gain.gain) * (1 + loss.gain) == pytest.approx(1.0)
    assert (1 + gain.low) * (1 + loss.high) == pytest.approx(1.0)


# -- the schedule --


def arms(config: SwitchbackConfig, seconds: float, seed: int = 1, turn: float = 0.1) -> list[Arm]:
    switchback = Switchback(config, hello(), seed, 0.0)
    return [switchback.arm(turn * n) for n in range(round(seconds / turn))]


def test_the_chosen_share_of_time_is_spent_half_in_each_arm() -> None:
    config = SwitchbackConfig(share=0.2, block_seconds=10.0, washout_seconds=1.0)
    course = arms(config, 20_000.0)
    assert np.mean([arm is Arm.FALLBACK for arm in course]) == pytest.approx(0.1, abs=0.002)
    changes = [n for n in range(1, len(course)) if course[n] is not course[n - 1]]
    lengths = [b - a for a, b in zip(changes[::2], changes[1::2], strict=False)]
    assert set(lengths) <= {100, 101}
    # The place of a pair in its period is drawn: no rhythm of the load can follow it.
    gaps = [b - a for a, b in zip(changes[::2], changes[2::2], strict=False)]
    assert np.std(gaps) > 200
    assert course == arms(config, 20_000.0)
    assert course != arms(config, 20_000.0, seed=2)


def test_the_order_in_a_pair_is_drawn() -> None:
    config = SwitchbackConfig(share=1.0, block_seconds=10.0, washout_seconds=1.0)
    course = arms(config, 8_000.0, turn=1.0)
    pairs = [(course[n + 5], course[n + 15]) for n in range(0, 7_900, 20)]
    assert {len(set(pair)) for pair in pairs} == {2}
    assert np.mean([pair[0] is Arm.POLICY for pair in pairs]) == pytest.approx(0.5, abs=0.1)


def test_only_a_blocks_own_steps_count() -> None:
    config = SwitchbackConfig(share=1.0, block_seconds=10.0, washout_seconds=2.0)
    switchback = Switchback(config, hello(), 1, 0.0)
    switchback.arm(0.0)
    switchback.decided(epoch=4)
    own = {"epoch": 4, "source": DecisionSource.TABLE}
    for now, changes in (
        (1.9, own),  # washout
        (5.0, own | {"epoch": 3}),  # still under the table before
        (5.0, own | {"source": DecisionSource.STALE}),
        (5.0, own | {"forwards": 2}),
        (5.0, own | {"after_idle": True}),
        (5.0, own | {"accepted_drafts": [-1, -1]}),
        (10.0, own),  # the block is over
    ):
        switchback.learn(record(**changes), now)
    assert switchback._block is not None
    assert switchback._block.by_batch == {}
    switchback.learn(record(**own, accepted_drafts=[3, -1]), 5.0)
    assert switchback._block.by_batch == {2: [1.0, 8.0, 0.01]}


# -- through the controller --


class Rig:
    """A simulated server and the controller's service in one virtual time; ``turn`` moves both."""

    def __init__(
        self,
        folder: Path,
        policy: Any,
        switchback: SwitchbackConfig,
        fallback: int = 3,
        prior: str | None = None,
        mode: str = "control",
        requests: list[Arrival] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.wall_offset = 1e9
        self.config = Config(
            controller=ControllerConfig(endpoint=f"ipc://{folder}/c.ipc"),
            policy=policy,
            trace=TraceConfig(directory=""),
            prior=PriorConfig(directory=str(folder / "prior") if prior is None else prior),
            switchback=switchback,
        )
        self.sent: list[tuple[float, object]] = []
        self.records: list[StepRecord] = []
        self.service = self._service()
        settings = Settings(server_id="s", queue_records=1 << 62, mode=mode)
        self.agent = InProcessAgent(settings, TablePolicy(settings, SURFACE.steps, fallback, self.clock.now))
        lengths = requests or generated_requests(400, seed=2)
        self.issued = BATCH

        def on_end(req: object, at: float) -> Arrival:
            self.issued += 1
            return Arrival(at, *msgspec.structs.astuple(_Lengths.of(lengths[self.issued % len(lengths)])))

        first = tuple(Arrival(0.0, one.prompt_tokens, one.output_tokens) for one in lengths[:BATCH])
        self.server = SimServer(
            settings,
            Workload(first, (Phase(0.0, "text", ACCEPTANCE),)),
            SURFACE,
            KeyedDraws(7),
            self.clock,
            agent=self.agent,
            max_running_requests=BATCH,
            on_end=on_end,
        )
        self.server.start()
        self.receive(self.agent.hello())
        self._reported_at = 0.0

    def _service(self) -> Service:
        service = Service(self.config, self.clock.now, lambda: self.wall_offset + self.clock.now())
        service._endpoint.send = lambda address, message: self._deliver(message)  # type: ignore[method-assign]
        return service

    def receive(self, message: Any) -> None:
        self.service._receive([b"peer", encode(message)])

    def _deliver(self, message: object) -> None:
        now = self.clock.now()
        self.sent.append((now, message))
        if isinstance(message, DecisionTable):
            compiled = CompiledTable.compile(message, self.agent.policy.candidate_steps)
            self.agent.mailbox.tables.append(Delivery(compiled, now + message.lease_seconds, now))
        elif isinstance(message, Lease):
            self.agent.mailbox.lease = (message.epoch, now + message.lease_seconds)

    def run(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end and not until():
            self.server.turn()
            if records := self.agent.records.take(self.agent.records.waiting()):
                self.records += records
                self.receive(StepBatch(list(records), 0))
            if self.clock.now() - self._reported_at >= 1.0:
                self._reported_at = self.clock.now()
                policy = self.agent.policy
                epoch = policy.table.epoch if policy.table is not None else 0
                self.receive(
                    HookState(self.agent.hello().instance, policy.source, epoch, epoch, 1, policy.applied_steps,
                              policy.forward_iter, {}, "")
                )  # fmt: skip
            self.service._tend()

    def restart_controller(self) -> None:
        """A new one in the place of the old, which had no time to say anything."""
        self.service._endpoint.close()
        self.service = self._service()
        epoch = self.agent.policy.table.epoch if self.agent.policy.table is not None else 0
        self.receive(msgspec.structs.replace(self.agent.hello(), epoch=epoch))

    @property
    def shown(self) -> SwitchbackStatus:
        (status,) = self.service.status().servers
        assert status.switchback is not None
        return status.switchback

    @property
    def off_seconds(self) -> float:
        """As ``shown.off_seconds``, without all the rest of a status."""
        switchback = self.service._sessions["s/0"].switchback
        assert switchback is not None
        return switchback.status(self.clock.now()).off_seconds

    @property
    def note(self) -> str:
        return self.service.status().servers[0].note

    def close(self) -> None:
        if not self.service._endpoint.socket.closed:
            self.service.stop()
            self.service.run()


class _Lengths(msgspec.Struct):
    prompt: int
    output: int

    @staticmethod
    def of(arrival: Arrival) -> _Lengths:
        return _Lengths(arrival.prompt_tokens, arrival.output_tokens)


SHORT = SwitchbackConfig(share=1.0, block_seconds=4.0, washout_seconds=0.5, retry_seconds=120.0)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []
    # Which block comes first is drawn: every run of a test draws alike.
    monkeypatch.setattr("specpilot.controller.serve.session.secrets.randbits", lambda bits: 20261129)

    def make(*arguments: Any, **options: Any) -> Rig:
        made.append(Rig(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.slow
def test_the_gain_that_is_measured_is_the_true_one(rig: Callable[..., Rig]) -> None:
    """K=3 against a fallback of K=1, whose tokens per second at batch 8 the surface tells."""
    one = rig(StaticPolicy(3), SHORT, fallback=1)
    one.run(20.0)
    assert one.shown.measured is None
    assert f"not known yet: 2 of {CLAIM_PAIRS} pairs" in one.shown.text
    one.run(300.0)
    shown = one.shown
    assert shown.pairs >= 36
    assert shown.pairs_unmatched <= 1
    assert shown.measured is not None
    true = truth(3, 1)
    assert true > 0.1
    assert shown.measured.low < true < shown.measured.high
    assert shown.measured.gain == pytest.approx(true, abs=0.03)
    assert shown.measured.low > 0.0
    assert shown.text.startswith(f"gaining {100 * shown.measured.gain:.1f} % (")
    assert one.note == ""


@pytest.mark.slow
def test_leases_and_epochs_go_on_undisturbed(rig: Callable[..., Rig]) -> None:
    one = rig(GoodputPolicy(), SHORT)
    one.run(120.0)
    assert one.agent.policy.lease_expiries == 0
    tables = [message for _, message in one.sent if isinstance(message, DecisionTable)]
    epochs = [table.epoch for table in tables]
    assert epochs == list(range(1, len(epochs) + 1))
    assert {table.policy for table in tables} == {"goodput", "fallback"}
    assert all(len(table.choice) == 1 and not table.explore for table in tables if table.policy == "fallback")
    leases = [at for at, message in one.sent if isinstance(message, DecisionTable | Lease)]
    assert max(np.diff(leases)) < 5.0 / 3 + 0.5
    fallback = {table.epoch for table in tables if table.policy == "fallback"}
    assert {step.steps for step in one.records if step.epoch in fallback} == {3}
    # The learner took in every step, whoever had decided it.
    policy = one.service._sessions["s/0"].policy
    assert policy._applied is not None  # type: ignore[attr-defined]
    assert one.service.status().servers[0].records == len(one.records)


@pytest.mark.slow
def test_a_losing_policy_is_suspended_and_tried_again(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    one = rig(StaticPolicy(1), SHORT, fallback=3)
    assert truth(1, 3) < -0.02
    one.run(600.0, until=lambda: one.off_seconds)
    shown, off_at = one.shown, one.clock.now()
    assert shown.off_seconds == pytest.approx(120.0, abs=0.5)
    assert shown.arm == "fallback"
    assert shown.measured is not None
    assert shown.measured.high < 0.0
    assert shown.measured.gain == pytest.approx(truth(1, 3), abs=0.03)
    assert "losing" in one.note
    assert "tried again in" in one.note
    begun = len(one.records)
    one.run(118.0)
    assert {step.steps for step in one.records[begun + 60 :]} == {3}
    assert one.agent.policy.lease_expiries == 0
    said = [entry.getMessage() for entry in caplog.records if "losing" in entry.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("s/0: the policy is losing")
    one.run(30.0)
    assert one.clock.now() - off_at > 120.0
    assert one.shown.off_seconds == 0.0
    assert one.note == ""
    assert 1 in {step.steps for step in one.records[-2000:]}
    assert any("is tried again" in entry.getMessage() for entry in caplog.records)
    one.run(600.0, until=lambda: one.off_seconds)
    assert one.shown.off_seconds > 0.0


def test_a_second_trial_runs_its_pairs_one_after_the_other(rig: Callable[..., Rig]) -> None:
    slow = msgspec.structs.replace(SHORT, share=0.05)
    one = rig(StaticPolicy(1), slow)
    session = one.service._sessions["s/0"]
    assert session.switchback is not None
    session.switchback._off_until = 1.0
    one.run(60.0)
    assert one.shown.pairs + one.shown.pairs_unmatched >= 5


def test_nothing_is_claimed_without_pairs(rig: Callable[..., Rig]) -> None:
    one = rig(StaticPolicy(3), msgspec.structs.replace(SHORT, share=0.001), fallback=1)
    one.run(30.0)
    assert one.shown.measured is None
    assert (one.shown.pairs, one.shown.off_seconds) == (0, 0.0)
    assert one.shown.text == f"not known yet: 0 of {CLAIM_PAIRS} pairs of blocks measured"


@pytest.mark.slow
def test_a_tie_is_no_gain_and_no_loss(rig: Callable[..., Rig]) -> None:
    one = rig(StaticPolicy(3), SHORT, fallback=3)
    one.run(200.0)
    shown = one.shown
    assert shown.pairs >= 20
    assert shown.measured is not None
    assert shown.measured.low < 0.0 < shown.measured.high
    assert shown.text.startswith(f"no difference shown, {100 * shown.measured.gain:+.1f} % (")
    assert shown.off_seconds == 0.0
    # Equal tables are not sent again at every block.
    assert len([message for _, message in one.sent if isinstance(message, DecisionTable)]) == 1


def test_it_is_off_by_default_and_in_shadow_mode(rig: Callable[..., Rig]) -> None:
    one = rig(StaticPolicy(3), SwitchbackConfig())
    one.run(5.0)
    assert one.service.status().servers[0].switchback is None
    one.service._endpoint.close()
    two = rig(StaticPolicy(3), SHORT, mode="shadow")
    two.run(5.0)
    assert two.service.status().servers[0].switchback is None


@pytest.mark.slow
def test_a_restarted_controller_goes_on_with_what_was_measured(rig: Callable[..., Rig], tmp_path: Path) -> None:
    one = rig(StaticPolicy(3), SHORT, fallback=1)
    one.run(100.0)
    before = one.shown
    assert before.pairs >= 10
    one.restart_controller()
    after = one.shown
    assert after.pairs == before.pairs
    assert after.measured == before.measured
    one.run(20.0)
    assert one.shown.pairs > before.pairs
    # What another policy measured is none of this one's.
    one.config = msgspec.structs.replace(one.config, policy=StaticPolicy(2))
    one.restart_controller()
    assert one.shown.pairs == 0


@pytest.mark.slow
def test_a_restart_does_not_bring_a_losing_policy_back(rig: Callable[..., Rig]) -> None:
    one = rig(StaticPolicy(1), SHORT)
    one.run(600.0, until=lambda: one.off_seconds)
    one.run(40.0)
    left = one.shown.off_seconds
    one.restart_controller()
    assert one.shown.off_seconds == pytest.approx(left, abs=0.5)
    assert one.shown.arm == "fallback"
    one.run(1.0)
    assert one.agent.policy.applied_steps == 3
    # A wall clock that was set back does not keep it off for longer than a whole turn.
    one.wall_offset -= 1e6
    one.restart_controller()
    assert one.shown.off_seconds == pytest.approx(120.0)


def test_what_cannot_be_read_is_measured_anew(rig: Callable[..., Rig], tmp_path: Path) -> None:
    one = rig(StaticPolicy(3), SHORT, fallback=1)
    one.run(60.0)
    (path,) = (tmp_path / "prior").glob("*.switchback.json")
    path.write_text('{"identity": 3}')
    one.restart_controller()
    assert one.shown.pairs == 0
    one.run(20.0)
    assert one.service.status().prior_error == ""
    assert b"log_ratios" in path.read_bytes()


def test_a_restarted_server_ends_the_pair_and_keeps_the_rest(rig: Callable[..., Rig]) -> None:
    one = rig(StaticPolicy(3), SHORT, fallback=1)
    one.run(61.0)
    before = one.shown
    one.clock.sleep(3.0)  # it was gone for so long
    one.receive(msgspec.structs.replace(one.agent.hello(), instance="another"))
    assert one.shown.pairs == before.pairs
    assert one.shown.pairs_unmatched == before.pairs_unmatched + 1


def test_a_controller_that_was_stopped_throws_the_pair_away() -> None:
    config = SwitchbackConfig(share=1.0, block_seconds=10.0, washout_seconds=1.0)
    switchback = Switchback(config, hello(), 1, 0.0)
    switchback.arm(0.0)
    switchback.arm(500.0)
    status = switchback.status(500.0)
    assert (status.pairs, status.pairs_unmatched) == (0, 1)


def test_a_policy_that_cannot_serve_is_left_to_its_fallback(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(self: Static, server: Hello, now: float) -> Plan:
        raise PolicyError("cannot")

    monkeypatch.setattr(Static, "decide", decide)
    one = rig(StaticPolicy(3), SHORT)
    one.run(20.0)
    assert "cannot" in one.note
    assert one.shown.pairs == 0
    assert not [message for _, message in one.sent if isinstance(message, DecisionTable)]


def test_old_pairs_are_forgotten() -> None:
    switchback = Switchback(SHORT, hello(), 1, 0.0)
    switchback._log_ratios.extend([0.5] * 10 + [0.1, 0.12] * (KEPT_PAIRS // 2))
    assert switchback.measured is not None
    assert switchback.measured.gain < 0.13


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[switchback]\nshare = 1.5", "share"),
        ("[switchback]\nblock_seconds = 0", "block_seconds"),
        ("[switchback]\nblock_seconds = 5\nwashout_seconds = 5", "washout_seconds = 5 must be smaller"),
    ],
)
def test_a_wrong_key_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "controller.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(path)

"""``specpilot fit-neural``: the nets of ``policies/neural.py``, fitted to traces with torch, and their file.

One pass over the trace keeps, of each K, a random sample of its steps (so memory does not depend on the length),
with the context as it was *before* the step. Then both nets are fitted on the CPU:

- seconds: Huber loss of the log, of steps whose time is their own, weighted by 1 / (the logged probability of
  that K), so that each K is fitted to the states that the server was in, not to those in which it was chosen.
- text: the likelihood of accepted and refused drafts, exactly censored. Every step tells it of all smaller K.

Every tenth stretch of 1,000 records is held out; the report is about those.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from specpilot.controller.errors import ConfigError
from specpilot.controller.files import write_json
from specpilot.controller.neural_file import save_model
from specpilot.controller.trace.checked_reader import read_source
from specpilot.controller.trace.findings import Findings
from specpilot.controller.trace.format import records
from specpilot.controller.trace.reader import TraceError
from specpilot.controller.trace.sources import single_source
from specpilot.policies.models.cost import fit_to_learn
from specpilot.policies.models.trials import trials_of
from specpilot.policies.neural import LAYERS, LOAD_FEATURES, TEXT_FEATURES, Context, Model, Net
from specpilot.sglang_hooks.wire import Hello, StepRecord

KEPT_STEPS = 40_000
"""Steps kept of each K, drawn evenly from all of them; enough for nets of a few thousand weights."""
HELD_OUT_EVERY, STRETCH = 10, 1000
"""Records next to each other are alike: whole stretches are held out, not single records."""
LEAST_STEPS = 256
"""Steps with a time of their own that a K needs to be in the model."""
MOST_WEIGHT = 50.0
"""Largest weight of one step, 1 / probability: rarer draws count no more, or a handful of steps would be the fit."""
HIDDEN = 24
BATCH, PASSES, RATE = 1024, 24, 4e-3
DECAY = 1e-4

Float = npt.NDArray[np.float64]


class NeuralFitReport(msgspec.Struct, frozen=True):
    """How well a model does on what was held out."""

    server: str
    """The server's name, NAME/RANK."""
    fingerprint: str
    records: int
    """Records that were read and passed the checks."""
    steps: dict[str, int]
    """Records kept by K."""
    left_out: list[int]
    """K of the server with too few steps to learn from: not in the model."""
    seconds_error: dict[str, float]
    """Median absolute error of a step's seconds, relative, by K."""
    text_loss: float
    """Loss of the model's acceptance, in nats per draft."""
    text_loss_of_late: float
    """Loss of the recent acceptance alone, in nats per draft."""
    findings: list[str]


def fit_neural(traces: Sequence[Path], output: Path, server: str | None, json: Path | None, console: Console) -> int:
    """Fit a model to ``traces``, write it and say how good it is; return the exit code."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"fit-neural fits with torch ({error}), which the controller does not need: "
            "pip install '.[neural]' in Specpilot's checkout"
        ) from error
    try:
        model, report = fit(traces, server)
    except TraceError as error:
        raise ConfigError(str(error)) from error
    save_model(model, output)
    if json is not None:
        write_json(json, report)
    for line in _lines(report, output):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _lines(report: NeuralFitReport, output: Path) -> Iterator[str]:
    yield f"{output}: {output.stat().st_size:,} bytes, fitted to {report.records:,} records of {report.server}"
    errors = ", ".join(f"K={k} {100 * error:.1f} %" for k, error in report.seconds_error.items())
    yield f"on what was held out, seconds are off by (median): {errors}"
    yield (
        f"and a draft costs {report.text_loss:.4f} nats, {report.text_loss_of_late:.4f} by the recent acceptance alone"
    )
    if report.left_out:
        yield f"K={', '.join(map(str, report.left_out))} ran too seldom: not in the model, and never chosen"
    yield from report.findings


# -- samples --


@dataclass
class Samples:
    """Steps of one K as arrays by step; ``log_seconds`` is NaN where the time was not the step's own."""

    load: Float
    text: Float
    weight: Float
    log_seconds: Float
    trials: Float
    passed: Float
    held_out: npt.NDArray[np.bool_]

    @staticmethod
    def room(count: int, positions: int) -> Samples:
        """Return room for ``count`` steps."""
        return Samples(
            np.zeros((count, LOAD_FEATURES)),
            np.zeros((count, TEXT_FEATURES + 3 * positions)),
            np.zeros(count),
            np.full(count, np.nan),
            np.zeros((count, positions)),
            np.zeros((count, positions)),
            np.zeros(count, bool),
        )

    def first(self, count: int) -> Samples:
        """Return the first ``count`` steps."""
        return Samples(*(column[:count] for column in vars(self).values()))


class Sampler:
    """One pass: contexts as they were before each step, and of each K an even random sample (Vitter's R, 1985)."""

    def __init__(self, server: Hello, positions: int, rng: np.random.Generator) -> None:
        self._context = Context(positions, server.topk)
        self._positions = positions
        self._rng = rng
        self._samples: dict[int, Samples] = {}
        self._previous: StepRecord | None = None
        self.seen: dict[int, int] = {}
        self.timed: dict[int, int] = {}
        self.records = 0

    def learn(self, step: StepRecord, follows: bool) -> None:
        """Take the next record."""
        context, before = self._context, self._previous if follows else None
        self._previous = step
        steps = context.steps_of(step)
        if steps is not None and step.batch_size and step.probability > 0.0:
            self._keep(step, steps, before)
        context.learn(step)
        self.records += 1

    def _keep(self, step: StepRecord, steps: int, before: StepRecord | None) -> None:
        if before is not None:
            # The first step after a switch tells what that costs: the feature says that it is one.
            before = msgspec.structs.replace(before, draft_tokens=step.draft_tokens)
        timed = fit_to_learn(step, before)
        seen = self.seen[steps] = self.seen.get(steps, 0) + 1
        self.timed[steps] = self.timed.get(steps, 0) + timed
        place = seen - 1 if seen <= KEPT_STEPS else int(self._rng.integers(seen))
        if place >= KEPT_STEPS:
            return
        if steps not in self._samples:
            self._samples[steps] = Samples.room(KEPT_STEPS, self._positions)
        kept, context = self._samples[steps], self._context
        batch = np.array([float(step.padded_batch_size or step.batch_size)])
        mean_context = np.array([step.context_tokens / step.batch_size])
        kept.load[place] = context.load(batch, mean_context, np.array([float(context.since_switch)]))[0]
        kept.text[place] = context.text(batch, mean_context)[0]
        kept.weight[place] = min(1.0 / step.probability, MOST_WEIGHT)
        kept.log_seconds[place] = np.log(step.seconds) if timed else np.nan
        trials, passed = trials_of(step, self._positions)
        kept.trials[place] = kept.passed[place] = 0.0
        kept.trials[place, : len(trials)] = trials
        kept.passed[place, : len(passed)] = passed
        kept.held_out[place] = self.records // STRETCH % HELD_OUT_EVERY == HELD_OUT_EVERY - 1

    def samples(self) -> dict[int, Samples]:
        """Return what was kept of each K, rising."""
        return {k: kept.first(min(self.seen[k], KEPT_STEPS)) for k, kept in sorted(self._samples.items())}


# -- fitting --


def fit(traces: Sequence[Path], server: str | None = None, seed: int = 1) -> tuple[Model, NeuralFitReport]:
    """Return a model of one server's traces, and how good it is; TraceError says why there can be none."""
    findings = Findings()
    source = single_source(traces, server, findings)
    positions = max(*source.hello.candidate_steps, 1)
    sampler = Sampler(source.hello, positions, np.random.default_rng(seed))
    for chunk in read_source(source, findings):
        for step, follows in zip(records(chunk.columns.batch), chunk.follows.tolist(), strict=True):
            sampler.learn(step, follows)
    candidates = sorted(source.hello.candidate_steps)
    known = [k for k in candidates if sampler.timed.get(k, 0) >= LEAST_STEPS]
    if len(known) < 2:
        seen = ", ".join(f"K={k} {sampler.timed.get(k, 0):,}" for k in candidates)
        raise TraceError(
            f"the trace of {source.server} has steps fit to learn from of: {seen}. {LEAST_STEPS} are needed of two K "
            "at least: record with a policy that explores"
        )
    samples = {k: own for k, own in sampler.samples().items() if k in candidates}
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower on several
    try:
        model, losses = _fitted(samples, known, positions, source.fingerprint, seed)
    finally:
        torch.set_num_threads(threads)
    report = NeuralFitReport(
        server=source.server,
        fingerprint=source.fingerprint,
        records=sampler.records,
        steps={str(k): len(samples[k].weight) for k in known},
        left_out=[k for k in candidates if k not in known],
        seconds_error={str(k): _seconds_error(model, samples[k], known.index(k)) for k in known},
        text_loss=losses[0],
        text_loss_of_late=losses[1],
        findings=findings.lines(),
    )
    return model, report


def _fitted(
    samples: dict[int, Samples], known: list[int], positions: int, key: str, seed: int
) -> tuple[Model, tuple[float, float]]:
    timed = [(index, samples[k]) for index, k in enumerate(known)]
    load = np.concatenate([own.load[_usable(own)] for _, own in timed])
    arm = np.concatenate([np.full(int(_usable(own).sum()), index) for index, own in timed])
    target = np.concatenate([own.log_seconds[_usable(own)] for _, own in timed])
    # All steps of a K together weigh as much as those of any other.
    weight = np.concatenate([own.weight[_usable(own)] / own.weight[_usable(own)].sum() for _, own in timed])
    weight = weight / weight.mean()
    seconds = _train_seconds(load, arm, target, weight, len(known), seed)
    drafted = [own for own in samples.values() if own.trials.any()]
    parts = {name: np.concatenate([getattr(own, name) for own in drafted]) for name in ("text", "trials", "passed")}
    held_out = np.concatenate([own.held_out for own in drafted])
    tried = parts["trials"][:, 0] > 0
    learned = {name: part[tried & ~held_out] for name, part in parts.items()}
    text = _train_text(learned["text"], learned["trials"], learned["passed"], positions, seed)
    model = Model(tuple(known), positions, (key,), seconds, text)
    # A short trace may have no stretch held out: then what was learned from has to do.
    judged = tried & held_out if (tried & held_out).any() else tried
    return model, _text_losses(model, *(part[judged] for part in parts.values()))


def _usable(own: Samples) -> npt.NDArray[np.bool_]:
    return np.isfinite(own.log_seconds) & ~own.held_out


def _seconds_error(model: Model, own: Samples, column: int) -> float:
    timed = np.isfinite(own.log_seconds)
    judged = timed & own.held_out if (timed & own.held_out).any() else timed
    errors = model.log_seconds(own.load[judged])[:, column] - own.log_seconds[judged]
    return float(np.median(np.abs(np.expm1(errors))))


def _text_losses(model: Model, text: Float, trials: Float, passed: Float) -> tuple[float, float]:
    recent = 1.0 / (1.0 + np.exp(-text[:, TEXT_FEATURES + model.positions : TEXT_FEATURES + 2 * model.positions]))

    def loss(hazards: Float) -> float:
        nats = passed * np.log(hazards) + (trials - passed) * np.log1p(-hazards)
        return float(-nats.sum() / trials.sum())

    return loss(model.hazards(text)), loss(recent)


def _standard(features: Float) -> tuple[Float, Float]:
    return features.mean(axis=0), np.maximum(features.std(axis=0), 1e-3)


def _train_seconds(load: Float, arm: npt.NDArray[np.int64], target: Float, weight: Float, arms: int, seed: int) -> Net:
    import torch

    mean, scale = _standard(load)
    centre = np.array([np.average(target[arm == index], weights=weight[arm == index]) for index in range(arms)])
    tensors = [torch.tensor(x, dtype=torch.float32) for x in ((load - mean) / scale, target, weight)]
    chosen_arm = torch.tensor(arm)

    def loss(net: Any, rows: Any) -> Any:
        x, wanted, weights = (tensor[rows] for tensor in tensors)
        predicted = net(x).gather(1, chosen_arm[rows][:, None])[:, 0]
        # A step that takes ten times as long is a hiccup of the host: beyond 10 % it pulls no harder.
        huber = torch.nn.functional.huber_loss(predicted, wanted, reduction="none", delta=0.1)
        return (weights * huber).mean()

    return _train(loss, mean, scale, arms, centre, len(target), seed)


def _train_text(text: Float, trials: Float, passed: Float, positions: int, seed: int) -> Net:
    import torch

    mean, scale = _standard(text)
    recent = text[:, TEXT_FEATURES + positions : TEXT_FEATURES + 2 * positions]
    # The rows of a step are a few texts: a batch of 64 is not worth 64 batches of one.
    share = 1.0 / np.sqrt(np.maximum(trials[:, :1], 1.0))
    arrays = ((text - mean) / scale, recent, trials * share, passed * share)
    tensors = [torch.tensor(x, dtype=torch.float32) for x in arrays]

    def loss(net: Any, rows: Any) -> Any:
        x, known, tried, accepted = (tensor[rows] for tensor in tensors)
        log_odds = known + net(x)
        nats = accepted * torch.nn.functional.softplus(-log_odds) + (tried - accepted) * torch.nn.functional.softplus(
            log_odds
        )
        return nats.sum() / tried.sum()

    return _train(loss, mean, scale, positions, np.zeros(positions), len(text), seed)


def _train(loss: Any, mean: Float, scale: Float, outputs: int, centre: Float, count: int, seed: int) -> Net:
    """Fit ``torch``'s twin of a ``Net`` by Adam; every random number comes from ``seed``."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, generator=generator) / rows**0.5).requires_grad_()

    inputs = len(mean)
    layers = {
        "first": drawn(inputs, HIDDEN),
        "first_bias": torch.zeros(HIDDEN, requires_grad=True),
        "second": drawn(HIDDEN, HIDDEN),
        "second_bias": torch.zeros(HIDDEN, requires_grad=True),
        # From zero: before anything is learned the answer is the mean, or the recent acceptance.
        "last": torch.zeros(HIDDEN, outputs, requires_grad=True),
        "last_bias": torch.tensor(centre, dtype=torch.float32).requires_grad_(),
        "past": torch.zeros(inputs, outputs, requires_grad=True),
    }

    def net(x: Any) -> Any:
        x = x.clamp(-6.0, 6.0)
        hidden = torch.tanh(
            torch.tanh(x @ layers["first"] + layers["first_bias"]) @ layers["second"] + layers["second_bias"]
        )
        return x @ layers["past"] + hidden @ layers["last"] + layers["last_bias"]

    steps = max(PASSES * count // BATCH, 400)
    optimiser = torch.optim.Adam([layers[name] for name in LAYERS], lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        rows = torch.randint(count, (min(BATCH, count),), generator=generator)
        optimiser.zero_grad()
        loss(net, rows).backward()
        optimiser.step()
        schedule.step()
    return Net(mean, scale, tuple(layers[name].detach().numpy().astype(np.float64) for name in LAYERS))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the options of ``specpilot fit-neural``."""
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="trace folders or segments")
    command.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help="file of the model")
    command.add_argument("--server", help="server whose records are used, by name or fingerprint, if there are several")
    command.add_argument("--json", type=Path, help="write the report")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fit, write and report; return the exit code."""
    return fit_neural(options.traces, options.output, options.server, options.json, console)

"""A small neural net that maps a step's context to the value of every K, distilled to decision tables.

    context ──► seconds net  ──► log seconds of a step at each K
            └─► text net     ──► acceptance of a draft at each position, given those before it
    value of K = tokens per request and step at K / seconds at K, relative to that of the K in force

The context is what a step record tells: batch size, context tokens, queue, steps since K last changed, how
often drafts were recently accepted (by position, over two horizons), and how much the running requests have
been given. The nets are fitted offline from traces (``controller/fit/neural.py``), the only place that
needs torch: seconds by regression weighted with the inverse of the logged probability, acceptance by the
likelihood of accepted and refused drafts, which any K tells of the smaller ones. Here they are only asked, a few
matrix products, on the grid of a plan's cells.

The nets do not go on learning: what they see of a server's text moves with it, what steps cost does not.
``goodput`` learns both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot.policies.interface import Alternatives, Plan, Policy, PolicyError
from specpilot.policies.models.acceptance_length import chain_lengths
from specpilot.policies.models.applied import AppliedSteps
from specpilot.policies.models.cost_prior import fingerprint
from specpilot.policies.models.trials import trials_of
from specpilot.policies.places import CellPlaces
from specpilot.policies.rules.choice import KEEP, STAY
from specpilot.policies.rules.exploration import PROBE_STEPS, probe
from specpilot.policies.rules.vetoes import Vetoes
from specpilot.sglang_hooks.wire import MASKED, Hello, StepRecord

FloatArray = npt.NDArray[np.float64]

HORIZONS = (64.0, 1024.0)
"""Samples after which half of what was accepted is forgotten: by the fast feature and by the slow one."""
PRIOR_SAMPLES = 4.0
"""Samples of acceptance 0.5 that every position begins with, so that one never tried has a log-odds."""
URGENT_STEPS = 32
"""Text can change within a second: a decision is asked for after so many steps."""
LEVEL_MEMORY = 0.05
"""Share of the newest record in what stands for queue and context."""
LOAD_FEATURES = 6
TEXT_FEATURES = 3


class Context:
    """What of the records goes into the features; the same at fitting and at serving.

    >>> from tests.support.messages import record
    >>> context = Context(positions=2, topk=1)
    >>> for _ in range(50):
    ...     context.learn(record(accepted_drafts=[3, 0], batch_size=2))
    >>> context.accepted().round(2).tolist()
    [0.5, 0.96]
    """

    def __init__(self, positions: int, topk: int) -> None:
        self.positions = positions
        self.queued = 0.0
        self.generated = 0.0
        """Tokens that a running request was given so far, on average: a guess, records do not name requests."""
        self.since_switch = 0
        self.steps: int | None = None
        """K of the newest record."""
        self._applied = AppliedSteps(topk)
        self._trials = np.zeros((len(HORIZONS), positions))
        self._passed = np.zeros((len(HORIZONS), positions))

    def steps_of(self, step: StepRecord) -> int | None:
        """Return the K that ``step`` ran with; once for each record, before ``learn``."""
        steps = self._applied.of(step)
        self.since_switch = self.since_switch + 1 if steps == self.steps else 0
        self.steps = steps
        return steps

    def learn(self, step: StepRecord) -> None:
        """Learn from one record."""
        self.queued += LEVEL_MEMORY * (step.queued - self.queued)
        live = [accepted for accepted in step.accepted_drafts if accepted != MASKED]
        if live:
            # One that ended takes its tokens with it, and another, which has none, its place.
            given = (sum(live) + len(live)) / len(live)
            stays = 1.0 - len(step.truncated) / max(step.batch_size, 1)
            self.generated = (self.generated + given) * stays
        trials, passed = trials_of(step, self.positions)
        for j, (tried, accepted) in enumerate(zip(trials, passed, strict=True)):
            for row, horizon in enumerate(HORIZONS):
                kept = 0.5 ** (tried / horizon)
                self._trials[row, j] = self._trials[row, j] * kept + tried
                self._passed[row, j] = self._passed[row, j] * kept + accepted

    def accepted(self) -> FloatArray:
        """Return recent acceptance by position, over the slow horizon, shape (positions,)."""
        odds = np.exp(self._log_odds()[-1])
        return np.asarray(odds / (1.0 + odds))

    def _log_odds(self) -> FloatArray:
        failed = self._trials - self._passed
        return np.asarray(np.log((self._passed + PRIOR_SAMPLES / 2) / (failed + PRIOR_SAMPLES / 2)))

    def load(self, batch: FloatArray, mean_context: FloatArray, since_switch: FloatArray) -> FloatArray:
        """Return the features of what a step costs, shape (n, LOAD_FEATURES), of n padded batch sizes and contexts."""
        tokens = batch * mean_context
        columns = [
            np.log2(batch),
            batch / 64.0,
            np.log2(mean_context + 1.0),
            tokens / 1e5,
            np.full_like(batch, np.log1p(self.queued)),
            np.exp(-np.minimum(since_switch, 30.0)),
        ]
        return np.stack(columns, axis=1)

    def text(self, batch: FloatArray, mean_context: FloatArray) -> FloatArray:
        """Return the features of acceptance, shape (n, TEXT_FEATURES + 3 * positions)."""
        shared = [*self._log_odds(), np.log1p(self._trials[-1])]
        columns = [
            np.log2(batch),
            np.log2(mean_context + 1.0),
            np.full_like(batch, np.log1p(self.generated)),
        ]
        own = np.stack(columns, axis=1)
        return np.concatenate([own, np.tile(np.concatenate(shared), (len(batch), 1))], axis=1)


@dataclass(frozen=True)
class Net:
    """Two hidden layers of tanh, and a linear way past them: x W + tanh(tanh(x A + a) B + b) C + c."""

    mean: FloatArray
    """Mean of the features, shape (inputs,), by which they are standardised first."""
    scale: FloatArray
    """Standard deviation of the features, shape (inputs,)."""
    layers: tuple[FloatArray, ...]
    """A, a, B, b, C, c, W."""

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the outputs, shape (n, outputs), for features of shape (n, inputs)."""
        first, first_bias, second, second_bias, last, last_bias, past = self.layers
        x = np.clip((features - self.mean) / self.scale, -6.0, 6.0)
        hidden = np.tanh(np.tanh(x @ first + first_bias) @ second + second_bias)
        return np.asarray(x @ past + hidden @ last + last_bias)


LAYERS = ("first", "first_bias", "second", "second_bias", "last", "last_bias", "past")


@dataclass(frozen=True)
class Model:
    """Both nets, and whose traces they were fitted to."""

    steps: tuple[int, ...]
    """K of the outputs of ``seconds``, ascending."""
    positions: int
    """Number of draft positions that ``text`` has outputs for."""
    fingerprints: tuple[str, ...]
    """Fingerprints of the servers whose traces the nets were fitted to."""
    seconds: Net
    """Net from load features to log seconds of a step at each K."""
    text: Net
    """Net from text features to a correction of the log-odds of acceptance at each position."""

    def log_seconds(self, load: FloatArray) -> FloatArray:
        """Return log seconds of each K, shape (n, K)."""
        return self.seconds(load)

    def hazards(self, text: FloatArray) -> FloatArray:
        """Return acceptance by position, shape (n, positions): the net corrects the recent log-odds."""
        recent = text[:, TEXT_FEATURES + self.positions : TEXT_FEATURES + 2 * self.positions]
        log_odds = recent + self.text(text)
        return np.asarray(1.0 / (1.0 + np.exp(-np.clip(log_odds, -12.0, 12.0))))

    def lengths(self, text: FloatArray) -> FloatArray:
        """Return tokens per request and step of each K, bonus token included, shape (n, K)."""
        return chain_lengths(self.hazards(text))[:, list(self.steps)]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return everything as arrays, for a file; ``Model.of`` takes them back."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "version": np.array(1),
            "steps": np.array(self.steps, np.int64),
            "positions": np.array(self.positions),
            "fingerprints": np.array(self.fingerprints, np.str_),
        }
        for name, net in (("seconds", self.seconds), ("text", self.text)):
            for part, array in zip(("mean", "scale", *LAYERS), (net.mean, net.scale, *net.layers), strict=True):
                arrays[f"{name}.{part}"] = np.asarray(array, np.float32)
        return arrays

    @staticmethod
    def of(arrays: dict[str, npt.NDArray[Any]]) -> Model:
        """Return the model that ``arrays`` are of; ValueError says what is wrong with them."""
        try:
            if int(arrays["version"]) != 1:
                raise ValueError(f"version {int(arrays['version'])}, this specpilot reads 1")
            steps = tuple(int(k) for k in arrays["steps"])
            positions = int(arrays["positions"])
            nets = {}
            for name in ("seconds", "text"):
                parts = [np.asarray(arrays[f"{name}.{part}"], np.float64) for part in ("mean", "scale", *LAYERS)]
                nets[name] = Net(parts[0], parts[1], tuple(parts[2:]))
            fingerprints = tuple(str(text) for text in arrays["fingerprints"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"it lacks {error}") from error
        model = Model(steps, positions, fingerprints, nets["seconds"], nets["text"])
        model._check()
        return model

    def _check(self) -> None:
        if list(self.steps) != sorted(set(self.steps)) or not self.steps or self.steps[0] < 0:
            raise ValueError(f"its steps {self.steps} do not rise")
        if self.positions < max(self.steps[-1], 1):
            raise ValueError(f"it has {self.positions} positions for K={self.steps[-1]}")
        shapes = {
            "seconds": (self.seconds, LOAD_FEATURES, len(self.steps)),
            "text": (self.text, TEXT_FEATURES + 3 * self.positions, self.positions),
        }
        for name, (net, inputs, outputs) in shapes.items():
            hidden = net.layers[1].shape[-1] if net.layers[1].ndim else 0
            shapes_found = [net.mean.shape, net.scale.shape, *(layer.shape for layer in net.layers)]
            wanted = [(inputs,), (inputs,), (inputs, hidden), (hidden,), (hidden, hidden), (hidden,),
                      (hidden, outputs), (outputs,), (inputs, outputs)]  # fmt: skip
            if shapes_found != wanted:
                raise ValueError(f"the layers of its net of {name} have shapes {shapes_found}, not {wanted}")
            if (
                not all(np.isfinite(part).all() for part in (net.mean, net.scale, *net.layers))
                or not (net.scale > 0.0).all()
            ):
                raise ValueError(f"its net of {name} holds values that are no numbers")


class Neural(Policy):
    """Chooses in each cell the K of the highest value by a ``Model``; it probes while it skips.

    Around the argmax stand the rules of ``goodput``: a choice changes for a gain above ``STAY``, and what is
    within ``KEEP`` of it may stay in force.
    """

    name = "neural"

    def __init__(self, model: Model) -> None:
        self._model = model
        self._server: Hello | None = None
        self._choice: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.vetoes = Vetoes()
        self._now = 0.0

    def _begin(self, server: Hello) -> None:
        known = fingerprint(server)
        if known not in self._model.fingerprints:
            raise PolicyError(
                f"policy.model was fitted to servers of other fingerprints than {server.server_id}'s ({known}): what "
                "steps cost here is not in it. Fit one to traces of this server with specpilot fit-neural"
            )
        self._arms = [k for k in server.candidate_steps if k in self._model.steps]
        self._arms.sort()
        if len(self._arms) < 2:
            raise PolicyError(
                f"policy.model knows K={list(self._model.steps)}, {server.server_id} has {server.candidate_steps}: "
                "fewer than two in common. Fit one to traces in which this server tried them"
            )
        self._columns = [self._model.steps.index(k) for k in self._arms]
        self._places = CellPlaces(server)
        self._grid = self._places.grid
        self._batches = np.repeat(np.array(self._places.batch_sizes), self._grid.shape[1])
        first = min(range(len(self._arms)), key=lambda arm: abs(self._arms[arm] - server.fallback_steps))
        self._choice = np.full(self._grid.cells, first)
        self._context = Context(self._model.positions, server.topk)
        self._seen = 0
        self._cell = 0
        self._server = server

    def learn(self, step: StepRecord) -> None:
        """Take a step into the context; nothing else is learned."""
        if self._server is None or not step.batch_size:
            return
        steps = self._context.steps_of(step)
        self._context.learn(step)
        if steps is not None:
            self.vetoes.observe(step, steps, self._arms, self._server.kv_tokens, self._now)
        mean_context = step.context_tokens / step.batch_size
        self._cell = self._grid.cell(step.padded_batch_size, mean_context)
        self._places.observe(mean_context, LEVEL_MEMORY)
        self._seen += 1
        self.urgent |= self._seen % URGENT_STEPS == 0

    def values(self, since_switch: float = 30.0) -> tuple[FloatArray, FloatArray]:
        """Return goodput per request and seconds of every cell and candidate, two arrays of shape (cells, K)."""
        contexts = np.tile(self._places.contexts, self._grid.shape[0])
        since = np.full_like(self._batches, since_switch)
        seconds = np.exp(self._model.log_seconds(self._context.load(self._batches, contexts, since)))
        lengths = self._model.lengths(self._context.text(self._batches, contexts))
        return (lengths / seconds)[:, self._columns], seconds[:, self._columns]

    def decide(self, server: Hello, now: float) -> Plan:
        """Ask the nets in every cell; PolicyError for a server that they were not fitted to."""
        if self._server is None or self._key(self._server) != self._key(server):
            self._begin(server)
        self.urgent = False
        self._now = now
        goodput, seconds = self.values()
        cells = np.arange(self._grid.cells)
        best = goodput.argmax(axis=1)
        current = goodput[cells, self._choice]
        self._choice = np.where(goodput[cells, best] > current * (1.0 + STAY), best, self._choice)
        relative = goodput / goodput[cells, self._choice][:, None]
        bound = self.vetoes.max_steps(now)
        allowed = [k for k in self._arms if bound is None or k <= bound] or self._arms[:1]
        choice = [min(self._arms[arm], allowed[-1]) for arm in self._choice.tolist()]
        keep = [
            frozenset(k for k, share in zip(self._arms, row, strict=True) if k and k in allowed and share > 1.0 - KEEP)
            for row in relative.tolist()
        ]
        return Plan(
            self._grid,
            tuple(choice),
            tuple(kept - {own} for kept, own in zip(keep, choice, strict=True)),
            "; ".join([self._reason(relative), *self.vetoes.reasons(now)]),
            explore=self._probes(relative, seconds) if len(allowed) == len(self._arms) else {},
            block_steps=PROBE_STEPS,
        )

    def _probes(self, relative: FloatArray, seconds: FloatArray) -> dict[int, Alternatives]:
        """Where nothing is drafted nothing is seen of the text: the best other K, now and then."""
        probes: dict[int, Alternatives] = {}
        if self._arms[0] != 0:
            return probes
        for cell in np.flatnonzero(self._choice == 0).tolist():
            arm = int(relative[cell, 1:].argmax()) + 1
            loss = max(1.0 - relative[cell, arm], 0.0) * seconds[cell, arm] / seconds[cell, 0]
            probes[cell] = ((self._arms[arm], probe(loss)),)
        return probes

    def _reason(self, relative: FloatArray) -> str:
        """One line on the newest step's cell."""
        accepted = ", ".join(f"{share:.2f}" for share in self._context.accepted()[:3])
        row = relative[self._cell]
        shares = ", ".join(f"K={k} {100 * share:.0f} %" for k, share in zip(self._arms, row, strict=True))
        return f"at batch {self._batches[self._cell]:.0f}, drafts accepted {accepted}: {shares} of the choice's value"

    @staticmethod
    def _key(server: Hello) -> tuple[object, ...]:
        return fingerprint(server), server.candidate_steps, server.max_running_requests, server.context_length

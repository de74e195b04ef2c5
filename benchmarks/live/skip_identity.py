"""Does a server that skips and resumes at random say the same, and is its draft as good as before? Needs a GPU.

    python benchmarks/live/skip_identity.py run --pair DIR --attention triton --arm none --raw DIR
    python benchmarks/live/skip_identity.py run --pair DIR --attention triton --arm skip --raw DIR
    python benchmarks/live/skip_identity.py run --models DIR --attention triton --arm cost --raw DIR
    python benchmarks/live/skip_identity.py merge --raw DIR --out FILE

``none`` is an engine without speculation, ``skip`` one with the plugin; both serve the trained pair of
train_pair.py. ``skip`` goes through (see ``skip_steps.py`` for how K is chosen):

    greedy    200 prompts while K changes at random, against ``none``; where outputs part, the distance
              of the two best logits there against how far ``none`` is from itself at another batch size
    sampled   many samples of a few prompts at temperature 1: G-tests of the tokens at each place
    resume    gaps of 1, 16 and 256 steps: the draft's KV at every position against a run that never
              skipped, and the acceptance after the resume against that run on the same text
    cost      seconds of the step that resumes against an ordinary speculative step
    switches  ten thousand random switches under load: memory, counts of tokens

``cost`` measures only the cost, on the random weights of an 8B model (models.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import engines
import skip_steps

if __name__ == "__mp_main__":
    skip_steps.install()

CANDIDATES = [0, 1, 2, 3, 5]
TREE = {"speculative_num_steps": 2, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64]
RING_MB = 7
"""64 positions of each of 64 requests of the trained pair: gaps of 16 fit, gaps of 256 do not."""
GREEDY_PROMPTS, GREEDY_TOKENS = 200, 160
SAMPLED_PROMPTS, SAMPLES, SAMPLED_TOKENS = 4, 1500, 6
RESUME_GAPS = [1, 16, 256]
RESUME_PROMPTS, WARM_STEPS, RESUME_TOKENS = 64, 30, 800
NEVER_DUMP = 190
"""Step after which the KV of a run without a gap is saved: as many tokens as the longest gap reaches."""
WINDOW = 60
"""Tokens after the resume in which acceptance is compared."""
COST_BATCHES, COST_GAPS, COST_REPETITIONS = [1, 4, 16, 64], [1, 4, 16, 64], 9
SWITCHES = 10_000


def engine_options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    small = args.arm != "cost"
    own = {"model_path": str(args.pair / "target"), "load_format": "safetensors"} if small else {}
    options: dict[str, Any] = {
        **engines.target(args.models, args.attention),
        **engines.captured(BATCH_SIZES),
        **own,
        "mem_fraction_static": 0.3 if small else 0.7,
        "disable_overlap_schedule": args.no_overlap,
    }
    if args.arm == "none":
        return options
    draft = str(args.pair / "eagle3" if small else args.models / "eagle3-8b")
    if args.tree:
        return options | TREE | {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft}
    return options | engines.adaptive(draft, candidates_of(args), folder)


def candidates_of(args: argparse.Namespace) -> list[int]:
    if args.tree:
        return [0, TREE["speculative_num_steps"]]
    return [0, 3] if args.arm == "cost" else CANDIDATES


class Run:
    """One engine and what it gave; written to a file after every part."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begun = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="specpilot-identity-"))
        self.candidates = candidates_of(args)
        self.speculate = 3 if 3 in self.candidates else max(self.candidates)
        self.name = f"{args.attention}-{args.label or args.arm}"
        self.path: Path = args.raw / f"{self.name}.json"
        self.log = self.path.with_suffix(".log")
        self.found: dict[str, Any] = {
            "attention": args.attention, "arm": args.arm, "overlap": not args.no_overlap, "tree": args.tree,
            "candidates": self.candidates,
        }  # fmt: skip
        self.prompts: list[list[int]] = []
        if args.arm != "cost":
            self.prompts = json.loads((args.pair / "prompts.json").read_text())

    def say(self, text: str) -> None:
        print(f"{self.name} {time.monotonic() - self.begun:.0f} s: {text}", flush=True)

    def write(self) -> None:
        self.path.write_text(json.dumps(self.found))

    def start(self) -> None:
        self.args.raw.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 2)  # SGLang's processes log to the standard error that they inherit
        os.environ[skip_steps.FOLDER] = str(self.folder)
        if self.args.arm != "none":
            os.environ |= {"SPECPILOT_ENDPOINT": f"ipc://{self.folder}/nobody.ipc", "SPECPILOT_QUEUE_RECORDS": "64",
                           "SPECPILOT_FALLBACK": "0"}  # fmt: skip
            if self.args.arm == "skip":
                os.environ["SPECPILOT_SKIP_RING_MB"] = str(self.args.ring_mb)
        import sglang
        import torch

        self.engine = sglang.Engine(**engine_options(self.args, self.folder))
        lines = self.log.read_text(errors="replace").splitlines()
        self.found |= {
            "sglang": sglang.__version__, "gpu": torch.cuda.get_device_name(),
            "started_seconds": round(time.monotonic() - self.begun, 1),
            "said": [line[:400] for line in lines if "specpilot:" in line],
        }  # fmt: skip
        self.say("engine started")
        for line in self.found["said"]:
            self.say(line)
        self.write()

    def safely(self, part: Callable[[], None]) -> None:
        """Run a part; if it fails, say so and go on."""
        if time.monotonic() - self.begun > self.args.seconds:
            self.say(f"out of time before {part.__name__}")
            return
        begun = time.monotonic()
        try:
            part()
        except Exception:
            self.say(traceback.format_exc())
            self.found.setdefault("failed", {})[part.__name__] = traceback.format_exc()[-600:]
        self.say(f"{part.__name__} took {time.monotonic() - begun:.1f} s")
        self.write()

    # -- requests --

    def plan(self, name: str, batch: int = 1, **plan: Any) -> None:
        plan = {"name": name, "batch": batch, "before": self.speculate, **plan}
        temporary = self.folder / "plan.json.new"
        temporary.write_text(json.dumps(plan))
        temporary.replace(self.folder / "plan.json")

    def settle(self) -> None:
        """A prefill makes the scheduler write down what it has."""
        self.plan("between", blocks=[[self.speculate, 1]])
        self.generate([[1, 2, 3]], 1, 1)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int], at_once: int, temperature: float = 0.0,
        **more: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Answers in the order of the prompts, ``at_once`` of them running at a time."""
        counts = [tokens] * len(prompts) if isinstance(tokens, int) else list(tokens)
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: Sequence[int], count: int) -> dict[str, Any]:
            async with gate:
                sampling = {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}
                answer: dict[str, Any] = await self.engine.async_generate(
                    input_ids=list(prompt), sampling_params=sampling, **more
                )
                return answer

        async def everything() -> list[dict[str, Any]]:
            pairs = zip(prompts, counts, strict=True)
            return list(await asyncio.wait_for(asyncio.gather(*(one(p, n) for p, n in pairs)), 240))

        found: list[dict[str, Any]] = self.engine.loop.run_until_complete(everything())
        return found

    def lines(self, name: str, plan: str = "") -> list[dict[str, Any]]:
        path = self.folder / name
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if not plan or row["plan"] == plan]

    # -- parts --

    def greedy(self) -> None:
        prompts = self.prompts[:GREEDY_PROMPTS]
        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if self.args.arm == "none" else {}
        for name, at_once, seed in (("greedy32", 32, 1), ("greedy5", 5, 2)):
            self.plan(name, random=seed, candidates=self.candidates)
            answers = self.generate(prompts, GREEDY_TOKENS, at_once, **logprobs)
            self.found[name] = {"outputs": [answer["output_ids"] for answer in answers]}
            if logprobs:
                places = [answer["meta_info"]["output_top_logprobs"] for answer in answers]
                self.found[name]["top2"] = [
                    [[round(entry[0], 5) for entry in place[:2]] for place in answer] for answer in places
                ]
        self.settle()
        for name in ("greedy32", "greedy5"):
            self.found[name]["steps"] = Counter(str(row["steps"]) for row in self.lines("steps.jsonl", name))

    def sampled(self) -> None:
        prompts = self.prompts[300 : 300 + SAMPLED_PROMPTS]
        runs = ("sampled", "sampled_again") if self.args.arm == "none" else ("sampled",)
        for name in runs:
            self.plan(name, random=3, candidates=self.candidates)
            begun = time.monotonic()
            found = []
            for prompt in prompts:
                answers = self.generate([prompt] * SAMPLES, SAMPLED_TOKENS, 64, temperature=1.0)
                found.append([answer["output_ids"] for answer in answers])
                self.found[name] = found
                if time.monotonic() - begun > 50:
                    break

    def resume(self) -> None:
        """The runs; their comparison is in ``compare_resume``, which needs all of them."""
        prompts = self.prompts[400 : 400 + RESUME_PROMPTS]
        k = self.speculate
        runs: dict[str, Any] = {"never": [[k, 10**9]], "never_other": [[min(self.candidates[1:]), 10**9]]}
        for gap in RESUME_GAPS:
            runs[f"gap{gap}"] = [[k, WARM_STEPS], [0, gap], [k, 10**9]]
        runs["never_again"] = [[k, 10**9]]
        self.outputs: dict[str, dict[str, list[int]]] = {}
        self.order: dict[str, list[str]] = {}
        for name, blocks in runs.items():
            dump_at = WARM_STEPS + int(name.removeprefix("gap")) + 2 if name.startswith("gap") else NEVER_DUMP
            # A few of the prompts may wait for a row of the request pool: count from when most run.
            self.plan(name, batch=RESUME_PROMPTS * 3 // 4, blocks=blocks, rows=True, dump_at=dump_at)
            answers = self.generate(prompts, RESUME_TOKENS, RESUME_PROMPTS)
            self.order[name] = [answer["meta_info"]["id"] for answer in answers]
            self.outputs[name] = {
                answer["meta_info"]["id"]: list(prompt) + answer["output_ids"]
                for prompt, answer in zip(prompts, answers, strict=True)
            }
        self.settle()
        self.found["resume"] = {"warm_steps": WARM_STEPS, "window": WINDOW, "ring": self.ring(), "runs": {},
                                "most_running": self.most_running()}  # fmt: skip
        for name in [*runs][1:]:
            try:
                self.found["resume"]["runs"][name] = {
                    "kv": self.compare_kv(name), "acceptance": self.compare_acceptance(name)
                }  # fmt: skip
            except Exception:
                self.found["resume"]["runs"][name] = {"failed": traceback.format_exc()[-600:]}
            self.say(f"{name}: {json.dumps(self.found['resume']['runs'].get(name))[:900]}")

    def most_running(self) -> dict[str, int]:
        """Largest batch of each run: without its steps nothing can be said of it."""
        found: dict[str, int] = {}
        for line in self.lines("steps.jsonl"):
            found[line["plan"]] = max(found.get(line["plan"], 0), line["batch"])
        return {name: found.get(name, 0) for name in self.outputs}

    def ring(self) -> int | None:
        states = self.lines("state.jsonl")
        return states[-1].get("ring") if states else None

    def compare_kv(self, name: str) -> dict[str, Any]:
        """The draft's KV of run ``name`` against that of "never", at positions where both saw the same text."""
        import torch

        ours, theirs = (torch.load(self.folder / f"kv-{run}.pt") for run in (name, "never"))
        starts = self.starts(name)
        ring = self.ring() or 0
        errors: dict[str, list[float]] = {"caught_up": [], "lost": [], "other": []}
        relative: dict[str, list[float]] = {"caught_up": [], "lost": [], "other": []}
        compared = 0
        for mine, other in zip(self.order[name], self.order["never"], strict=True):
            if mine not in ours or other not in theirs:
                continue
            a, b = ours[mine], theirs[other]
            same = common(self.outputs[name][mine], self.outputs["never"][other])
            # KV at a position takes the token after it.
            length = min(a.shape[1], b.shape[1], same - 1)
            if length < 1:
                continue
            compared += 1
            difference = (a[:, :length] - b[:, :length]).flatten(2).permute(1, 0, 2).flatten(1)
            size = b[:, :length].flatten(2).permute(1, 0, 2).flatten(1).norm(dim=1).clamp_min(1e-6)
            begin, end = starts.get(mine, (length, length))
            for position, (most, ratio) in enumerate(
                zip(difference.abs().amax(1).tolist(), (difference.norm(dim=1) / size).tolist(), strict=True)
            ):
                kind = "other" if not begin <= position < end else "caught_up" if position >= end - ring else "lost"
                errors[kind].append(most)
                relative[kind].append(ratio)
        found: dict[str, Any] = {"requests": compared}
        for kind, values in errors.items():
            if values:
                found[kind] = {
                    "positions": len(values),
                    "max_abs": round(max(values), 6),
                    "max_relative": round(max(relative[kind]), 6),
                    "p99_relative": round(quantile(relative[kind], 0.99), 6),
                    "median_relative": round(statistics.median(relative[kind]), 6),
                }
        return found

    def starts(self, name: str) -> dict[str, tuple[int, int]]:
        """First and last position that each request was skipped at; a step's row tells tokens known before it."""
        found: dict[str, tuple[int, int]] = {}
        for line in self.lines("steps.jsonl", name):
            if line["steps"] == 0:
                for rid, known, _ in line["rows"]:
                    begin, _ = found.get(rid, (known - 1, 0))
                    found[rid] = (begin, known)
        return found

    def compare_acceptance(self, name: str) -> dict[str, Any]:
        """Per draft position after the resume, and of the run that never skipped on the same text."""
        ours, theirs = (self.by_request(run) for run in (name, "never"))
        starts = self.starts(name)
        found: dict[str, Any] = {}
        for window in range(4):
            mine: list[int] = []
            other: list[int] = []
            differences: list[float] = []
            for rid, twin in zip(self.order[name], self.order["never"], strict=True):
                begin = starts.get(rid, (0, 450))[1] + 1 + window * WINDOW
                end = min(begin + WINDOW, common(self.outputs[name][rid], self.outputs["never"][twin]) - 8)
                a = [n for known, n in ours.get(rid, []) if begin <= known < end]
                b = [n for known, n in theirs.get(twin, []) if begin <= known < end]
                if a and b:
                    differences.append(statistics.mean(a) - statistics.mean(b))
                    mine += a
                    other += b
            if len(differences) > 2:
                spread = 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
                mean = statistics.mean(differences)
                found[f"tokens {window * WINDOW} to {(window + 1) * WINDOW}"] = {
                    "here": by_position(mine, self.speculate),
                    "never": by_position(other, self.speculate),
                    "accepted_difference_per_step": [round(mean + d, 4) for d in (-spread, 0.0, spread)],
                }
        return found

    def by_request(self, name: str) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for line in self.lines("steps.jsonl", name):
            if line["steps"] == self.speculate:
                for rid, known, accepted in line["rows"]:
                    found.setdefault(rid, []).append((known, accepted))
        return found

    def cost(self) -> None:
        k = self.speculate
        self.found["cost"] = []
        for batch in COST_BATCHES:
            prompts = [[random.randrange(1000, 30000) for _ in range(128)] for _ in range(batch)]
            if self.prompts:
                prompts = [self.prompts[n][:128] for n in range(batch)]
            for gap in COST_GAPS:
                name = f"cost-{batch}-{gap}"
                warm = 14
                steps = (warm + gap) * COST_REPETITIONS
                self.plan(name, batch=batch, cycle=[[k, warm], [0, gap]])
                # Enough tokens for the steps, whatever is accepted; random weights accept hardly anything.
                each = k + 1 if self.prompts else 1
                self.generate(prompts, (warm * each + gap) * COST_REPETITIONS + 8, batch)
                self.settle()
                rows = [row for row in self.lines("steps.jsonl", name) if row["batch"] == batch and row["seconds"]]
                rows = [row for row in rows if row["index"] < steps]
                period = warm + gap
                resumed = [row["seconds"] for row in rows if row["index"] % period == 0 and row["index"] > 0]
                second = [row["seconds"] for row in rows if row["index"] % period == 1 and row["index"] > period]
                ordinary = [row["seconds"] for row in rows if 4 <= row["index"] % period < warm]
                skips = [row["seconds"] for row in rows if warm < row["index"] % period]
                cell = {"batch_size": batch, "gap": gap, "resumes": len(resumed), "resume": middle(resumed),
                        "step_after": middle(second), "ordinary": middle(ordinary), "skip": middle(skips)}  # fmt: skip
                if resumed and second and ordinary:
                    # Under overlap a late launch shows in the step after: both count.
                    extra = statistics.median(resumed) + statistics.median(second) - 2 * statistics.median(ordinary)
                    cell["extra_seconds"] = round(extra, 6)
                    cell["extra_in_ordinary_steps"] = round(extra / statistics.median(ordinary), 4)
                self.found["cost"].append(cell)
                self.say(f"cost {json.dumps(cell)}")
                self.write()

    def switches(self) -> None:
        """Rolling load of requests of many lengths, until there were enough switches."""
        choose = random.Random(7)
        reference = self.found.get("greedy32", {}).get("outputs", [])
        states_before = len(self.lines("state.jsonl"))
        tokens = wrong_counts = other_text = rounds = compared = 0
        begun = time.monotonic()
        while time.monotonic() - begun < self.args.switch_seconds:
            self.plan(f"switches{rounds}", random=100 + rounds, candidates=self.candidates, switch=1.0)
            picks = [choose.randrange(GREEDY_PROMPTS) for _ in range(400)]
            counts = [choose.randrange(20, GREEDY_TOKENS) for _ in picks]
            answers = self.generate([self.prompts[n] for n in picks], counts, 40)
            for n, count, answer in zip(picks, counts, answers, strict=True):
                tokens += len(answer["output_ids"])
                wrong_counts += len(answer["output_ids"]) != count
                if reference:
                    compared += 1
                    other_text += answer["output_ids"] != reference[n][:count]
            rounds += 1
            self.settle()
            states = self.lines("state.jsonl")
            made = states[-1]["switches"] - states[states_before]["switches"]
            self.found["switches"] = {
                "rounds": rounds, "switches": made, "requests": rounds * 400, "tokens": tokens,
                "requests_with_a_wrong_count": wrong_counts, "compared_with_greedy32": compared,
                "other_text": other_text, "seconds": round(time.monotonic() - begun, 1),
                "states": [state for state in states[states_before:] if state["plan"] == "between"],
            }  # fmt: skip
            if made >= SWITCHES:
                break
        first, last = (self.found["switches"]["states"][at] for at in (0, -1))
        self.found["switches"]["grown"] = {
            key: last[key] - first[key] for key in ("resident_mb", "allocated_mb", "reserved_mb", "free_mb", "kv_slots")
        }
        self.say(json.dumps({key: value for key, value in self.found["switches"].items() if key != "states"}))


# -- figures --


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def quantile(values: Sequence[float], q: float) -> float:
    ranked = sorted(values)
    return ranked[min(int(q * len(ranked)), len(ranked) - 1)]


def middle(values: Sequence[float]) -> list[float] | None:
    """Quartiles in seconds."""
    return [round(q, 6) for q in statistics.quantiles(values, n=4)] if len(values) > 3 else None


def wilson(hits: int, trials: int) -> list[float]:
    """95 % interval of a proportion, with the estimate in the middle (Wilson, 1927)."""
    if not trials:
        return [0.0, 0.0, 1.0]
    z, p = 1.96, hits / trials
    centre, half = p + z * z / (2 * trials), z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return [
        round((centre - half) / (1 + z * z / trials), 4),
        round(p, 4),
        round((centre + half) / (1 + z * z / trials), 4),
    ]


def by_position(accepted: Sequence[int], steps: int) -> dict[str, Any]:
    """Mean accepted drafts, and of each position: accepted of those that reached it, with an interval."""
    found = {}
    for position in range(1, steps + 1):
        reached = [n for n in accepted if n >= position - 1]
        found[str(position)] = wilson(sum(n >= position for n in reached), len(reached))
    return {"steps": len(accepted), "accepted": round(statistics.mean(accepted), 4), "by_position": found}


def g_test(a: Sequence[int], b: Sequence[int]) -> dict[str, Any]:
    """Likelihood-ratio test that two samples of tokens come from one distribution; rare tokens together."""
    import torch

    counts = Counter(a), Counter(b)
    share = len(a) / (len(a) + len(b))
    cells: list[tuple[int, int]] = []
    rare = [0, 0]
    for token in counts[0].keys() | counts[1].keys():
        pair = counts[0][token], counts[1][token]
        if sum(pair) * min(share, 1 - share) >= 5:
            cells.append(pair)
        else:
            rare[0] += pair[0]
            rare[1] += pair[1]
    if sum(rare):
        cells.append((rare[0], rare[1]))
    g = 0.0
    for pair in cells:
        for observed, part in zip(pair, (share, 1 - share), strict=True):
            if observed:
                g += 2 * observed * math.log(observed / (sum(pair) * part))
    freedom = len(cells) - 1
    if freedom < 1:
        return {"g": 0.0, "freedom": 0, "p": 1.0}
    p = float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(g / 2).double()))
    return {"g": round(g, 2), "freedom": freedom, "p": round(p, 5)}


def identity(skip: dict[str, Any], none: dict[str, Any]) -> dict[str, Any]:
    """Outputs of one engine against another's; ``none`` has the two best logits at each place."""
    parted = []
    same = 0
    for number, (ours, theirs) in enumerate(zip(skip["outputs"], none["outputs"], strict=True)):
        at = common(ours, theirs)
        if at == len(theirs) == len(ours):
            same += 1
        else:
            first, second = none["top2"][number][at]
            parted.append({"prompt": number, "at": at, "top2_gap": round(first - second, 5)})
    return {"prompts": len(none["outputs"]), "same": same, "parted": parted,
            "largest_gap": max((row["top2_gap"] for row in parted), default=0.0)}  # fmt: skip


def noise(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """How much the distance of the two best logits differs between two runs on the same text."""
    found = []
    for ours, theirs, mine, other in zip(a["outputs"], b["outputs"], a["top2"], b["top2"], strict=True):
        for (first, second), (third, fourth) in zip(
            mine[: common(ours, theirs)], other[: common(ours, theirs)], strict=True
        ):
            found.append(abs((first - second) - (third - fourth)))
    return {"places": len(found), "median": round(statistics.median(found), 6), "p99": round(quantile(found, 0.99), 5),
            "max": round(max(found), 5)}  # fmt: skip


def sampled_tests(a: list[list[list[int]]], b: list[list[list[int]]]) -> dict[str, Any]:
    tests = [
        {"prompt": prompt, "place": place, **g_test([x[place] for x in ours], [x[place] for x in theirs])}
        for prompt, (ours, theirs) in enumerate(zip(a, b, strict=False))
        for place in range(SAMPLED_TOKENS)
    ]
    counted = [test for test in tests if test["freedom"]]
    least = min((test["p"] for test in counted), default=1.0)
    return {
        "samples": len(a[0]),
        "tests": len(counted),
        "least_p": least,
        "least_p_corrected": round(min(1.0, least * max(len(counted), 1)), 4),
        "below_0.05": sum(test["p"] < 0.05 for test in counted),
        "each": tests,
    }


def merge(args: argparse.Namespace) -> int:
    raws = {path.stem: json.loads(path.read_text()) for path in sorted(args.raw.glob("*.json"))}
    found = []
    for name, raw in raws.items():
        if raw["arm"] == "none":
            continue
        entry = {key: value for key, value in raw.items() if not key.startswith(("greedy", "sampled"))}
        entry["name"], entry["date"] = name, time.strftime("%Y-%m-%d", time.gmtime())
        none = next((r for r in raws.values() if r["arm"] == "none" and r["attention"] == raw["attention"]), {})
        try:
            if "greedy5" in none:
                entry["noise"] = noise(none["greedy32"], none["greedy5"])
                entry["greedy"] = {"none_with_itself": identity(none["greedy5"], none["greedy32"])}
                for run in ("greedy32", "greedy5"):
                    if run in raw:
                        entry["greedy"][run] = identity(raw[run], none[run]) | {"steps": raw[run].get("steps")}
            if none.get("sampled") and none.get("sampled_again"):
                entry["sampled"] = {"none_with_itself": sampled_tests(none["sampled_again"], none["sampled"])}
                if raw.get("sampled"):
                    entry["sampled"]["skip"] = sampled_tests(raw["sampled"], none["sampled"])
        except Exception:
            entry["merge_failed"] = traceback.format_exc()[-800:]
        found.append(entry)
    temporary = args.out.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    temporary.replace(args.out)
    for entry in found:
        for run in ("none_with_itself", "greedy32", "greedy5"):
            if part := entry.get("greedy", {}).get(run):
                print(f"{entry['name']} {run}: {part['same']} of {part['prompts']} the same, largest gap where they "
                      f"part {part['largest_gap']} (noise up to {entry['noise']['max']})", flush=True)  # fmt: skip
        for run, part in entry.get("sampled", {}).items():
            print(f"{entry['name']} sampled {run}: least p {part['least_p']}, corrected {part['least_p_corrected']}, "
                  f"{part['below_0.05']} of {part['tests']} below 0.05", flush=True)  # fmt: skip
        if entry.get("merge_failed"):
            print(entry["merge_failed"], flush=True)
    return 0


def run(args: argparse.Namespace) -> int:
    this = Run(args)
    try:
        this.start()
    except BaseException:
        this.say(traceback.format_exc())
        if this.log.exists():
            this.say(this.log.read_text(errors="replace")[-3000:])
        raise
    if this.prompts:
        this.plan("warm-up", random=9, candidates=this.candidates)
        this.generate(this.prompts[500:540], 60, 20)
    parts = {"none": ["greedy", "sampled"], "cost": ["cost"],
             "skip": ["greedy", "resume", "switches", "sampled", "cost"]}[args.arm]  # fmt: skip
    for part in args.parts.split(",") if args.parts else parts:
        this.safely(getattr(this, part))
    this.found["last_state"] = (this.lines("state.jsonl") or [None])[-1]
    this.write()
    this.engine.shutdown()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run")
    measure.add_argument("--pair", type=Path, default=Path(), help="folder of train_pair.py")
    measure.add_argument("--models", type=Path, default=Path(), help="folder of models.py, for --arm cost")
    measure.add_argument("--attention", default="triton")
    measure.add_argument("--arm", choices=["none", "skip", "cost"], required=True)
    measure.add_argument("--tree", action="store_true", help="a tree of draft tokens, and K=0")
    measure.add_argument("--label", default="", help="name of the raw file beside the attention, default the arm")
    measure.add_argument("--raw", type=Path, required=True, help="folder of the raw files")
    measure.add_argument("--no-overlap", action="store_true")
    measure.add_argument("--parts", default="", help="only these, separated by commas")
    measure.add_argument("--ring-mb", type=int, default=RING_MB)
    measure.add_argument("--switch-seconds", type=float, default=120.0)
    measure.add_argument("--seconds", type=float, default=1e9, help="begin no further part after this time")
    merged = commands.add_parser("merge")
    merged.add_argument("--raw", type=Path, required=True)
    merged.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    return merge(args) if args.command == "merge" else run(args)


if __name__ == "__main__":
    raise SystemExit(main())

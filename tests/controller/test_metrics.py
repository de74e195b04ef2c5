"""Metrics say what the snapshot says, are named as Prometheus wants it, and are the ones that the files ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from specpilot.controller.serve.snapshot import Snapshot
from specpilot.controller.web.metrics import exposition, labels, names
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.settings import Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import DecisionSource
from tests.project.test_docs import code, codes, rows, section
from tests.support.snapshots import changed, snapshot

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/specpilot.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/specpilot.rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
WORDS = {
    "abs", "and", "avg", "by", "clamp_min", "group_left", "humanize", "ignoring", "increase", "label_values", "max",
    "min", "on", "or", "rate", "sum", "unless", "vector", "without", "up",
}  # fmt: skip


@pytest.fixture(scope="module")
def known() -> Snapshot:
    return snapshot(servers=2)


def scraped(one: Snapshot) -> dict[str, list[tuple[dict[str, str], float]]]:
    body, content_type = exposition(one)
    assert content_type.startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: dict[str, list[tuple[dict[str, str], float]]], name: str, **given: str) -> float:
    (only,) = [number for labels, number in found[name] if given.items() <= labels.items()]
    return only


def test_values_are_those_of_the_snapshot(known: Snapshot) -> None:
    found = scraped(known)
    server = known.servers["node:30000/0"]
    assert server.knowledge is not None
    here = {"server": "node:30000/0"}
    for (steps, source), count in server.totals.steps.items():
        assert value(found, "specpilot_decode_steps_total", steps=str(steps), source=source.name, **here) == count
    for place, position in enumerate(server.knowledge.positions, start=1):
        for end in ("", "_low", "_high"):
            acceptance = getattr(position.acceptance, end[1:] or "value")
            got = value(found, f"specpilot_acceptance{end}_ratio", position=str(place), **here)
            assert got == pytest.approx(acceptance)
    gain = server.knowledge.gain()
    assert gain is not None
    assert value(found, "specpilot_expected_gain_ratio", **here) == pytest.approx(gain.value)
    assert value(found, "specpilot_switchback_gain_low_ratio", **here) == pytest.approx(0.08)
    assert value(found, "specpilot_decision_source", source="TABLE", **here) == 1
    assert value(found, "specpilot_decision_source", source="HALTED", **here) == 0
    assert value(found, "specpilot_server_up", **here) == 1
    assert value(found, "specpilot_exploration_lost_seconds_total", **here) == server.knowledge.explored_seconds
    columns = len(server.knowledge.context_edges) + 1
    cell = server.knowledge.cells[server.knowledge.batch_edges.index(8) * columns]
    assert cell is not None
    cost = value(found, "specpilot_learned_step_seconds", steps="3", batch_size="8", **here)
    assert cost == pytest.approx(cell.seconds[2])


def test_every_metric_is_scraped_and_no_other(known: Snapshot) -> None:
    found = {name for name in scraped(known) if not name.startswith("process_")}
    assert found == set(names())
    for name, samples in scraped(known).items():
        for given, _ in samples:
            assert name.startswith("process_") or set(given) == set(labels()[name])


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name in names():
        assert re.fullmatch(r"specpilot_[a-z]+(_[a-z]+)*", name)
        assert not re.search(r"_(ms|milliseconds|percent|minutes|mb|kb|count)(_|$)", name), "base units"


def test_what_is_not_known_is_left_out_not_made_up() -> None:
    one = snapshot(table=None, source="FALLBACK", expected_gain=None, switchback=None, silent_seconds=99.0)
    found = scraped(one)
    assert value(found, "specpilot_server_up") == 0
    gone = {name for name in names() if name not in found}
    assert gone == {name for name in names() if re.search("table_age|expected_gain|switchback|out_of_force", name)}


def test_series_are_few() -> None:
    """By server: what does not grow with the batch sizes that a server has captured, nor with the time."""
    one = scraped(snapshot(servers=10))
    assert sum(len(samples) for samples in one.values()) < 10 * 200
    sizes = {given["batch_size"] for given, _ in one["specpilot_learned_step_seconds"]}
    assert sizes == {"1", "2", "4", "8", "16", "32", "64"}


def test_odd_names_do_not_break_the_format() -> None:
    name = 'a"b\\c\n{d}'
    one = snapshot(model=name)
    assert scraped(one)["specpilot_server_info"][0][0]["model"] == name


def test_failures_are_told() -> None:
    found = scraped(changed(snapshot(), trace_error="disk full", prior_error="", trace_lost=7))
    assert value(found, "specpilot_trace_failing") == 1
    assert value(found, "specpilot_prior_failing") == 0
    assert value(found, "specpilot_trace_records_lost_total") == 7


def counters(tmp_path: Path) -> set[str]:
    settings = Settings(endpoint=f"ipc://{tmp_path}/none.ipc")
    agent = Agent(settings, TablePolicy(settings, [0, 1], 1))
    agent.start(ServerFacts(server_id="s"))
    found = set(agent.state().counters)
    agent.stop()
    return found


def expressions() -> list[str]:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked += [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return asked + [rule["expr"] for rule in RULES]


def test_dashboard_and_alerts_ask_for_what_exists(tmp_path: Path) -> None:
    asked = expressions()
    assert len(asked) > 40
    events = counters(tmp_path)
    for expression in asked:
        plain = re.sub(r'"[^"]*"|\$__?\w+|\$\w+|\[[^]]*\]', "", expression)
        variables = {"job", *(label for found in labels().values() for label in found), "instance"}
        for word in re.findall(r"[a-z_]\w*", plain):
            assert word in names() or word in WORDS or word in variables, (word, expression)
        for name, chosen in re.findall(r"(specpilot_\w+)(\{[^}]*\})", expression):
            for label, _, wanted in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', chosen):
                assert label in labels()[name], (label, expression)
                if label == "event":
                    assert wanted in events, wanted
                if label == "source":
                    assert wanted in DecisionSource.__members__, wanted


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    wanted = {
        "DrafterBroken",
        "SpeculationCosts",
        "ServerLost",
        "NotDeciding",
        "Drops",
        "RanksDiffer",
        "ControllerDown",
    }
    assert {f"Specpilot{name}" for name in wanted} <= {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
    documented = [code(row[0]) for row in rows(section("metrics.md", "Alerts"))]
    assert documented == [rule["alert"] for rule in RULES]


def test_dashboard_is_whole() -> None:
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(x, y) for p in panels for g in [p["gridPos"]] for x in range(g["x"], g["x"] + g["w"])
              for y in range(g["y"], g["y"] + g["h"])]  # fmt: skip
    assert len(set(places)) == len(places), "panels overlap"
    assert all(panel["description"] for panel in panels)
    shown = " ".join(expressions())
    for metric in ("decode_steps", "acceptance", "learned_step", "expected_gain", "exploration_lost", "switches",
                   "switchback_gain", "events", "table_age", "drafter_broken"):  # fmt: skip
        assert f"specpilot_{metric}" in shown


def test_documented_metrics_are_the_metrics() -> None:
    documented = {code(row[0]): row[1] for row in rows(section("metrics.md", "Every metric")) if len(row) == 3}
    # A row for an estimate stands for the ends of its interval too.
    assert set(documented) == {name for name in names() if not re.search("_(low|high)_(ratio|seconds)$", name)}
    for name, told in documented.items():
        assert tuple(codes(told)) == labels()[name], name

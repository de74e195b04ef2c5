"""The page of ``specpilot replay --report``: whole in itself, readable by everyone, and right."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from specpilot.controller.cli import main
from specpilot.controller.replay.judge import COURSE_PARTS, REGRET_POINTS, Course, Regret
from specpilot.controller.replay.report import best_fixed, shown_course, summary_rows, write_report
from specpilot.controller.replay.result import Examined
from specpilot.controller.replay.run import examine, simulate
from specpilot.controller.replay.scenario import Scenario
from specpilot.controller.simulation.named_surfaces import load_surface
from specpilot.controller.simulation.workload import generated_requests

POLICIES = ["none", "static:1", "static:5", "batch-table:1:5,8:3", "goodput", "informed-greedy"]
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements with their attributes and text, and whether tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self._open: list[tuple[str, int]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, index in self._open:
            self.texts[index] = self.texts.get(index, "") + data

    def of(self, tag: str, **attributes: str) -> list[str]:
        """Texts of the elements of a kind."""
        return [
            self.texts.get(index, "").strip()
            for index, (name, own) in enumerate(self.elements)
            if name == tag and all(own.get(key) == value for key, value in attributes.items())
        ]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report") / "new"
    arguments = ["replay", "--surface", "moe", "--concurrency", "4", "--seconds", "12", "--seeds", "2"]
    assert main([*arguments, "--policies", *POLICIES, "--report", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["replay.html"]
    return (folder / "replay.html").read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_it_needs_no_network(text: str, page: Page) -> None:
    addresses = set(re.findall(r"""[a-z]+://[^"' )<]*""", text))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed"), tag
        for name, value in attributes.items():
            if value and "://" in value:
                assert name.startswith("xmlns"), (tag, name, value)
            if name in ("src", "href", "xlink:href", "action"):
                assert value is not None
                assert value.startswith("#")
    assert "@import" not in text
    assert len(text.encode()) < 500_000


def test_every_policy_and_every_plot_is_there(page: Page) -> None:
    assert page.of("th", scope="row") == POLICIES
    assert len(page.of("th", scope="col")) == 10
    assert page.of("h2")[:5] == ["Summary", "Regret", "One run over time", "Share of the best K", "Steps to 95 %"]
    assert page.of("title")[1:] == page.of("h2")[1:5]
    (regret, course, shares, until) = page.of("svg")
    for policy in POLICIES:
        assert all(policy in plot for plot in (regret, shares, until))
    assert "acceptance" in course
    assert "batch size" in course


def test_it_is_for_everyone(text: str, page: Page) -> None:
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert max(ids.values()) == 1
    labels = [words for _, attributes in page.elements if (words := attributes.get("aria-labelledby"))]
    assert {label for words in labels for label in words.split()} <= ids.keys()
    assert set(re.findall(r"""(?:href="#|url\(#)([^")]+)""", text)) <= ids.keys()
    # What scrolls can be scrolled by keys.
    scrolling = [attributes for _, attributes in page.elements if attributes.get("class") == "scroll"]
    assert len(scrolling) == 5
    assert all(own["tabindex"] == "0" and own["role"] == "region" for own in scrolling)
    drawings = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert all(own["role"] == "img" and own["viewbox"] for own in drawings)
    assert all(len(described) > 80 for described in page.of("desc"))
    assert len(page.of("caption")) == 1
    # Ink and rules are the page's, so that they turn with it.
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert not re.search(r"#0a0b0c|#0c0b0a|#000000|#ffffff", text)
    assert "width=device-width" in text


def examined(policy: str, seed: int = 1, /, **changes: Any) -> Examined:
    scenario = Scenario(load_surface("h200-sglang"), generated_requests(50, seed), 8.0, seed, concurrency=4)
    result, judged = examine(policy, scenario)
    return Examined(msgspec.structs.replace(result, **changes), Regret.of(judged), Course.of(judged))


def test_differences_are_taken_seed_by_seed() -> None:
    shares = {"static:1": (0.5, 0.7), "static:3": (0.6, 0.7), "informed-greedy": (0.9, 1.0), "goodput": (0.85, 0.96)}
    one = examined("static:1")
    found = [
        replace(one, result=msgspec.structs.replace(one.result, policy=policy, seed=seed, reference_share=share))
        for policy, own in shares.items()
        for seed, share in enumerate(own)
    ]
    assert best_fixed(found) == "static:3"
    rows = {row["policy"]: row for row in summary_rows(found, list(shares))}
    # By hand: half of the interval is 12.706 times the difference of two values, halved.
    assert rows["goodput"]["share"] == "90.50 ± 69.88"
    assert rows["goodput"]["to_fixed"] == "+25.50 ± 6.35"
    assert rows["goodput"]["to_reference"] == "-4.50 ± 6.35"
    assert rows["static:3"]["to_fixed"] == rows["informed-greedy"]["to_reference"] == "-"


def test_a_run_is_drawn_from_few_points() -> None:
    scenario = Scenario(load_surface("h200-sglang"), generated_requests(50, 1), 70.0, 1, concurrency=2)
    result, judged = examine("static:1", scenario)
    regret, course = Regret.of(judged), Course.of(judged)
    assert len(regret.steps) == REGRET_POINTS
    assert regret.steps[-1] == result.steps
    lost = (judged.seconds * (1.0 - judged.expected / judged.best)).sum()
    assert regret.lost_seconds[-1] == pytest.approx(lost)
    assert (np.diff(regret.lost_seconds) >= 0.0).all()
    assert 0.9 * COURSE_PARTS < len(course.at) <= COURSE_PARTS
    assert set(course.steps) == {1}
    assert ((course.batch >= 1.0) & (course.batch <= 2.0)).all()
    changed = np.flatnonzero(np.diff(course.acceptance))
    assert course.at[changed + 1] == pytest.approx([60.0], abs=0.3)


@pytest.mark.parametrize(
    ("policies", "shown"),
    [
        (["none", "goodput", "sglang"], "goodput"),
        (["none", "static:1", "sglang"], "sglang"),
        (["none", "static:1"], "none"),
    ],
)
def test_the_course_is_of_what_adapts(policies: list[str], shown: str) -> None:
    one = examined("static:1")
    found = [replace(one, result=msgspec.structs.replace(one.result, policy=policy)) for policy in policies]
    assert shown_course(found, policies).result.policy == shown


def test_one_seed_and_no_reference(tmp_path: Path) -> None:
    """No intervals, nothing to compare with, and what was never reached."""
    found = [examined("none", steps_to_95=None)]
    path = write_report(found, load_surface("h200-sglang"), tmp_path)
    page = Page(path.read_text())
    assert "Difference to the best fixed K" in page.of("th", scope="col")
    assert "±" not in path.read_text()
    assert "never in 1 of 1" in page.of("svg")[3]


def test_names_are_escaped(tmp_path: Path) -> None:
    path = write_report([examined("static:3", policy="<b>&")], load_surface("h200-sglang"), tmp_path)
    assert "<b>" not in path.read_text()
    assert Page(path.read_text()).of("th", scope="row") == ["<b>&"]


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_what_it_draws_with_is_asked_for_by_name(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*sys.modules]:
        if name == "specpilot.controller.replay.report" or name.split(".")[0] == missing:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["replay", "--policies", "none", "--seconds", "5", "--report", str(tmp_path)]) == 1
    assert "pip install '.[demo]'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    # Nothing else needs it.
    scenario = Scenario(load_surface("moe"), generated_requests(9, 1), 2.0, 1, concurrency=1)
    assert simulate("static:1", scenario).steps > 10

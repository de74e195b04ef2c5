"""The documentation says what the code does: options, keys, columns, counters, commands, figures."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from rich.console import Console

from specpilot.controller.cli import parser
from specpilot.controller.client.status import print_status
from specpilot.controller.config import Config, load_config
from specpilot.controller.serve.counters import CONTROLLER_COUNTERS, SERVER_COUNTERS
from specpilot.controller.serve.report import ControllerStatus, ServerStatus
from specpilot.controller.serve.switchback import SwitchbackStatus
from specpilot.controller.trace.format import SCHEMA
from specpilot.policies.knowledge import Estimate
from specpilot.sglang_hooks.agent import Agent, ServerFacts
from specpilot.sglang_hooks.counters import COUNTERS
from specpilot.sglang_hooks.settings import OPTIONS, Settings
from specpilot.sglang_hooks.table_policy import TablePolicy
from specpilot.sglang_hooks.wire import Message
from tests.support.messages import table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def section(page: str, heading: str) -> str:
    """The text from a heading to the next one of its level or above."""
    lines = (DOCS / page).read_text().splitlines()
    first, *rest = dropwhile(lambda line: line.lstrip("# ") != heading or not line.startswith("#"), lines)
    level = len(first) - len(first.lstrip("#"))
    found = []
    fenced = False
    for line in rest:
        fenced ^= line.startswith("```")
        if not fenced and re.match(rf"#{{1,{level}}} ", line):
            break
        found.append(line)
    return "\n".join(found)


def rows(text: str) -> list[list[str]]:
    """Cells of every table row, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = {i for i, row in enumerate(cells) if set("".join(row)) <= {"-"}}
    return [row for i, row in enumerate(cells) if i not in rules and i + 1 not in rules]


def code(cell: str) -> str:
    """The one code span that a cell is, or "" for any other cell."""
    found = re.fullmatch(r"`([^`]+)`", cell)
    return found[1] if found else ""


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_environment_options() -> None:
    documented = rows(section("options.md", "Environment of the server"))
    assert [code(name) for name, _, _ in documented] == [option.name for option in OPTIONS]
    for (_, default, meaning), option in zip(documented, OPTIONS, strict=True):
        assert default == (f"`{option.default}`" if option.default else "(empty)")
        assert meaning.startswith(option.meaning)


def test_nothing_is_installed_from_an_index() -> None:
    """No index has Specpilot; whoever asks one for it gets an error, or what somebody else put there."""
    places = (".", "docs", "deploy", "benchmarks", "controller", "policies", "sglang_hooks")
    files = [path for place in places for path in (ROOT / place).glob("*.md" if place == "." else "**/*")]
    texts = {path: path.read_text() for path in files if path.suffix in ("", ".md", ".py", ".yaml") and path.is_file()}
    assert len(texts) > 100
    assert [str(path) for path, text in texts.items() if re.search(r"pip install[^\n]* ['\"]?specpilot", text)] == []


def toml_keys() -> Iterator[tuple[str, Any]]:
    """Every key of the file with its default; ``msgspec.NODEFAULT`` where it must be given."""
    yield "mode", Config().mode
    for name, hint in get_type_hints(Config).items():
        if name in ("mode", "servers"):  # no section; sections of these very keys
            continue
        for struct in get_args(hint) or (hint,):
            if tag := struct.__struct_config__.tag_field:
                yield f"{name}.{tag}", getattr(Config(), name).__struct_config__.tag
            for field in msgspec.structs.fields(struct):
                made = field.default_factory is not msgspec.NODEFAULT
                yield f"{name}.{field.name}", field.default_factory() if made else field.default


def test_toml_keys() -> None:
    documented: dict[str, list[str]] = {}
    for key, default, _, _ in rows(section("options.md", "The controller's file")):
        documented.setdefault(code(key), []).append(code(default))
    expected: dict[str, list[Any]] = {}
    for key, default in toml_keys():
        expected.setdefault(key, []).append(default)
    assert documented.keys() == expected.keys()
    for key, defaults in expected.items():
        plain = [default for default in defaults if default not in (None, msgspec.NODEFAULT)]
        assert {repr(tomllib.loads(f"x = {text}")["x"]) for text in documented[key] if text} == {*map(repr, plain)}, key


@pytest.mark.parametrize("page", ["options.md", "quickstart.md"])
def test_example_files_load(page: str, tmp_path: Path) -> None:
    examples = re.findall(r"```toml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert examples
    path = tmp_path / "controller.toml"
    for example in examples:
        path.write_text(example)
        load_config(path)
    if page == "options.md":  # the complete one, and what else may stand in [policy]
        given = [section for example in examples for section in tomllib.loads(example).items()]
        given = [(name, values) for name, values in given if name != "servers"]
        keys = {
            f"{name}.{key}" if isinstance(values, dict) else name
            for name, values in given
            for key in (values if isinstance(values, dict) else [""])
        }
        assert keys == {key for key, _ in toml_keys()}


def test_trace_columns() -> None:
    documented = {code(name): code(kind) for name, kind, _, _ in rows(section("trace.md", "Columns"))}
    assert documented == {field.name: str(field.type).replace("item: ", "") for field in SCHEMA}
    assert list(documented) == SCHEMA.names


def test_counters(tmp_path: Path) -> None:
    settings = Settings(endpoint=f"ipc://{tmp_path}/none.ipc")
    agent = Agent(settings, TablePolicy(settings, [0, 1], 1))
    agent.start(ServerFacts(server_id="s"))
    counters = agent.state().counters
    agent.stop()
    assert sorted(counters) == sorted(COUNTERS)
    server, controller, trouble = (
        [code(row[0]) for row in rows(section("status.md", heading))]
        for heading in ("Kept by the server", "Kept by the controller", "Other signs of trouble")
    )
    assert server == list(COUNTERS)
    assert controller == [*SERVER_COUNTERS, *CONTROLLER_COUNTERS]
    fields = {*ControllerStatus.__struct_fields__, *ServerStatus.__struct_fields__}
    assert {field for field in trouble if field not in fields} == set()
    assert {field for field in fields if re.search("lost|error|refused|note", field)} <= set(trouble)


def test_status_lines_and_fields() -> None:
    server = ServerStatus(
        server="s/0", model="m", gpu="g", sglang_version="v", mode="control", candidate_steps=[0, 1],
        silent_seconds=0.0, source="TABLE", steps=1, table=table(), reason="r", table_age_seconds=1.0,
        pending_epoch=2, confirmed_ranks=0, tp_size=2, records=1, records_lost=1, tokens_per_second=1.0,
        share_by_steps={"1": 1.0}, counters={"hook_failures": 1}, note="n",
        switchback=SwitchbackStatus("policy", 1, None, 0, 5, 0, 0.0), expected_gain=Estimate(0.1, 0.05, 0.2),
    )  # fmt: skip
    controller = ControllerStatus(
        version="1", pid=1, endpoint="e", policy="p", uptime_seconds=1.0, trace_directory="d", trace_written=1,
        trace_lost=1, trace_bytes=1, trace_error="", refused_messages=0, handshakes_failed=0, config_error="",
        changes=[], prior_error="", servers=[server],
    )  # fmt: skip
    console = Console(width=200)
    with console.capture() as capture:
        print_status(controller, console)
    lines = [line.split()[0] for line in capture.get().splitlines()[3:]]
    text = section("status.md", "What `specpilot status` shows")
    head, for_each, fields = re.split(r"\n\n(?=For each server,|With `--json`)", text)
    assert head
    assert [code(row[0]) for row in rows(for_each)] == lines
    documented = [name for row in rows(fields) for name in codes(row[0])]
    expected = [*ControllerStatus.__struct_fields__, *ServerStatus.__struct_fields__]
    assert sorted(documented) == sorted(expected)


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    """Every (command, option); a command that runs also comes with an empty option."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from commands(child, f"{name} {word}")
            return
    yield name, ""
    for action in parser._actions:
        yield from ((name, option) for option in action.option_strings if option not in ("-h", "--help"))


def test_commands() -> None:
    real = set(commands(parser(), "specpilot"))
    text = section("options.md", "The command line")
    documented = {(code(row[0]), code(row[1])) for row in rows(text) if len(row) == 4}
    assert documented == (real | {("specpilot trace info", "PATH …")}) - {("specpilot trace info", "")}
    names = {name for name, _ in real}
    for page in [*DOCS.glob("*.md")]:
        for mention in re.findall(r"(?:^|`)specpilot ([a-z]+(?: [a-z]+)?)\b", page.read_text(), re.MULTILINE):
            words = mention.split()
            assert f"specpilot {mention}" in names or f"specpilot {words[0]}" in names, (page.name, mention)


def test_wire_messages() -> None:
    documented = {code(row[0]): code(row[1]) for row in rows(section("design.md", "Messages"))}
    assert documented == {kind.__name__: kind.__struct_config__.tag for kind in get_args(Message)}


@pytest.mark.sglang
def test_hooks() -> None:
    from specpilot.sglang_hooks import plugin
    from specpilot.sglang_hooks.uses import POLICY_CLASS

    documented = [name for row in rows(section("design.md", "What is hooked")) for name in codes(row[0].split("(")[0])]
    assert documented == [
        target.rsplit(".", 1 if target == POLICY_CLASS else 2)[1]
        + ("" if target == POLICY_CLASS else f".{target.rsplit('.', 1)[1]}")
        for target in plugin.targets()
    ]


def test_live_figures() -> None:
    documented = [row for row in rows(section("measurements.md", "Does K follow the load?")) if len(row) == 7]
    runs = json.loads((ROOT / "benchmarks/live/follow_load.json").read_text())
    assert documented == [
        [
            run["attention"],
            str(run["tp"]),
            "on" if run["overlap"] else "off",
            " → ".join(f"{phase['tokens_per_second']:,}" for phase in run["phases"]),
            ", ".join(str(phase["k_after_steps"]) for phase in run["phases"]),
            str(run["median_step_seconds"]["K=3"]["1"]),
            str(run["median_step_seconds"]["K=0"]["64"]),
        ]
        for run in runs
    ]


def test_figures_of_the_learned_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from replay_figures import markdown

    made = markdown(json.loads((ROOT / "benchmarks/replay_requirements.json").read_text()))
    assert (ROOT / "benchmarks/replay_requirements.md").read_text().endswith(made)
    text = section("measurements.md", "The learned policy in replay").split("### ")[0]
    for columns in (7, 4):  # shares by case; figures
        assert [row for row in rows(text) if len(row) == columns] == [row for row in rows(made) if len(row) == columns]


def test_figures_of_the_fit() -> None:
    text = section("offline.md", "What fitting costs, and what it gives")
    measured = json.loads((ROOT / "benchmarks/fit_scale.json").read_text())
    starts = json.loads((ROOT / "benchmarks/fit_warm_start.json").read_text())["summary"]
    shares = ("share_of_first_150", "choice_within_150", "within_150")
    assert rows(text) == [
        *(
            [f"{fit['steps']:,}", f"{fit['trace_mb']:,}", str(fit["seconds"]), str(fit["memory_mb"])]
            for fit in measured["fits"]
        ),
        *(
            [
                name,
                *(f"{100 * found[share]:.1f} %" for share in shares),
                *(f"{found[n]:.0f}" for n in ("median", "p95", "most")),
            ]
            for name, found in (("from nothing", starts["none"]), ("from the fitted prior", starts["fitted"]))
        ),
    ]
    assert f"mean batch of {measured['mean_batch']}\n" in text
    assert f"{starts['fitted']['runs']} runs on six" in text


def test_figures_of_the_web_page() -> None:
    measured = json.loads((ROOT / "benchmarks/web_load.json").read_text())
    quiet, again, browser, ten = (
        f"{100 * measured[f'share_{of}']:.1f} %" for of in ("nobody", "nobody_again", "browser", "ten_readers")
    )
    scrape, status = measured["scrape_ms"], measured["status_ms"]
    documented = [row[1] for row in rows(section("measurements.md", "The web page"))]
    assert documented == [
        f"{quiet} and {again} of a core",
        f"{browser} of a core",
        f"{ten} of a core",
        f"{scrape['median']} / {scrape['most']} ms",
        f"{status['median']} / {status['most']} ms",
    ]
    assert f"at {measured['updates_per_second']} updates" in section("measurements.md", "The web page")
    assert measured["date"] in section("measurements.md", "The web page")

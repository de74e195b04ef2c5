"""The shape of the house: which package may import which, no cycles, nothing that has outgrown its room."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("controller", "policies", "sglang_hooks")
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
MAY_IMPORT = {
    "sglang_hooks": ("sglang_hooks",),
    "policies": ("policies", "sglang_hooks"),
    "controller": PACKAGES,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, ast.Module]:
    """Syntax trees by the name under which a module is imported."""
    trees = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = ("specpilot", *path.relative_to(ROOT).with_suffix("").parts)
            trees[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return trees


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """The project's modules that a tree imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported; not those for type checkers alone."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif isinstance(node, Function):
            continue
        else:
            yield node
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def test_no_module_imports_itself_by_a_detour() -> None:
    """Imports within functions count too: one that is there to dodge a cycle is a cycle."""
    graph = {name: {found for found in imported(tree) if found in MODULES} - {name} for name, tree in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_downward(package: str) -> None:
    allowed = {f"specpilot.{name}" for name in MAY_IMPORT[package]}
    for name, tree in MODULES.items():
        if name.split(".")[1] == package:
            for found in imported(tree):
                if found.startswith("specpilot"):
                    assert ".".join(found.split(".")[:2]) in allowed, f"{name} imports {found}"
                assert found.split(".")[0] not in PACKAGES, f"{name} imports {found}: say specpilot.{found}"


def test_what_a_server_imports_is_little() -> None:
    known = {"msgspec", "numpy", "zmq", "sglang", "torch", "specpilot"}
    for name, tree in MODULES.items():
        if name.split(".")[1] == "sglang_hooks":
            for node in at_import(tree):
                for found in imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
                    top = found.split(".")[0]
                    assert top in known or top in sys.stdlib_module_names, f"{name} imports {found}"


def test_every_public_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_file_has_outgrown_its_room() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {path: lines for path, lines in lengths.items() if lines > LINES_OF_A_FILE} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {}
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > LINES_OF_A_FUNCTION:
                    long[f"{name}.{node.name}"] = lines
    assert long == {}

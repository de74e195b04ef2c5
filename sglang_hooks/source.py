"""SGLang's source, read as syntax trees: what is where, with which parameters, and what a function does.

Nothing is imported, so a wheel that is merely unpacked can be read, in any environment.
"""

from __future__ import annotations

import ast
import gc
from importlib.resources.abc import Traversable

Function = ast.FunctionDef | ast.AsyncFunctionDef

_KEPT = 8
"""Trees held at a time; one of a large module takes tens of MB."""


class Source:
    """The modules below one folder, each parsed when it is asked for."""

    def __init__(self, root: Traversable) -> None:
        """``root`` is the folder that holds ``sglang``, or the root of a wheel."""
        self._root = root
        self._parsed: dict[str, ast.Module | None] = {}

    def read(self, name: str) -> bytes | None:
        """Return the text of a module by its dotted name, or None if there is no such file."""
        file = self._root.joinpath(f"{name.replace('.', '/')}.py")
        return file.read_bytes() if file.is_file() else None

    def module(self, name: str) -> ast.Module | None:
        """Return the tree of a module, or None if there is no such file."""
        if name not in self._parsed:
            if len(self._parsed) >= _KEPT:
                del self._parsed[next(iter(self._parsed))]
            text = self.read(name)
            self._parsed[name] = None if text is None else _parse(text)
        return self._parsed[name]

    def find(self, target: str) -> ast.ClassDef | Function | str:
        """Return the definition at a dotted path of a module (no package), or what of the path is not there."""
        parts = target.split(".")
        folder, end = self._root, 0
        while folder.joinpath(parts[end]).is_dir():
            folder, end = folder.joinpath(parts[end]), end + 1
        name = ".".join(parts[: end + 1])
        tree = self.module(name)
        return f"no module {name}" if tree is None else _within(tree, name, parts[end + 1 :])

    def attributes(self, target: str) -> set[str]:
        """Return every name that a class, or one of its bases in SGLang, declares, defines or sets on ``self``."""
        node = self.find(target)
        if not isinstance(node, ast.ClassDef):
            return set()
        names = set(_own_attributes(node))
        for base in node.bases:
            if path := self._resolve(target.rsplit(".", 1)[0], base):
                names |= self.attributes(path)
        return names

    def _resolve(self, module: str, base: ast.expr) -> str:
        """Return the dotted path of a base class, as its module names it; "" if it is not SGLang's."""
        if not isinstance(base, ast.Name):
            return ""
        tree = self.module(module)
        assert tree is not None
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == base.id:
                return f"{module}.{base.id}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                for alias in node.names:
                    if (alias.asname or alias.name) == base.id:
                        return f"{node.module}.{alias.name}"
        return ""


def _parse(text: bytes) -> ast.Module:
    """Parse without the garbage collector, which would go through all of a server's objects time and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collecting:
            gc.enable()


def parameters(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters, in order.

    >>> parameters(ast.parse("def f(self, a, *rest, b=1, **more): ...").body[0])
    ('self', 'a', 'rest', 'b', 'more')
    """
    a = function.args
    found = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    return tuple(one.arg for one in found if one is not None)


def places(function: Function, pattern: str) -> list[tuple[int, int]]:
    """Return where a function does what ``pattern`` says: (line, column) of each, rising.

    ``name(a, b)`` is that call with exactly these arguments, ``name(a, ...)`` one with at least these;
    ``name =`` is an assignment.

    >>> function = ast.parse("def f(x):\\n  x.y = g(x, 1)\\n  g(x)").body[0]
    >>> places(function, "g(x)"), len(places(function, "g(x, ...)")), places(function, "x.y =")
    ([(3, 2)], 2, [(2, 2)])
    """
    found = []
    if pattern.endswith(" ="):
        wanted = pattern.removesuffix(" =")
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [(node.lineno, node.col_offset) for one in targets if ast.unparse(one) == wanted]
        return sorted(found)
    call = ast.parse(pattern, mode="eval").body
    assert isinstance(call, ast.Call), pattern
    wanted = ast.unparse(call.func)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == wanted and _takes(node, call):
            found.append((node.lineno, node.col_offset))
    return sorted(found)


def _takes(call: ast.Call, pattern: ast.Call) -> bool:
    is_open = any(isinstance(one, ast.Constant) and one.value is ... for one in pattern.args)
    wanted = [ast.unparse(one) for one in pattern.args if not (isinstance(one, ast.Constant) and one.value is ...)]
    wanted_named = {one.arg: ast.unparse(one.value) for one in pattern.keywords}
    given = [ast.unparse(one) for one in call.args]
    named = {one.arg: ast.unparse(one.value) for one in call.keywords}
    if is_open:
        return given[: len(wanted)] == wanted and wanted_named.items() <= named.items()
    return given == wanted and wanted_named == named


def _within(tree: ast.Module | ast.ClassDef, name: str, parts: list[str]) -> ast.ClassDef | Function | str:
    for part in parts:
        found = next((node for node in _definitions(tree) if node.name == part), None)
        if found is None:
            return f"no {part} in {name}"
        if part == parts[-1]:
            return found
        if not isinstance(found, ast.ClassDef):
            return f"{part} in {name} is no class"
        tree, name = found, f"{name}.{part}"
    return f"no {'.'.join(parts)} in {name}"


def _definitions(tree: ast.Module | ast.ClassDef) -> list[ast.ClassDef | Function]:
    """Classes and functions, those under an ``if`` or a ``try`` included; of several of one name, the last."""
    found: list[ast.ClassDef | Function] = []
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node)
        elif isinstance(node, ast.If | ast.Try):
            waiting[:0] = [*node.body, *node.orelse]
    return found[::-1]


def _own_attributes(node: ast.ClassDef) -> list[str]:
    names = []
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            names += [one.id for one in statement.targets if isinstance(one, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.append(statement.target.id)
        elif isinstance(statement, Function):
            names.append(statement.name)
            for inner in ast.walk(statement):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    names.append(inner.attr)
    return names

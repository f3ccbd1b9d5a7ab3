"""The house: sizes of modules and functions, their names, and nothing in src that nobody calls."""

from __future__ import annotations

import ast
import fnmatch
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "esscher"
TREES = {
    path: ast.parse(path.read_text("utf-8"))
    for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")])
}
MODULES = [path for path in TREES if path.suffix == ".py"]
ENTRY = re.compile(r"[\w.]+:(\w+)")  # "module:attribute", as jobs and views are named
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def share_below(values: list[int], share: float) -> int:
    """The smallest value that so many of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def test_modules_are_short() -> None:
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert {str(path): count for path, count in lines.items() if count > 500} == {}
    assert (
        statistics.median(count for path, count in lines.items() if path.name != "__init__.py")
        <= 150
    )


def test_functions_are_short() -> None:
    """Their bodies without docstrings: a formula and its source take the room they need."""
    assert share_below([length(node) for _, node in functions()], 0.9) <= 40
    assert {node.name: length(node) for _, node in functions() if length(node) > 100} == {}


def test_few_functions_have_many_parameters() -> None:
    """Commands too: their flags are fields of specs."""
    many = [f"{path.stem}.{node.name}" for path, node in functions() if parameters(node) > 7]
    assert len(many) <= 15, many


def test_every_name_of_a_module_has_a_caller() -> None:
    """In src, or it is public. vulture (make lint) looks at the rest, but takes a name in
    ``__all__`` for called.
    """
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["vulture"][
        "ignore_names"
    ]
    found = [
        name
        for name in uncalled(TREES)
        if not any(fnmatch.fnmatchcase(name.split(".")[-1], known) for known in config)
    ]
    assert found == []


def test_a_name_without_a_caller_is_found() -> None:
    source = (
        '__all__ = ["f", "g", "H", "x"]\ndef f(): ...\ndef g(): f()\nclass H: ...\nx: int = 1\nv ='
        ' {"a": "m:H"}\nprint(v)'
    )
    assert list(uncalled({Path("m.py"): ast.parse(source)})) == ["m.g", "m.x"]
    stub = ast.parse("from .m import g as g, x as x")
    assert list(uncalled({Path("m.py"): ast.parse(source), Path("m.pyi"): stub})) == []


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in MODULES:
        yield from ((path, node) for node in ast.walk(TREES[path]) if isinstance(node, FUNCTION))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the name to the end, the docstring not counted."""
    first = node.body[0]
    text = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return (
        (node.end_lineno or 0)
        - node.lineno
        + 1
        - ((first.end_lineno or 0) - first.lineno + 1 if text else 0)
    )


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([one for one in given if one.arg not in ("self", "cls")])


def uncalled(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Functions, classes and constants of modules whose names occur nowhere but where they are
    defined and listed.
    """
    used = Counter(
        name for tree in trees.values() for node in ast.walk(tree) for name in mentioned(node)
    )
    for path, tree in trees.items():
        for name in defined(tree) if path.suffix == ".py" else ():
            if not used[name] and not name.startswith("__"):
                yield f"{path.stem}.{name}"


def mentioned(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
            return [name]
        case ast.ImportFrom(names=names):
            return [alias.name for alias in names]
        case ast.Constant(value=str(text)):
            return ENTRY.fullmatch(text).groups() if ENTRY.fullmatch(text) else []  # type: ignore[union-attr, return-value]
        case _:
            return []


def defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case _:
                pass

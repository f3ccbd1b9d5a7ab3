"""Nothing in src is without a caller."""

from __future__ import annotations

import ast
import fnmatch
import re
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
CHECKS = ROOT / "docs" / "theory" / "statements.py"  # calls the formulas of [S] one by one
ENTRY = re.compile(r"[\w.]+:(\w+)")  # "module:attribute", as jobs and views are named


def test_every_name_of_a_module_has_a_caller() -> None:
    """In src, or it is public. vulture (make lint) looks at the rest, but takes a name in
    ``__all__`` for called.
    """
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["vulture"][
        "ignore_names"
    ]
    found = [
        name
        for name in uncalled(TREES, ast.parse(CHECKS.read_text("utf-8")))
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


def uncalled(trees: dict[Path, ast.Module], *callers: ast.Module) -> Iterator[str]:
    """Functions, classes and constants of modules whose names occur nowhere, in ``callers``
    neither, but where they are defined and listed.
    """
    used = Counter(
        name
        for tree in (*trees.values(), *callers)
        for node in ast.walk(tree)
        for name in mentioned(node)
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

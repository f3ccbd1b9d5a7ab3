"""The tree shows the theory: imports go one way, and a few things are never done in src."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# A part may import the parts of a lower rank, and itself. Equal ranks are siblings that do not know
# each other.
RANK = {
    "inputs": 0,
    "intervals": 0,
    "runs": 0,  # and imports nothing of the others at all
    "measures": 1,
    "keep": 2,
    "attention": 3,
    "theory": 4,
    "errors": 5,
    "tails": 6,
    "icl": 7,
    "hf": 7,
    "corpus": 8,
    "probe": 9,
    "compress": 10,
    "describe": 10,
    "papers": 11,
}
EDGES = {"", "cli", "__main__"}  # the package itself and the command line import everything
PARTS = {*RANK, *EDGES, "report"}
MODELS = {
    "hf",
    "corpus",
    "probe",
    "compress",
    "describe",
}  # the lab knows none of them, nor they it
REPORT_READS = {"errors", "theory"}  # result classes only
HUGGING_FACE = {"transformers", "datasets", "tokenizers", "huggingface_hub"}
RUNS_CODE_ON_LOADING = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
}
PICKLING_METHODS = {"read_pickle", "to_pickle"}
VAGUE = {"util", "utils", "common", "misc", "helper", "helpers"}


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What this source does against the rules, one line each; ``module`` is its dotted name,
    esscher included.
    """
    tree = ast.parse(source)
    own = part(module)
    found = [
        f"{module}: '{name}' says nothing about its content"
        for name in module.split(".")
        if is_vague(name)
    ]
    if own not in PARTS:
        found.append(
            f"{module}: '{own}' has no place in the order; give it one in tests/test_imports.py"
        )
    for line, target, name in imports(tree, module, is_package):
        found += [f"{module}:{line}: {reason}" for reason in import_violations(own, target, name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [f"{module}:{node.lineno}: {reason}" for reason in call_violations(node)]
    return found


def is_vague(name: str) -> bool:
    return name.strip("_") in VAGUE


def part(module: str) -> str:
    """First name below esscher; empty for the package itself."""
    return [*module.split("."), ""][1]


def imports(
    tree: ast.Module, module: str, is_package: bool
) -> Iterator[tuple[int, str, str | None]]:
    """(line, imported module, name taken from it) of every import: in functions, for types only, by
    import_module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package)
            for alias in node.names:
                if base == "esscher" and alias.name in PARTS:
                    yield node.lineno, f"esscher.{alias.name}", None
                else:
                    yield node.lineno, base, alias.name
        elif (
            isinstance(node, ast.Call)
            and called(node) in {"import_module", "__import__"}
            and node.args
        ):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value, None


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    drop = node.level - (1 if is_package else 0)
    base = module.split(".")[: len(module.split(".")) - drop]
    return ".".join(base + ([node.module] if node.module else []))


def import_violations(own: str, target: str, name: str | None) -> Iterator[str]:
    top = target.split(".")[0]
    if top in HUGGING_FACE and own not in {"hf", "corpus"}:
        yield f"only hf and corpus import {top}"
    if top in RUNS_CODE_ON_LOADING:
        yield f"{top} runs code when it loads; store data"
    if top == "torch" and target == "torch" and name in {"load", "save"}:
        yield f"torch.{name} pickles; store data"
    if top != "esscher" or own in EDGES:
        return
    other = part(target)
    if other == own:
        return
    if other == "":
        yield (
            f"imports {name or 'esscher'} from the package itself; import the module that"
            " defines it"
        )
    elif own == "runs":
        yield f"runs knows no mathematics, yet imports {target}"
    elif own == "report":
        if other in REPORT_READS and (name is None or not name[0].isupper()):
            yield f"report reads result classes only, yet imports {name or target}"
        elif other not in REPORT_READS | {"runs"}:
            yield f"report imports {target}"
    elif (
        other not in RANK or RANK[other] >= RANK.get(own, -1) or (other == "icl" and own in MODELS)
    ):
        yield f"{own} imports {target}, which comes later or beside it"


def call_violations(node: ast.Call) -> Iterator[str]:
    name = called(node)
    if isinstance(node.func, ast.Name) and name in {"eval", "exec"}:
        yield f"{name}() in src"
    if isinstance(node.func, ast.Attribute):
        if (
            isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and name in {"load", "save"}
        ):
            yield f"torch.{name} pickles; store data"
        if name in PICKLING_METHODS:
            yield f"{name} pickles; store data"
    for keyword in node.keywords:
        if keyword.arg in {"trust_remote_code", "allow_pickle"} and not is_false(keyword.value):
            yield f"{keyword.arg} must stay False"


def called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def dotted(path: Path) -> str:
    names = path.relative_to(SRC).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


# a stub lists what is imported later
MODULES = sorted([*(SRC / "esscher").rglob("*.py"), *(SRC / "esscher").rglob("*.pyi")])


@pytest.mark.parametrize("path", MODULES, ids=[dotted(path) + path.suffix[3:] for path in MODULES])
def test_module_keeps_the_order(path: Path) -> None:
    assert (
        violations(dotted(path), path.read_text("utf-8"), is_package=path.stem == "__init__") == []
    )


def test_the_source_is_found() -> None:
    assert len(MODULES) > 5


BROKEN = [
    ("esscher.measures.gaussian", "from esscher.attention.head import Head"),
    ("esscher.measures.gaussian", "from ..attention import head"),
    ("esscher.keep.position", "from esscher.errors import curve"),
    ("esscher.measures", "from .gaussian import Gaussian\nfrom ..theory import rates"),
    ("esscher.inputs", "import esscher.measures"),
    ("esscher.attention.head", "def f():\n    from esscher.errors import curve"),
    (
        "esscher.theory.rates",
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from esscher.errors import x"),
    ),
    ("esscher.theory.rates", "import importlib\nimportlib.import_module('esscher.hf')"),
    ("esscher.errors.exact", "from esscher import hf"),
    ("esscher.errors.exact", "from esscher import Gaussian"),
    ("esscher.errors.exact", "import esscher"),
    ("esscher.errors.exact", "from esscher.cli import main"),
    ("esscher.probe.job", "from esscher.icl import risk"),
    ("esscher.icl.exact", "from esscher.hf import probe"),
    ("esscher.icl.exact", "from esscher.papers import judge"),
    ("esscher.probe.job", "from esscher.papers import judge"),
    ("esscher.report.page", "from esscher.papers.claim import Claim"),
    ("esscher.runs.store", "from esscher.errors.curve import ErrorCurve"),
    ("esscher.runs.store", "from esscher.inputs import as_count"),
    ("esscher.report.page", "from esscher.errors import exact_curve"),
    ("esscher.report.page", "import esscher.theory"),
    ("esscher.report.page", "from esscher.measures import Gaussian"),
    ("esscher.report.page", "from esscher.hf import Atlas"),
    ("esscher.attention.head", "import transformers"),
    ("esscher.cli.probe", "from transformers import AutoModel"),
    ("esscher.tails.scores", "def f():\n    import datasets.load"),
    ("esscher.attention.utils", "x = 1"),
    ("esscher._helpers", "x = 1"),
    ("esscher.misc.head", "x = 1"),
    ("esscher.novelty", "x = 1"),
    ("esscher.runs.store", "import pickle"),
    ("esscher.runs.store", "from cloudpickle import dumps"),
    ("esscher.hf.loading", "import torch\ntorch.load('x', weights_only=True)"),
    ("esscher.hf.loading", "from torch import load"),
    ("esscher.hf.loading", "f('name', trust_remote_code=True)"),
    ("esscher.hf.loading", "f('name', trust_remote_code=flag)"),
    ("esscher.runs.store", "import pandas\npandas.read_pickle('x')"),
    ("esscher.runs.store", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    ("esscher.cli", "eval('1')"),
    ("esscher.cli", "exec('1')"),
]

SOUND = [
    ("esscher", "from esscher.hf import probe\nfrom esscher.measures import Gaussian"),
    (
        "esscher.cli.probe",
        "import esscher\nfrom esscher.icl import risk\nfrom esscher.report import page",
    ),
    (
        "esscher.errors.exact",
        "from esscher.theory import rates\nfrom . import curve\nfrom .curve import ErrorCurve",
    ),
    ("esscher.errors.exact", "from esscher import measures"),
    ("esscher.papers.judge", "from esscher.hf import probe\nfrom esscher.icl import risk"),
    (
        "esscher.report.page",
        "from esscher.errors.curve import ErrorCurve\nfrom esscher.runs import store",
    ),
    (
        "esscher.hf.loading",
        "import transformers\nmodel.eval()\nf('name', trust_remote_code=False)",
    ),
    ("esscher.attention.common_scale", "import torch\nimport numpy.typing as npt"),
]


@pytest.mark.parametrize(("module", "source"), BROKEN)
def test_a_violation_is_found(module: str, source: str) -> None:
    assert violations(module, source, is_package=module.count(".") == 1) != []


@pytest.mark.parametrize(("module", "source"), SOUND)
def test_sound_source_passes(module: str, source: str) -> None:
    assert violations(module, source, is_package=module.count(".") == 0) == []

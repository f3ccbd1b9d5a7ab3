"""What a command imports: help, completion and reading wait for nothing that computes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esscher.cli.app import COMMANDS
from esscher.cli.runs import JOBS
from esscher.icl.specs import FlowSpec
from esscher.runs.run import Manifest, Start
from esscher.runs.store import Store

SRC = Path(__file__).parents[2] / "src"
HEAVY = ("torch", "pandas", "scipy", "transformers", "matplotlib", "numba", "datasets")
CALL = """
import sys
from esscher.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code or 0
print("imported:", *[name for name in HEAVY if name in sys.modules])
sys.exit(code)
"""


def imported(
    arguments: list[str], folder: Path, heavy: tuple[str, ...] = HEAVY, **environment: str
) -> tuple[str, str]:
    """What a fresh process prints, and what it imported of the heavy packages."""
    command = [sys.executable, "-c", f"HEAVY = {heavy}{CALL}", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said, _, names = done.stdout.rpartition("imported:")
    return said, names.strip()


LIGHT = [
    ["--help"],
    ["ls"],
    ["cite"],
    ["cite", "S", "--json"],
    *([name, "--help"] for name in COMMANDS),
    ["icl", "flow", "--help"],
]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_nothing_that_computes_is_imported(arguments: list[str], tmp_path: Path) -> None:
    _, names = imported(arguments, tmp_path)
    assert names == ""


def test_runs_are_listed_by_their_manifests(tmp_path: Path) -> None:
    """Tables are not looked at, so what reads them is not imported: it is half of the time that the
    command takes.
    """
    start = Start(
        started="2030-01-01T00:00:00+00:00", executor="this process", machine={}, versions={}
    )
    store = Store(tmp_path / "mine")
    store.create()
    Manifest.begin(FlowSpec(), [{"length": 10}], {}, start).write(store)
    said, names = imported(["ls"], tmp_path, heavy=(*HEAVY, "numpy", "pyarrow"))
    assert "mine" in said
    assert names == ""


def test_the_test_sees_an_import(tmp_path: Path) -> None:
    said, names = imported(["converge", "--list"], tmp_path)
    assert "gaussian" in said
    assert "torch" in names.split()


@pytest.mark.parametrize(
    ("line", "expected"), [("esscher pr", {"predict", "probe"}), ("esscher icl fl", {"flow"})]
)
def test_names_are_completed_without_imports(line: str, expected: set[str], tmp_path: Path) -> None:
    shell = {
        "_ESSCHER_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    said, names = imported([], tmp_path, **shell)
    assert set(said.split()) == expected
    assert names == ""


def printed(script: str) -> str:
    """What a fresh process prints."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_specs_are_read_without_what_computes_them() -> None:
    """Flags come from their fields, so help would wait for it; runs of the papers have no flags."""
    names = [module for module, _ in JOBS.values() if not module.startswith("esscher.papers")]
    names.append("esscher.cli.predict")
    script = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
    assert printed(f"{script}print(*[name for name in {HEAVY} if name in sys.modules])") == ""


def test_resume_knows_every_job() -> None:
    """A fresh process imports none of them by itself."""
    registered = set()
    for path in SRC.rglob("*.py"):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts)
        names = re.findall(r'\nregister\("([a-z-]+)", "esscher\.', path.read_text("utf-8"))
        registered |= {(name, module) for name in names}
    assert {(name, module) for name, (module, _) in JOBS.items()} == registered

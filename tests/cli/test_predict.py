"""The command line as a user meets it: tables, JSON, figures, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import esscher as es
from tests.cli.commands import run

BASE = ["predict", "--gaussian", "--dim", "5", "--queries", "16", "--n", "100,1e6"]


def test_json_is_the_only_thing_on_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run([*BASE, "--horizon", "1.5", "--json"], capsys)
    record = json.loads(out)
    assert code == 0
    assert record["n"] == [100, 10**6]
    assert record["kind"] == "exact"
    assert record["rms"][0] > record["rms"][1] > 0
    assert all(
        {"name", "source", "status", "applies", "formula"} <= set(p) for p in record["predictions"]
    )
    assert not list(tmp_path.iterdir())


def test_table_and_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for suffix in ("svg", "png", "pdf"):
        path = tmp_path / f"figure.{suffix}"
        code, out, err = run([*BASE, "--figure", str(path)], capsys)
        assert code == 0
        assert path.stat().st_size > 1000
        assert str(path) in err
    assert " A relative error of 0.1 needs " in out
    assert "heuristic" in out
    assert "proved" in out


def test_yaml_equals_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("law: {law: gaussian, dim: 5}\nhead: {horizon: 1.5}\nn: 100,1e6\nqueries: 16\n")
    from_file = json.loads(run(["predict", str(path), "--json"], capsys)[1])
    from_flags = json.loads(run([*BASE, "--horizon", "1.5", "--json"], capsys)[1])
    assert from_file == from_flags


@pytest.mark.parametrize("law", ["sphere", "ball", "cube", "rademacher"])
def test_other_laws(law: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        [
            "predict",
            f"--{law}",
            "--dim",
            "2",
            "--queries",
            "4",
            "--n",
            "10",
            "--json",
            "--scale",
            "0.5",
        ],
        capsys,
    )
    assert code == 0
    assert json.loads(out)["rms"][0] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict"], "law: expected one of --gaussian"),
        (
            ["predict", "--gaussian"],
            "--dim: give the dimension of a token, e.g. --gaussian --dim 50",
        ),
        (["predict", "--gaussian", "--sphere", "--dim", "3"], "expected one of"),
        (["predict", "--gaussian", "--dim", "0"], "dim"),
        (["predict", "--gaussian", "--dim", "x"], "--dim"),
        ([*BASE, "--n", "0"], "n: expected whole numbers"),
        ([*BASE, "--n", "1.5"], "n: expected whole numbers"),
        ([*BASE, "--n", "nan"], "n: expected whole numbers"),
        ([*BASE, "--n", "ten"], "n: expected numbers"),
        ([*BASE, "--horizon", "-1"], "horizon"),
        ([*BASE, "--horizon", "1", "--scale", "1"], "one of the two"),
        ([*BASE, "--epsilon", "0"], "epsilon"),
        ([*BASE, "--queries", "0"], "queries"),
        ([*BASE, "--dtype", "float8"], "dtype: input should be 'float32' or 'float64'"),
        ([*BASE, "--device", "abacus"], "--device"),
        ([*BASE, "--figure", "figure.exe"], "ending in .svg"),
        (["predict", "--laplace", "--dim", "2", "--horizon", "9"], "Laplace has no limit there"),
        (["predict", "missing.yaml"], "missing.yaml: cannot be read: No such file"),
        (["predict", "--colour"], "--colour"),
        (["foretell"], "foretell"),
        (["cite", "Z"], "expected one of B, S"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert err.startswith("esscher: ")
    assert err.count("\n") == 1
    assert words in err
    assert out == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("law: {law: gaussian, dim: 3}\nheads: {}\n", "heads: no such field"),
        ("law: {law: gaussian, dim: 3, radius: 1}\n", "radius: no such field"),
        ("law: {law: cauchy, dim: 3}\n", "'gaussian'"),
        ("[1, 2]", "expected 'name: value' lines"),
        ("law: [", "not YAML"),
        ("", "expected 'name: value' lines"),
    ],
)
def test_bad_yaml(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(content)
    code, _, err = run(["predict", str(path)], capsys)
    assert code == 2
    assert err.count("\n") == 1
    assert words in err


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    assert "predict" in out
    for command in ("predict", "converge", "fit", "ls", "resume", "export", "cite"):
        code, out, _ = run([command, "--help"], capsys)
        assert code == 0
        assert "--json" in out


def test_it_leaves_no_file_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*BASE, "--n", "10,100"], capsys)[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], capsys)[:2] == (0, f"esscher {es.__version__}\n")


def test_cite(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["cite"], capsys)
    assert code == 0
    assert out.count("@misc") == 2
    assert "2512.10656" in out
    assert json.loads(run(["cite", "S", "--json"], capsys)[1])["S"].startswith("@misc{boursier")


def test_exact_error_does_not_depend_on_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """d = 1, horizon 1, n = 1e9: rare queries carry the mean, and 256 drawn ones gave .0011 to
    .0036.
    """
    asked = ["predict", "--gaussian", "--dim", "1", "--horizon", "1", "--n", "1e9", "--json"]
    records = [json.loads(run([*asked, "--seed", str(seed)], capsys)[1]) for seed in range(2)]
    assert records[0]["rms"] == records[1]["rms"] == pytest.approx([0.00187659158], rel=1e-8)
    assert records[0]["slope"] == pytest.approx([-0.30004993], rel=1e-6)
    assert records[0]["query_stderr"] == [0.0]


def test_drawn_queries_are_named_with_their_error(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "--cube", "--dim", "2", "--queries", "8", "--n", "10"]
    record = json.loads(run([*asked, "--json"], capsys)[1])
    assert 0 < record["query_stderr"][0] < record["rms"][0]
    assert "from the drawn queries" in run(asked, capsys)[1]
    text = run([*asked, "--all"], capsys)[1]
    assert "stderr" in text
    assert "8 queries drawn" in " ".join(text.split())


def test_wide_gaussian_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """e^d is beyond float64: bounds that have it are infinite, and nothing raises."""
    code, out, _ = run(
        ["predict", "--gaussian", "--dim", "1000", "--n", "100,1e6", "--json"], capsys
    )
    assert code == 0
    record = json.loads(out)
    assert all(value is not None for value in record["rms"])
    mended = next(p for p in record["predictions"] if p["name"] == "s-16-mended")
    assert mended["value"] == [None, None]
    assert mended["vacuous"] == [True, True]
    asked = ["predict", "--gaussian", "--dim", "1000", "--n", "100", "--all"]
    assert "vacuous" in run(asked, capsys)[1]

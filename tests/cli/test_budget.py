"""``esscher budget`` on a stored probe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import esscher as es
from tests.cli.commands import run
from tests.models.probe_runs import few_texts, tiny_model


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of a tiny model, two on each key-value head."""
    model, words = tiny_model("llama")
    out = tmp_path_factory.mktemp("budget") / "run"
    settings = {
        "max_tokens": 300,
        "window": 64,
        "queries": 6,
        "kept_queries": 3,
        "layers": (1,),
        "pool": "sequence",
        "rules": ("random",),
    }
    es.probe(model, few_texts(), tokenizer=words, out=out, **settings)
    return out


def test_json_has_caches_and_totals(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        ["budget", str(probed), "--rule", "random", "--epsilon", ".1", "--json"], capsys
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["rule"], found["epsilon"], found["total"], found["window"]) == (
        "random",
        0.1,
        None,
        64,
    )
    assert [(row["layer"], row["kv_head"], row["heads"]) for row in found["caches"]] == [
        (1, 0, 2),
        (1, 1, 2),
    ]
    totals = {row["split"]: row for row in found["totals"]}
    every = sum(row["n_keys"] for row in found["caches"])
    assert set(totals) == {"every head at the error", "uniform", "best split"}
    for row in totals.values():
        assert row["ratio"] == pytest.approx(row["keys"] / every)
        assert row["saved"] == pytest.approx(1 - row["ratio"])
        assert row["error"] <= 0.1 * (1 + 1e-6)
    assert totals["best split"]["keys"] <= totals["uniform"]["keys"]


def test_tables_of_caches(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["budget", str(probed), "--rule", "random", "--epsilon", "0.1"], capsys)
    assert code == 0
    assert out.startswith("random for an error of 10% in each head's output: it keeps ")
    assert "best split" in out
    assert len(out.splitlines()) <= 12
    code, out, _ = run(["budget", str(probed), "--rule", "random", "--epsilon", "0.2"], capsys)
    assert code == 0
    rows = [line.split()[:2] for line in out.splitlines() if line.startswith("    1 ")]
    assert sorted(rows) == [["1", str(head)] for head in range(2)]
    assert "52.7% of the cache with every head at this error" in out


def test_a_total_is_split(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["budget", str(probed), "--rule", "random", "--total", "50"]
    code, out, _ = run([*asked, "--json"], capsys)
    assert code == 0
    found = json.loads(out)
    totals = {row["split"]: row for row in found["totals"]}
    assert totals["best split"]["keys"] == totals["uniform"]["keys"] == 50
    assert sum(row["best_split"] for row in found["caches"]) == pytest.approx(50)
    assert totals["best split"]["error"] <= totals["uniform"]["error"] * (1 + 1e-9)
    # nothing is said of an error that nobody asked for
    assert set(totals) == {"uniform", "best split"}
    assert found["epsilon"] is None
    code, out, _ = run(asked, capsys)
    assert code == 0
    assert out.startswith("random for 50 keys in all: it keeps ")


def test_a_rule_that_was_not_measured_is_refused(
    probed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["budget", str(probed), "--rule", "heavy"], capsys)
    assert (code, out) == (2, "")
    assert "no errors of heavy; it has those of random" in err


def test_a_run_of_the_corpus_has_no_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, words = tiny_model("bert")
    small = {"max_tokens": 100, "queries": 4, "kept_queries": 2, "layers": (1,), "heads": (0,)}
    es.probe(model, few_texts(), tokenizer=words, out=tmp_path, **small)
    code, out, err = run(["budget", str(tmp_path)], capsys)
    assert (code, out) == (2, "")
    assert "no keep rules were compared; run esscher probe with --pool sequence" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epsilon", "0"], "epsilon"),
        (["--epsilon", "1"], "between 0 and 1"),
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "nan"], "epsilon"),
        (["--epsilon", "much"], "--epsilon"),
        (["--total", "200", "--epsilon", ".1"], "expected one of an error, a total and a loss"),
        (["--rule", "best"], "no rule 'best'; esscher rules lists all rules"),
        (["--total", "1"], "total: expected between 2"),
        (["--total", "100000"], "total: expected between 2"),
    ],
)
def test_bad_input(
    probed: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["budget", str(probed), *arguments], capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_other_runs_and_no_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "quick.yaml"
    fields = {
        "job": "converge",
        "law": {"law": "gaussian", "dim": 2},
        "head": {"kind": "identity"},
        "n": "5,20,60",
    }
    spec.write_text(json.dumps({**fields, "title": "quick", "repeats": 4, "metrics": ["mean"]}))
    assert run(["converge", str(spec), "--out", str(tmp_path / "other")], capsys)[0] == 0
    code, out, err = run(["budget", str(tmp_path / "other")], capsys)
    assert (code, out) == (2, "")
    assert "expected a run of esscher probe, got one of converge" in err
    assert len(err.strip().splitlines()) == 1
    code, out, err = run(["budget", str(tmp_path / "nothing")], capsys)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1

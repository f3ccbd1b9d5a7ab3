"""Experiments from presets and files, and the commands that look after runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

import esscher as es
from esscher.errors.montecarlo.job import preset_names, read_preset, units
from esscher.errors.montecarlo.spec import ExperimentSpec
from esscher.runs import RunIncomplete, execute
from tests.cli.commands import run
from tests.runs.job import WalkSpec

QUICK = """
job: converge
title: quick
law: {law: gaussian, dim: 3}
head: {kind: identity}
sweep: {over: horizon, values: [0.3, 1.0]}
n: 20,50,120
repeats: 24
metrics: [mean, cov, l2]
queries: 16
"""


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    path = tmp_path / "quick.yaml"
    path.write_text(QUICK)
    return path


def tables(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.parquet"))}


def test_every_preset_is_a_valid_commented_spec() -> None:
    assert {
        "gaussian",
        "sphere",
        "horizon",
        "anisotropic",
        "mixture",
        "compact",
        "uniform",
        "hardmax",
        "student",
    } <= set(preset_names())
    for name in preset_names():
        text = read_preset(name)
        assert text.startswith("# ")
        ExperimentSpec.model_validate(yaml.safe_load(text))


def test_a_run_has_tables_a_page_and_a_record(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code, text, err = run(["converge", str(quick), "--out", str(out)], capsys)
    assert code == 0
    assert len(text.splitlines()) <= 12
    assert "sharp (heuristic)" in text
    assert f"\nNext: esscher report {out} --figures svg\n" in text
    assert "units" in err
    assert {
        "manifest.json",
        "curves.parquet",
        "rates.parquet",
        "errors.parquet",
        "report.html",
    } <= set(os.listdir(out))
    loaded = es.load_run(out)
    rates, curves = loaded.table("rates"), loaded.table("curves")
    assert len(rates) == 2 * 3
    assert {"metric", "kind", "n", "rms", "relative", "stderr", "q95"} <= set(curves.columns)
    measured = rates[(rates["metric"] == "l2") & (rates["value"] == 0.3)].iloc[0]
    assert measured["low"] - 0.1 < measured["exact_exponent"] < measured["high"] + 0.1
    # the same spec in the same folder is the same run: nothing is computed again, the JSON has the
    # same rates
    code, text, _ = run(["converge", str(quick), "--out", str(out), "--json"], capsys)
    assert code == 0
    assert [row["exponent"] for row in json.loads(text)["rates"]] == rates["exponent"].tolist()


def test_exact_curves_are_units_of_work_like_the_others(quick: Path) -> None:
    """Nothing dominant is left for the end: workers share them, progress counts them, and a resumed
    run has them.
    """
    spec = ExperimentSpec.read(yaml.safe_load(quick.read_text("utf-8")))
    exact = [unit for unit in units(spec) if "exact" in unit]
    assert [unit["point"] for unit in exact if unit["exact"] == "l2"] == list(
        range(len(spec.points))
    )


def test_resume_and_workers_give_the_same_bytes(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken, spread = (tmp_path / name for name in ("whole", "broken", "spread"))
    assert run(["converge", str(quick), "--out", str(whole), "--no-report"], capsys)[0] == 0
    shutil.copytree(whole, broken)
    for file in [*broken.glob("*.parquet"), *sorted((broken / "shards").glob("*"))[:2]]:
        file.unlink()
    assert run(["resume", str(broken)], capsys)[0] == 0
    assert tables(broken) == tables(whole)
    assert (
        run(
            ["converge", str(quick), "--out", str(spread), "--no-report", "--workers", "2"],
            capsys,
        )[0]
        == 0
    )
    assert tables(spread) == tables(whole)


def test_ls_and_export(quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "one"
    run(["converge", str(quick), "--out", str(out), "--no-report"], capsys)
    code, text, _ = run(["ls", str(tmp_path / "runs")], capsys)
    assert code == 0
    assert "complete" in text
    assert (
        json.loads(run(["ls", str(tmp_path / "runs"), "--json"], capsys)[1])[0]["title"] == "quick"
    )
    for kind in ("csv", "json"):
        folder = tmp_path / kind
        assert run(["export", str(out), "--to", kind, "--out", str(folder)], capsys)[0] == 0
        assert (folder / f"rates.{kind}").stat().st_size > 100
    rows = json.loads(
        (tmp_path / "json" / "rates.json").read_text("utf-8"), parse_constant=pytest.fail
    )
    assert [row["exponent"] for row in rows] == es.load_run(out).table("rates")["exponent"].tolist()
    before = (tmp_path / "csv" / "rates.csv").read_bytes()
    (tmp_path / "csv" / "rates.csv").write_bytes(b"mine")
    code, _, err = run(["export", str(out), "--out", str(tmp_path / "csv")], capsys)
    assert code == 2
    assert "is there already; choose another folder, or ask to overwrite it" in err
    assert (tmp_path / "csv" / "rates.csv").read_bytes() == b"mine"
    assert run(["export", str(out), "--out", str(tmp_path / "csv"), "--overwrite"], capsys)[0] == 0
    assert (tmp_path / "csv" / "rates.csv").read_bytes() == before
    frame = pd.read_csv(tmp_path / "csv" / "rates.csv")
    assert frame["exponent"].tolist() == pytest.approx(
        es.load_run(out).table("rates")["exponent"].tolist()
    )


def test_fit_again(quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run(["converge", str(quick), "--out", str(out), "--no-report"], capsys)
    stored = es.load_run(out).table("rates")
    again = json.loads(run(["fit", str(out), "--json"], capsys)[1])
    key = lambda row: (row["value"], row["metric"])  # noqa: E731
    expected = {key(row): row["exponent"] for row in stored.to_dict("records")}
    assert {key(row): row["exponent"] for row in again} == expected
    assert "exponent" in run(["fit", str(out)], capsys)[1]
    code, _, err = run(["fit", str(out), "--window", "x"], capsys)
    assert code == 2
    assert "--window: expected two numbers" in err


def test_an_incomplete_run_exits_with_3_and_the_command_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "walk"
    with pytest.raises(RunIncomplete):
        execute(WalkSpec(raising=(2,)), out)
    capsys.readouterr()  # this job prints
    code, text, err = run(["resume", str(out)], capsys)
    assert code == 3
    assert text == ""
    assert f"esscher resume {out}" in err
    assert "walk 2 leads nowhere" in err


def test_heavy_tails_are_reported_not_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "student"
    code, text, err = run(["converge", "student", "--out", str(out), "--repeats", "2"], capsys)
    assert code == 0
    assert "refused" in text
    assert "Student has no limit there" in err
    assert es.load_run(out).table("rates")["status"].tolist() == ["refused"]


def test_the_number_of_repeats_per_unit_does_not_matter(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(["converge", str(quick), "--out", str(one), "--no-report"], capsys)
    monkeypatch.setattr("esscher.errors.montecarlo.job.REPEATS_PER_UNIT", 7)
    run(["converge", str(quick), "--out", str(two), "--no-report"], capsys)
    order = ["point", "metric", "repeat", "n"]
    frames = [
        es.load_run(path).table("errors").sort_values(order, ignore_index=True)
        for path in (one, two)
    ]
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("colour: blue", "colour: no such field"),
        ("n: 50,20", "n: expected increasing"),
        ("n: 0,20", "n: expected whole numbers"),
        ("repeats: 0", "repeats"),
        ("repeats: many", "repeats"),
        ("metrics: [meen]", "metrics: expected some of mean, cov, l2"),
        ("metrics: []", "metrics"),
        ("sweep: {over: scale, values: [0.0]}", "expected numbers above 0 for scale"),
        ("sweep: {over: scale, values: [-1.0]}", "expected numbers above 0 for scale"),
        ("sweep: {over: size, values: [1.0]}", "sweep.over"),
        ("sampling: sometimes", "'nested' or 'independent'"),
        ("head: {kind: identity, scale: -2}", "head.scale"),
        ("dtype: float16", "dtype"),
        ("law: {law: gaussian}", "dim"),
    ],
)
def test_bad_presets_end_with_one_line_naming_the_field(
    change: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = yaml.safe_load(QUICK) | yaml.safe_load(change)
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(settings))
    code, out, err = run(["converge", str(path), "--out", str(tmp_path / "run")], capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["converge", "gausian"], "expected one of anisotropic, compact, gaussian"),
        (["converge", "missing.yaml"], "No such file"),
        (["converge", "hardmax", "--values", "1,2"], "sweeps over nothing"),
        (["converge", "gaussian", "--values", "a"], "--values"),
        (["converge", "gaussian", "--n", "x"], "n: expected numbers"),
        (["resume", "nowhere"], "nowhere"),
        (["export", "nowhere"], "nowhere"),
        (["export", "nowhere", "--to", "xml"], "--to: expected one of csv, json"),
        (["ls", "nowhere"], "no such folder"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    "command",
    [["converge", "gaussian", "--n", "5,x"], ["predict", "--gaussian", "--dim", "2", "--n", "x"]],
)
def test_a_mistake_in_n_names_it_and_what_came_once(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(command, capsys)
    assert code == 2
    assert err == (
        f"esscher: n: expected numbers such as 100,1000 or 1e3:1e12, got {command[-1]!r}\n"
    )


def test_a_wrong_entry_of_a_list_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["converge", "gaussian", "--values", "nan"], capsys)
    assert (code, out) == (2, "")
    assert err == "esscher: sweep.values.0: input should be a finite number, got nan\n"

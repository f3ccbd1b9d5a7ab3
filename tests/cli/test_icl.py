"""``esscher icl``: runs, figures, and what is said about bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from esscher.icl.exact import risk
from esscher.icl.flow import final_parameters, flow_limit, prompt_length_for, start_block
from esscher.icl.specs import ConcentrationSpec, FlowSpec, IclFigure, TrainSpec
from esscher.icl.tasks import LinearTask
from esscher.report import charts as report
from tests.cli.commands import run

SMALL = ["--dim", "2", "--covariance", "isotropic"]
TRAIN = ["icl", "train", *SMALL, "--lengths", "4", "--seeds", "1", "--steps", "30", "--batch", "16"]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [("0", "from 1 to 2**53, got 0"), ("ten", "got 'ten'"), ("5,3", "increasing")],
)
def test_a_mistake_in_lengths_is_said_of_lengths(
    lengths: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("flow", "train", "concentration"):
        code, _, err = run(["icl", command, "--lengths", lengths], capsys)
        assert code == 2
        assert err.startswith("esscher: lengths: expected ")
        assert said in err


def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, err = run([*TRAIN, "--out", str(tmp_path / "run"), "--json"], capsys)
    assert code == 0
    rows = json.loads(text)["final"]
    assert {(row["length"], row["model"]) for row in rows} == {(4, "softmax"), (4, "linear")}
    for row in rows:  # 30 steps are few
        assert row["status"] in ("undertrained", "stuck")
        assert f"{row['model']} attention ended" in err


def test_the_flow_ends_at_each_models_own_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """At linear attention's end softmax errs more."""
    asked = [*SMALL, "--lengths", "10", "--json", "--out", str(tmp_path / "flow")]
    rows = json.loads(run(["icl", "flow", *asked], capsys)[1])["final"]
    found = {row["model"]: row["mse"] for row in rows}
    task = LinearTask.isotropic(2)
    at_linear = {
        kind: 2 * risk(task, flow_limit(task, start_block(task), 10), 10, kind).value
        for kind in ("softmax", "linear")
    }
    assert found["linear"] == pytest.approx(at_linear["linear"], rel=1e-9)
    assert found["softmax"] < 0.99 * at_linear["softmax"]


def test_flow_and_concentration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(
        ["icl", "flow", *SMALL, "--lengths", "10", "--out", str(tmp_path / "flow")], capsys
    )
    assert code == 0
    assert "bayes" in text
    options = [
        "--lengths",
        "10,100,1000",
        "--repeats",
        "6",
        "--prompts",
        "16",
        "--out",
        str(tmp_path / "con"),
    ]
    code, text, _ = run(["icl", "concentration", *SMALL, *options], capsys)
    assert code == 0
    assert len(text.splitlines()) <= 12
    code, text, _ = run(["icl", "concentration", *SMALL, *options, "--all"], capsys)
    assert code == 0
    assert "risk_gradient" in text


def test_stuck_seeds_are_named_and_not_averaged_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two seeds the second is called stuck: it is said so of every figure, and its errors reach
    no mean.
    """
    both = {"covariances": ("isotropic",), "dim": 2, "lengths": (8,)}
    specs = {
        "train": TrainSpec(
            **both, seeds=2, steps=20, records=6, evaluation=64, final_evaluation=64
        ),
        "flow": FlowSpec(**both),
    }
    monkeypatch.setattr("esscher.cli.icl.specs_for", lambda *asked: specs)

    def judged(task: LinearTask, final: pd.DataFrame, curve: pd.DataFrame) -> pd.DataFrame:
        late = final["seed"] == 1
        return final.assign(
            status=late.map({True: "stuck", False: "ok"}),
            advice=late.map({True: "another seed", False: ""}),
        )

    drawn = {}
    monkeypatch.setattr("esscher.icl.jobs.judged", judged)
    for name in ("risk_chart", "training_chart"):
        plain = getattr(report, name)

        def chart(title: str, table: Any, flow: Any, name: str = name, plain: Any = plain) -> Any:
            drawn[name] = table
            return plain(title, table, flow)

        monkeypatch.setattr(report, name, chart)
    code, _, err = run(["icl", "figures", "--only", "fig2,3,4", "--out", str(tmp_path)], capsys)
    assert code == 0, err
    for name, kept in (
        ("fig2", "left out"),
        ("fig3", "drawn as a line of its own"),
        ("fig4", "left out"),
    ):
        assert f"{name}: L = 8, seed 1: stuck, {kept}; another seed" in err
        assert f"{name}: L = 8, seed 0" not in err
    assert set(drawn) == {"risk_chart", "training_chart"}
    for table in drawn.values():
        assert set(table["seed"]) == {0}


def test_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One figure of each sort is drawn from runs, which are made small here."""

    def tiny(figures: list[IclFigure], quick: bool, seed: int = 0) -> dict[str, object]:
        both = {"covariances": ("isotropic",), "dim": 2}
        train = TrainSpec(
            **both, lengths=(4, 8), seeds=2, steps=20, records=6, evaluation=64, final_evaluation=64
        )
        concentration = ConcentrationSpec(**both, lengths=(4, 16, 64), repeats=6, prompts=16)
        specs = {
            "train": train,
            "concentration": concentration,
            "flow": FlowSpec(**both, lengths=(8,)),
        }
        return {
            name: spec
            for name, spec in specs.items()
            if any(name in figure.runs for figure in figures)
        }

    monkeypatch.setattr("esscher.cli.icl.specs_for", tiny)
    options = [
        "--only",
        "fig1,2,3,4",
        "--quick",
        "--out",
        str(tmp_path),
        "--json",
    ]
    code, text, err = run(["icl", "figures", *options], capsys)
    assert code == 0, err
    files = [Path(name) for name in json.loads(text)["figures"]]
    assert [file.name for file in files] == [
        f"fig{i}.{kind}" for i in range(1, 5) for kind in ("svg", "png")
    ]
    assert all("<svg" in file.read_text() for file in files[::2])
    stored = str(tmp_path / "runs" / "train")
    code, _, err = run(
        ["icl", "figures", "--only", "fig7", "--train", stored, "--out", str(tmp_path)], capsys
    )
    assert code == 2
    assert "holds no training for kms:0.5" in err
    code, _, err = run(
        ["icl", "figures", "--only", "fig3", "--train", stored, "--out", str(tmp_path / "again")],
        capsys,
    )
    assert code == 0, err
    assert (tmp_path / "again" / "fig3.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["icl", "figures", "--only", "fig9", "--out", "x"], "figure: expected some of fig1"),
        (["icl", "train", "--lengths", "0"], "0"),
        (["icl", "train", "--steps", "0"], "steps"),
        (["icl", "train", "--batch", "-3"], "batch"),
        (["icl", "train", "--task-cov", "none.csv"], "task_cov"),
        (["icl", "train", "--covariance", "round"], "covariance: expected isotropic"),
        (["icl", "flow", "--covariance", "kms:7"], "rho: expected a correlation"),
    ],
)
def test_bad_input(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(arguments, capsys)
    assert code == 2
    assert err.startswith("esscher: ")
    assert said in err


def test_a_rate_that_diverges_stops_with_step_loss_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run([*TRAIN, "--rate", "30", "--out", str(tmp_path / "run")], capsys)
    assert code == 2
    assert "linear attention diverged: loss" in err
    assert "at step" in err
    assert "try a rate below 30" in err


PAPER = ["--task-cov", "identity", "--noise", "0"]  # the setting of [S]'s theory: W = I, no noise


def test_shortest_prompts_of_theorem_5_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Linear attention, W = I, no noise, Sigma = I: the end of the flow has risk d/2 - d/(2 (1 + (d
    + 1)/L)), at most epsilon from L = 3 (1/epsilon - 1) on, a whole number here.
    """
    code, text, _ = run(["icl", "length", *SMALL, *PAPER, "--epsilon", ".5", "--json"], capsys)
    found = {row["model"]: row["length"] for row in json.loads(text)["shortest prompts"]}
    assert code == 0
    assert found["linear"] == 3
    assert found["softmax"] > 3
    task = LinearTask.isotropic(2, [[1.0, 0.0], [0.0, 1.0]], 0.0)
    for epsilon in (0.2, 0.1):
        assert prompt_length_for(task, epsilon, "linear") == round(3 * (1 / epsilon - 1))
    end = final_parameters(task, start_block(task), found["softmax"] - 1)
    assert risk(task, end, found["softmax"] - 1).value > 0.5
    code, _, err = run(["icl", "length", *SMALL, "--epsilon", "0"], capsys)
    assert code == 2
    assert "epsilon" in err

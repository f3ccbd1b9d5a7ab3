"""How objects show themselves in Python: one short line each, a picture of a curve, a run in words,
its budget.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import esscher as es
from esscher.icl import Block, risk
from esscher.icl.tasks import as_task
from tests.models.frontiers import frontier_run

EYE = torch.eye(2, dtype=torch.float64)
HEAD, LAW = es.Head(EYE, EYE), es.Gaussian(EYE)


@pytest.mark.parametrize(
    ("law", "shown"),
    [
        (es.Gaussian(0.5 * EYE), "Gaussian(dim=2, tr cov=1)"),
        (es.Gaussian(EYE, [3.0, 4.0]), "Gaussian(dim=2, tr cov=2, |mean|=5)"),
        (es.Sphere(3, 2.0), "Sphere(dim=3, radius=2)"),
        (es.Cube(4), "Cube(dim=4, half_width=1)"),
        (es.Pool(EYE), "Pool(dim=2, 2 tokens)"),
        (
            es.Mixture([1, 3], [LAW, es.Ball(2)]),
            "Mixture(0.25 Gaussian(dim=2, tr cov=2) + 0.75 Ball(dim=2, radius=1))",
        ),
    ],
)
def test_laws(law: es.Measure, shown: str) -> None:
    assert repr(law) == shown


def test_curves_fits_and_predictions() -> None:
    curve = es.exact_curve(HEAD, LAW, LAW, [10, 30, 100])
    assert repr(curve) == "ErrorCurve(l2, exact: rms 0.9033 at n = 10 to 0.4458 at n = 100)"
    fit = es.fit_rate(curve, raise_on_failure=False)
    assert repr(fit) == f"RateFit({fit})"
    assert all(
        len(repr(found)) < 400 and "0x" not in repr(found) for found in es.predictions(HEAD, LAW)
    )


def test_a_curve_draws_itself() -> None:
    curve = es.exact_curve(HEAD, LAW, LAW, [10, 100])
    ax = Figure().subplots()
    assert curve.plot(ax=ax) is ax
    assert ax.get_lines()[0].get_ydata() == pytest.approx(curve.rms)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_a_run_in_words_and_its_budget(tmp_path: Path) -> None:
    run = frontier_run(tmp_path / "run")
    assert repr(run).startswith(f"Run('{run.path}': probe, complete, tables ")
    lines = run.summary().splitlines()
    assert "probe, complete" in lines[0]
    assert lines[-1] == str(run.path)
    assert not any(mark in run.summary() for mark in ("<", "&amp;"))
    heavy = run.budget(epsilon=0.1, rule="heavy")
    assert heavy.rule == "heavy"
    assert (heavy.caches["error"] <= 0.1 * (1 + 1e-6)).all()
    assert run.budget(total=300, rule="heavy").asked.total == 300
    found = es.budget(run.path)  # of all rules for any cache, the one with the fewest keys
    assert found.rule == run.budget().rule == "heavy"
    assert found.rules is not None
    assert set(found.rules["rule"]) >= {"random", "topk"}
    assert "<table" in found._repr_html_()
    assert repr(heavy).startswith("Budget(heavy, ")
    assert "; best split keeps " in repr(heavy)
    assert "worst head " in repr(heavy)


def test_the_lab_is_reached_by_its_name() -> None:
    assert es.icl.risk is risk
    assert es.icl.Block is Block


def test_a_block_in_float32_has_the_risk_of_one_in_float64() -> None:
    task = as_task("isotropic", 2, 0.1)
    for kind in ("softmax", "linear"):
        single, double = (
            Block(0.5 * torch.eye(2, dtype=dtype), 1.0) for dtype in (torch.float32, torch.float64)
        )
        assert single.v.dtype == torch.float32
        assert float(risk(task, single, 10, kind)) == pytest.approx(
            float(risk(task, double, 10, kind)), rel=1e-6
        )
    mixed = Block(torch.eye(2, dtype=torch.float32), torch.tensor(1.0, dtype=torch.float64))
    assert np.isfinite(float(risk(task, mixed, 10, "softmax")))

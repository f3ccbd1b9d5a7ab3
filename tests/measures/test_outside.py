"""A law from outside, in one file (``triangular.py``) and one row of the table, gets all that the
laws of the package get.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import torch

import esscher as es
from esscher.measures.base import Measure
from tests.cli.commands import run
from tests.measures.triangular import Triangular

WIDTH, TILT = 2.0, 1.5  # of the tokens, of the query
HEAD = es.Head([[TILT]], [[1.0]])


def density(y: float) -> float:
    return (WIDTH - abs(y)) / WIDTH**2


def limit_by_quadrature() -> float:
    top, bottom = (
        scipy.integrate.quad(
            lambda y, p=power: y**p * np.exp(TILT * y) * density(y),
            -WIDTH,
            WIDTH,
            points=[0.0],
            epsabs=1e-12,
            epsrel=1e-12,
        )[0]
        for power in (1, 0)
    )
    return top / bottom


def test_its_limit() -> None:
    assert float(es.limit(HEAD, Triangular(1, WIDTH))([[1.0]])) == pytest.approx(
        limit_by_quadrature(), rel=1e-10
    )


def test_its_exact_curve_at_one_and_two_tokens() -> None:
    """E|Gamma_n - Gamma|^2 as an integral over the tokens themselves, and many tokens against the
    delta method.
    """
    limit = limit_by_quadrature()

    def two(y: float, z: float) -> float:
        share = 1.0 / (1.0 + np.exp(TILT * (z - y)))
        return (share * y + (1.0 - share) * z - limit) ** 2 * density(y) * density(z)

    corners = [(low, low + WIDTH) for low in (-WIDTH, 0.0)]
    squared = sum(
        scipy.integrate.dblquad(two, *first, *second, epsabs=1e-10, epsrel=1e-10)[0]
        for first in corners
        for second in corners
    )
    curve = es.exact_curve(HEAD, Triangular(1, WIDTH), [[1.0]], [1, 2, 10**9])
    assert curve.kind == "exact"
    assert curve.rms[0] ** 2 == pytest.approx(WIDTH**2 / 6 + limit**2, rel=1e-9)
    assert curve.rms[1] ** 2 == pytest.approx(squared, rel=1e-8)
    assert curve.rms[2] ** 2 * 1e9 == pytest.approx(
        float(es.delta_covariance(HEAD, Triangular(1, WIDTH), [[1.0]])), rel=1e-6
    )


def test_its_bounds_are_proved_and_hold() -> None:
    found = {p.name: p for p in es.predictions(HEAD, Triangular(1, WIDTH), radius=1.0)}
    error = es.exact_curve(HEAD, Triangular(1, WIDTH), [[1.0]], n := [1, 10, 10**4, 10**8]).rms
    at_a_query = [
        p
        for p in found.values()
        if p.status == "proved" and p.quantity == "mean square error at one query"
    ]
    assert {p.name for p in at_a_query} == {"s-c4-mended", "s-c4-sharpened", "delta-bound"}
    for prediction in at_a_query:
        assert prediction.applies
        assert bool((prediction.rms(n) >= error).all()), prediction.name
    psi = (WIDTH**2 / 6) ** 2 * TILT**2
    assert found["b-moments"].exponent == pytest.approx(0.5 / (1 + 32 * psi))
    assert all(found[name].applies for name in ("b-moments", "s-16-mended", "s-gradient-u"))


def test_without_a_parameter_nothing_is_called_proved() -> None:
    class Unknown(Triangular):
        subgaussian_root = None  # type: ignore[assignment]

    for prediction in es.predictions(HEAD, Unknown(1, WIDTH), radius=1.0):
        # these need no parameter
        free = prediction.name.startswith(("delta-", "keep-")) or (
            prediction.name == "uniform-chaining"
        )
        if prediction.status.startswith("proved") and not free:
            assert not prediction.applies, prediction.name
            assert prediction.exponent is None or prediction.name not in (
                "b-moments",
                "s-16-mended",
                "s-prop31",
            )


def test_it_runs_from_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "outside.yaml"
    file.write_text(
        "job: converge\nlaw: {law: triangular, dim: 1, half_width: 2}\nhead: {scale: 0.7}\n"
        "n: 20,50,120\nrepeats: 24\nmetrics: [l2]\nqueries: 5\n"
    )
    code, _, err = run(["converge", str(file), "--out", str(tmp_path / "run"), "--json"], capsys)
    assert code == 0, err
    curves = es.load_run(tmp_path / "run").table("curves")
    assert "exact" in set(curves["kind"])
    file.write_text("law: {law: triangular, dim: 1}\nn: 10,1000\nqueries: 4\n")
    code, out, err = run(["predict", str(file), "--size", "2", "--json"], capsys)
    assert code == 0, err
    assert json.loads(out)["spec"]["law"] == {"law": "triangular", "dim": 1, "half_width": 2.0}
    assert json.loads(out)["kind"] == "exact"


def test_it_mixes_with_others() -> None:
    law = es.Mixture([1, 2], [Triangular(1, WIDTH), es.Gaussian([[0.5]], [0.3])])
    assert es.exact_curve(HEAD, law, torch.ones(1, 1).double(), [10]).kind == "exact"
    assert law.sigma is not None


class Exponential(Measure):
    """Independent coordinates of density exp(-y), y > 0: K = -sum log(1 - theta), theta < 1."""

    def _log_laplace(self, rows: torch.Tensor) -> torch.Tensor:
        return -torch.log1p(-rows).sum(1)

    def _tilted_mean(self, rows: torch.Tensor) -> torch.Tensor:
        return 1 / (1 - rows)

    def _tilted_cov(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.diag_embed((1 - rows) ** -2)

    def _sample(self, n: int, generator: torch.Generator | None) -> torch.Tensor:
        return -torch.log1p(-torch.rand(n, self.dim, generator=generator, dtype=torch.float64))

    def norm_moment(self, order: int, V: torch.Tensor | None = None) -> float | None:
        """Of one coordinate: E (y - 1)^4 = 9."""
        known = order == 4 and V is not None and V.numel() == 1
        return 9.0 * float(V) ** 4 if known else None


def test_a_tilt_outside_the_domain_is_refused_though_the_formula_gives_a_number() -> None:
    law, head = Exponential(2), es.Head([[0.3, 0.0], [0.0, 0.3]], [[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(
        ValueError,
        match=r"theta: E exp<theta, y> is infinite .* at 1 of 2 tilts",
    ):
        es.limit(head, law)([[5.0, 1.0], [0.1, 0.2]])
    with pytest.raises(ValueError, match="Exponential has no limit there"):
        es.exact_curve(head, law, [[5.0, 1.0]], [10])


def test_four_methods_and_a_fourth_moment_have_a_proved_bound_and_a_curve_with_its_own_error() -> (
    None
):
    """The pool's standard error against the spread over 12 seeds, within a factor 2.5 (false alarms
    below 1 %).
    """
    law, head = Exponential(1), es.Head([[0.4]], [[1.0]])
    found = [p for p in es.predictions(head, law, radius=0.5) if p.applies]
    assert {"delta-bound", "keep-random", "keep-neyman"} <= {p.name for p in found}
    curves = [
        es.exact_curve(head, law, [[0.5]], n := [10, 1000], pool_size=4096, seed=seed)
        for seed in range(12)
    ]
    assert {curve.kind for curve in curves} == {"pool"}
    spread = np.std([curve.rms for curve in curves], axis=0, ddof=1)
    told = np.sqrt(
        np.mean([curve.pool_stderr**2 for curve in curves if curve.pool_stderr is not None], axis=0)
    )
    assert (told / spread < 2.5).all()
    assert (spread / told < 2.5).all()
    bound = next(p for p in found if p.name == "delta-bound")
    assert bool((bound.rms(n) >= curves[0].rms).all())
    assert es.exact_curve(HEAD, Triangular(1, WIDTH), [[1.0]], n).pool_stderr is None

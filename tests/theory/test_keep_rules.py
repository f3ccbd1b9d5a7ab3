"""Rates and constants of keep rules: against the exact curves, simulation, and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

import esscher as es
from esscher.theory.prediction import Prediction
from esscher.theory.sharp import gaussian_mean_norm, neyman_bound, rest_constant, topk_bias

SIXTEENTH = 1 / 16


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def setting(
    d: int, horizon: float, seed: int = 0
) -> tuple[es.Head, es.Gaussian, torch.Tensor, dict[str, Prediction]]:
    factor = randn(d, d, seed=seed)
    law = es.Gaussian(factor @ factor.T / d)
    head = es.Head(randn(d, d, seed=seed + 1), randn(2, d, seed=seed + 2))
    head = head.scaled(horizon / head.horizon(law))
    found = {p.name: p for p in es.predictions(head, law) if p.name.startswith("keep-")}
    top = torch.linalg.svd(head.A.double()).Vh[0]
    return head, law, (top * math.sqrt(float(law.cov.trace())))[None], found


@pytest.mark.parametrize(
    "values", [[1.0], [2.0, 2.0, 2.0], [1.0, 4.0, 9.0], [1e-8, 1.0], [3.0, 0.0]]
)
def test_mean_norm_of_a_gaussian(values: list[float]) -> None:
    """Chi distributions in closed form; else 2,000,000 draws within 4 standard errors."""
    lengths = (randn(2_000_000, len(values)) * torch.tensor(values).double().sqrt()).norm(dim=1)
    found = gaussian_mean_norm(values)
    assert abs(found - float(lengths.mean())) <= 4 * float(lengths.std()) / math.sqrt(len(lengths))
    if len(set(values)) == 1:
        assert found == pytest.approx(
            math.sqrt(values[0]) * scipy.stats.chi(len(values)).mean(), rel=1e-12
        )
    assert gaussian_mean_norm([0.0]) == 0.0


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("horizon", [0.5, 1.0])
def test_constants_are_the_limits_of_exact_curves(d: int, horizon: float) -> None:
    """n MSE at 2^53 keys, and at 2^40 of 2^44 where a context is needed."""
    head, law, x, found = setting(d, horizon)
    n = 2**53
    for name, rule in (("keep-random", "random"), ("keep-neyman", "neyman")):
        assert es.exact_curve(head, law, x, [n], keep=rule).rms[0] ** 2 * n == pytest.approx(
            found[name].numbers["constant"], rel=1e-4
        )
    n = 2**40
    top = es.exact_curve(head, law, x, [n], keep="topk", context=16 * n)
    assert top.rms[0] == pytest.approx(found["keep-topk"].numbers["rms"], rel=1e-5)
    rest = es.exact_curve(head, law, x, [n], keep=f"topk:{n // 2}+random:reweight", context=16 * n)
    assert rest.rms[0] ** 2 * n == pytest.approx(
        found["keep-topk-rest"].numbers["constant"], rel=1e-4
    )


@pytest.mark.parametrize("d", [1, 2, 6])
@pytest.mark.parametrize("horizon", [0.01, 1.0, 4.0, 20.0])
def test_neyman_lies_below_its_bound_and_above_nothing_less(d: int, horizon: float) -> None:
    """The proved bound at every n, within pi^2/4 of the error at large n; rate 1/2 at every
    horizon.
    """
    head, law, x, found = setting(d, horizon, seed=5)
    n = [1, 2, 3, 10, 100, 10**4, 10**8]
    error = es.exact_curve(head, law, x, n, keep="neyman")
    bound = found["keep-neyman-bound"].rms(n)
    assert (error.rms <= bound * (1 + 1e-9)).all()
    assert (bound[-1] / error.rms[-1]) <= math.pi / 2 + 1e-3
    assert error.slope[-1] == pytest.approx(-found["keep-neyman"].exponent, abs=1e-3)
    numbers = found["keep-neyman"].numbers
    assert numbers["constant"] <= numbers["most"] * (1 + 1e-12)


def test_neyman_on_other_laws_tends_to_the_mean_distance() -> None:
    """Sphere: n MSE -> (E_t|c|)^2, at most the trace of the tilted covariance."""
    law, head = es.Sphere(3, 2.0), es.Head(torch.eye(3).double(), torch.eye(3).double())
    found = {p.name: p for p in es.predictions(head, law)}["keep-neyman"]
    assert found.applies
    x = torch.tensor([[2.0, 0.0, 0.0]]).double()
    curve = es.exact_curve(head, law, x, [10**12], keep="neyman")
    assert curve.rms[0] ** 2 * 1e12 == pytest.approx(curve.delta, rel=1e-6)
    y = law.sample(400_000, torch.Generator().manual_seed(0)).double()
    weight = torch.softmax(y @ head.tilt(x)[0], 0)
    length = (y - es.limit(head, law)(x)).norm(dim=1)
    mean = float(weight @ length)
    assert curve.delta == pytest.approx(
        mean**2, rel=8 * float((weight.square() @ (length - mean) ** 2).sqrt()) / mean
    )
    assert curve.delta <= found.numbers["most"]


def test_formulas_in_their_corners() -> None:
    assert neyman_bound([1, 5], 0.0, 0.0, 0.0).tolist() == [0.0, 0.0]
    assert topk_bias(0.5, 0.0) == pytest.approx(2 * scipy.stats.norm.pdf(0), rel=1e-14)
    assert topk_bias(SIXTEENTH, 1e9) == 0.0
    assert rest_constant(SIXTEENTH, 1.0, 1.3, 0.7, 0.4) == pytest.approx(
        math.exp(1.69) * (0.7 * 2.69 + 0.4), rel=1e-12
    )
    assert rest_constant(SIXTEENTH, 0.1, 1e4, 0.7, 0.4) == math.inf
    assert rest_constant(SIXTEENTH, 0.1, 1e4, 0.0, 0.0) == 0.0
    assert rest_constant(SIXTEENTH, 0.1, 2.0, 0.0, 0.0) == 0.0
    assert np.isfinite(rest_constant(SIXTEENTH, 0.1, 20.0, 1.0, 0.0))


def test_what_needs_gaussian_tokens_says_so() -> None:
    found = {p.name: p for p in es.predictions(es.Head([[1.0]], [[1.0]]), es.Cube(1))}
    assert found["keep-neyman-bound"].unmet == ("tokens are Gaussian",)
    assert found["keep-topk"].unmet == ("tokens are Gaussian",)
    assert found["keep-neyman"].applies
    assert not found["keep-random"].unmet


@pytest.mark.parametrize("size", [1e-99, 1.0, 1e99])
def test_a_bound_beyond_the_floating_range_is_infinite_and_never_nan(size: float) -> None:
    V = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    pool = es.Pool(randn(40, 2))
    head = es.Head(0.0 * V, size * V)
    most = {p.name: p for p in es.predictions(head, pool)}["keep-neyman"].numbers["most"]
    unit = {p.name: p for p in es.predictions(es.Head(0.0 * V, V), pool)}["keep-neyman"].numbers[
        "most"
    ]
    assert most == pytest.approx(unit * size * size, rel=1e-12)
    for name in ("keep-neyman", "keep-neyman-bound"):
        numbers = {p.name: p for p in es.predictions(head, es.Gaussian(torch.eye(2)))}[name].numbers
        assert not any(math.isnan(value) for value in numbers.values())

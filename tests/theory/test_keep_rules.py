"""Rates and constants of keep rules: against the exact curves, simulation, and each other."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

import esscher as es
from esscher.theory.prediction import Prediction
from esscher.theory.sharp import gaussian_mean_norm


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
    """n MSE at 2^53 keys."""
    head, law, x, found = setting(d, horizon)
    n = 2**53
    for name, rule in (("keep-random", "random"), ("keep-neyman", "neyman")):
        assert es.exact_curve(head, law, x, [n], keep=rule).rms[0] ** 2 * n == pytest.approx(
            found[name].numbers["constant"], rel=1e-4
        )


@pytest.mark.parametrize("d", [1, 2, 6])
@pytest.mark.parametrize("horizon", [0.01, 1.0, 4.0, 20.0])
def test_neyman_has_rate_one_half_at_every_horizon(d: int, horizon: float) -> None:
    head, law, x, found = setting(d, horizon, seed=5)
    error = es.exact_curve(head, law, x, [10**4, 10**8], keep="neyman")
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


def test_rates_of_kept_keys_apply_to_other_laws() -> None:
    found = {p.name: p for p in es.predictions(es.Head([[1.0]], [[1.0]]), es.Cube(1))}
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
    found = {p.name: p for p in es.predictions(head, es.Gaussian(torch.eye(2)))}["keep-neyman"]
    assert not any(math.isnan(value) for value in found.numbers.values())

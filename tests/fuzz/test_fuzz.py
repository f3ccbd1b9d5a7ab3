"""3,000 seeded calls of the public API: none wrong, none NaN or inf without a word, no exception
that is not ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import scipy.special
import torch

import esscher as es
from tests.fuzz import attention_reference as plain
from tests.fuzz import error_reference, line_reference
from tests.fuzz.driver import Family, run, table
from tests.fuzz.families import FAMILIES, NOT_CALLED, calls_of
from tests.fuzz.law_reference import (
    GaussianSpec,
    MixtureSpec,
    PoolSpec,
    ProductSpec,
    RadialSpec,
    Spec,
)

CALLS, SEED = 3000, 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_random_calls_are_right_or_refused(
    family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    tally = run(family, calls_of(family, CALLS), SEED)
    with capsys.disabled():
        print("\n" + table({family.name: tally}))
    assert tally.bad == 0, "\n".join(tally.findings)
    assert set(family.covers) <= tally.called
    assert tally.counts["checked"] > tally.counts["refused"]


def test_every_public_name_is_called() -> None:
    covered = {name.split(".")[0] for family in FAMILIES for name in family.covers}
    base = {"Measure"}  # abstract: called through every law
    assert covered | set(NOT_CALLED) | base == set(es.__all__)
    assert sum(family.share for family in FAMILIES) == pytest.approx(1.0)


# ---- the driver finds what is planted
# ------------------------------------------------------------------------------------


def _off(answer: Any) -> Any:
    return answer + 1e-3 * (1 + answer.abs())


def _nan(answer: Any) -> Any:
    return answer * math.nan


def _breaks(answer: Any) -> Any:
    raise IndexError("list index out of range")


def _foreign(answer: Any) -> Any:
    raise ValueError("need at least one array to stack")


@pytest.mark.parametrize(
    ("bug", "kind"),
    [(_off, "wrong"), (_nan, "silent"), (_breaks, "internal"), (_foreign, "internal")],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[Any], Any], kind: str
) -> None:
    attend = es.attend
    family = next(family for family in FAMILIES if family.name == "attention")
    before = run(family, 40, SEED)
    monkeypatch.setattr(es, "attend", lambda *args, **options: bug(attend(*args, **options)))
    after = run(family, 40, SEED)
    assert after.counts[kind] > before.counts[kind] + 5
    assert f"python -m tests.fuzz --family attention --seed {SEED} --call" in "\n".join(
        after.findings
    )


def test_taking_junk_and_refusing_plain_input_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("q: expected something else")

    family = next(family for family in FAMILIES if family.name == "attention")
    monkeypatch.setattr(es, "attend", lambda *args, **options: torch.zeros(1))
    assert "junk was taken" in "\n".join(run(family, 200, SEED).findings)
    monkeypatch.setattr(es, "attend", refuse)
    # not raised by a line of the package
    assert "internal" in "\n".join(run(family, 20, SEED).findings)


# ---- the references are right
# --------------------------------------------------------------------------------------------


def test_softmax_reference_against_a_closed_form() -> None:
    """Scores a, 0 with values 1, 0: the logistic function, also where exp overflows float64."""
    for a in (0.0, 1.5, -3.0, 800.0):
        found = plain.softmax(
            np.array([[a]]), np.array([[1.0], [0.0]]), np.array([[1.0], [0.0]]), 1.0
        )
        assert float(found.out[0, 0]) == pytest.approx(scipy.special.expit(a), rel=1e-15)
    out, _, _ = plain.hardmax(
        np.array([[1.0]]), np.array([[2.0], [2.0], [1.0]]), np.array([[1.0], [3.0], [9.0]])
    )
    assert out[0, 0] == 2.0
    wanted, _ = plain.linear(
        np.array([[2.0]]), np.array([[1.0], [3.0]]), np.array([[5.0], [7.0]]), 0.5
    )
    assert wanted[0, 0] == 13.0


SPECS: list[tuple[str, Spec]] = [
    ("gaussian", GaussianSpec(np.array([[2.0, 0.3], [0.3, 0.5]]), np.array([0.1, -0.4]))),
    ("sphere", RadialSpec(3, 1.7, 1.5)),
    ("sphere-4", RadialSpec(4, 0.8, 2.0)),
    ("ball", RadialSpec(3, 1.3, 2.5)),
    ("cube", ProductSpec(2, 1.2, "cube")),
    ("rademacher", ProductSpec(2, 0.7, "rademacher")),
    ("laplace", ProductSpec(2, 0.6, "laplace")),
    ("pool", PoolSpec(np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]]), np.array([1.0, 2.0, 0.5]))),
    (
        "mixture",
        MixtureSpec(
            np.array([1.0, 3.0]), (ProductSpec(2, 1.0, "cube"), GaussianSpec(np.eye(2), np.ones(2)))
        ),
    ),
    (
        "mixture-2",
        MixtureSpec(
            np.array([1.0, 3.0]), (RadialSpec(2, 1.3, 2.0), GaussianSpec(np.eye(2), np.ones(2)))
        ),
    ),
]


@pytest.mark.parametrize("spec", [spec for _, spec in SPECS], ids=[name for name, _ in SPECS])
def test_law_reference_against_differences_of_its_transform(spec: Spec) -> None:
    """Mean and covariance are the derivatives of K; K(0) = 0. Central differences in long double:
    about 1e-8.
    """
    theta, h = np.linspace(0.3, 0.7, spec.dim), 1e-4
    found = spec.tilted(theta)
    for i in range(spec.dim):
        step = h * np.eye(spec.dim)[i]
        up, down = spec.tilted(theta + step), spec.tilted(theta - step)
        assert float((up.log - down.log) / (2 * h)) == pytest.approx(float(found.mean[i]), rel=1e-6)
        assert ((up.mean - down.mean) / (2 * h)).astype(float) == pytest.approx(
            found.cov[i].astype(float), rel=1e-6, abs=1e-9
        )
    assert float(spec.tilted(np.zeros(spec.dim)).log) == pytest.approx(0.0, abs=1e-15)


def test_law_reference_against_closed_forms() -> None:
    """The transform itself: sphere in three dimensions sinh(r)/r, Laplace 1/(1 - x^2), a two-point
    pool cosh.
    """
    r = 2.3
    assert float(RadialSpec(3, 1.0, 1.5).tilted(np.array([r, 0.0, 0.0])).log) == pytest.approx(
        float(mp.log(mp.sinh(r) / r))
    )
    assert float(ProductSpec(1, 0.5, "laplace").tilted(np.array([1.0])).log) == pytest.approx(
        -math.log(0.75)
    )
    pool = PoolSpec(np.array([[1.0], [-1.0]]), np.ones(2))
    assert float(pool.tilted(np.array([r])).log) == pytest.approx(math.log(math.cosh(r)))


def test_error_references_agree() -> None:
    """Listing every draw against quadrature; one key of two: the error is half the gap, whatever
    the scores are not.
    """
    rng = np.random.default_rng(5)
    scores, values = (
        rng.standard_normal(4).astype(np.longdouble),
        rng.standard_normal((4, 2)).astype(np.longdouble),
    )
    atoms = error_reference.Atoms(scores, np.log(rng.random(4)), values, np.zeros(4))
    for n in (1, 2, 5):
        listed, found = (
            error_reference.by_listing(atoms, n),
            error_reference.by_quadrature(atoms, [n]),
        )
        for name in ("mse", "bias", "sum_p2"):
            assert getattr(listed, name).astype(float) == pytest.approx(
                getattr(found, name), rel=1e-10, abs=1e-12
            )
    equal = error_reference.Atoms(scores, np.zeros(4), values, np.zeros(4))
    for n in (1, 3, 4):
        listed, found = (
            error_reference.by_listing_kept(equal, n),
            error_reference.by_quadrature_kept(equal, [n]),
        )
        for name in ("mse", "bias", "sum_p2"):
            assert getattr(listed, name).astype(float) == pytest.approx(
                getattr(found, name), rel=1e-9, abs=1e-12
            )
    twice = error_reference.Atoms(
        *(np.concatenate([x, x]) for x in (scores, np.zeros(4), values, np.zeros(4)))
    )
    one, two = (
        error_reference.by_quadrature_kept(twice, [3]),
        error_reference.by_quadrature_kept(equal, [3], 2),
    )
    assert one.mse == pytest.approx(two.mse, rel=1e-12)
    pair = error_reference.Atoms(np.zeros(2), np.zeros(2), np.array([[1.0], [-1.0]]), np.zeros(2))
    assert error_reference.by_quadrature(pair, [1, 4, 100]).mse == pytest.approx(
        [1.0, 0.25, 0.01], rel=1e-12
    )


@pytest.mark.parametrize("spec", [spec for _, spec in SPECS if line_reference.has_atoms(spec)])
def test_atoms_have_the_tilted_moments_of_their_law(spec: Spec) -> None:
    theta = np.linspace(0.3, 0.6, spec.dim)
    atoms = line_reference.atoms_along(spec, theta, np.eye(spec.dim), np.zeros(spec.dim))
    weights = np.exp(atoms.log_weights - atoms.log_weights.max())
    weights = weights / weights.sum()
    tilted = weights * np.exp(atoms.scores)
    assert float(np.log(tilted.sum())) == pytest.approx(float(spec.tilted(theta).log), rel=1e-10)
    assert atoms.limit.astype(float) == pytest.approx(
        spec.tilted(theta).mean.astype(float), rel=1e-10
    )
    apart = atoms.values - atoms.limit
    trace = (tilted / tilted.sum()) @ ((apart**2).sum(axis=1) + atoms.spread)
    assert float(trace) == pytest.approx(float(np.trace(spec.tilted(theta).cov)), rel=1e-9)

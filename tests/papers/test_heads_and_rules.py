"""Measurements of the claims on heads and keep rules, small, and the rules where data could mislead
them.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from esscher.intervals import Interval
from esscher.papers import claims_heads
from esscher.papers.claim import Picture
from esscher.papers.claims_heads import fall_with_scale, slow_share
from esscher.papers.judge import find_claim
from esscher.papers.rules import (
    above,
    all_of,
    below,
    decided,
    inside,
    need,
    rank_correlation,
    widened,
)
from tests.papers.made import made_embeddings, made_prose


def test_neymans_keys_have_the_constant_of_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    """n MSE -> (E|c|)^2 under the tilted law: for tokens -1 and 1 on an axis, at the tilt t along
    it, cosh(t)^-4, while tilted draws have cosh(t)^-2.
    """
    sides = np.array([[-1.0, 0, 0, 0], [1.0, 0, 0, 0]])
    monkeypatch.setattr(claims_heads, "finite_law", lambda law, rng: sides)
    rows = claims_heads.measure_neyman("two", 1.0, [500, 2000], 4000, np.random.default_rng(2))
    table = pd.DataFrame(rows)
    own = table[(table["metric"] == "neyman") & (table["n"] == 2000)]
    t, weight = np.polynomial.hermite_e.hermegauss(80)
    neyman, tilted = (float(weight @ np.cosh(t) ** -k) / weight.sum() for k in (4, 2))
    # within 4 standard errors, one in 16,000 by chance, and a term in 1/n
    assert abs(2000 * own["squared"].mean() - neyman) < 4 * 2000 * own["squared"].sem() + 2e-3
    assert abs(own["spread"].mean() - tilted) < 4 * own["spread"].sem()


@pytest.mark.parametrize(
    ("low", "high", "verdicts"),
    [
        (2.0, 3.0, ("supported", "refuted", "refuted")),
        (-3.0, -2.0, ("refuted", "supported", "refuted")),
        (0.2, 0.8, ("supported", "refuted", "supported")),
        (0.5, 1.5, ("supported", "refuted", "undecided")),
        (-0.5, 0.5, ("undecided", "undecided", "undecided")),
        (-math.inf, math.inf, ("undecided", "undecided", "undecided")),
    ],
)
def test_an_interval_that_holds_the_bound_decides_nothing(
    low: float, high: float, verdicts: tuple[str, str, str]
) -> None:
    found = Interval(0.0, low, high)
    assert (above(found, 0.0), below(found, 0.0), inside(found, 0.0, 1.0)) == verdicts


def test_one_refuted_part_refutes_and_one_undecided_part_decides_nothing() -> None:
    assert all_of(["supported", "supported"]) == "supported"
    assert all_of(["supported", "undecided"]) == "undecided"
    assert all_of(["supported", "undecided", "refuted"]) == "refuted"
    assert all_of([]) == "undecided"


def test_a_decision_rests_on_the_part_that_decides_and_tells_the_worst_of_several() -> None:
    picture = Picture("x", "y", ())
    shares = {"a": Interval(0.9, 0.8, 1.0), ("b", 2.0): Interval(0.3, 0.2, 0.4)}
    good, bad = need("mean", Interval(1.0, 0.5, 1.5), above, 0.0), need("share", shares, above, 0.5)
    found = decided(good, bad, picture=picture, note="so it is")
    assert (found.verdict, found.effect, found.found.value) == ("refuted", "share, b, 2", 0.3)
    assert found.reason == (
        "mean = 1 [0.5, 1.5], needed above 0; share, b, 2 = 0.3 [0.2, 0.4], needed above 0.5;"
        " so it is"
    )
    assert decided(good, picture=picture).effect == "mean"
    far = need("share", shares, inside, 0.8, 1.0)
    assert (far.what, far.must) == ("share, b, 2", "between 0.8 and 1")
    assert need("computed", 3.0, above, 2.0).found == (3.0, 3.0, 3.0)
    assert need("share", shares, below, 0.5).what == "share, a"
    assert need("nothing", {}, above, 0.0).verdict == "undecided"


def test_without_a_picture_the_cases_of_the_first_part_are_drawn() -> None:
    """By label and place, or by their number, beside the bounds."""
    found = {("a", 10): Interval(0.9, 0.8, 1.0), ("a", 100): 0.7, ("b", 10): 0.6}
    picture = decided(need("share", found, inside, 0.5, 1.0), x="tokens", log="x").picture
    assert (picture.x, picture.y, picture.log) == ("tokens", "share", "x")
    assert [one.label for one in picture.series] == ["a", "b", "0.5", "1"]
    first, *_, last = picture.series
    assert (list(first.x), list(first.y), list(first.low)) == ([10, 100], [0.9, 0.7], [0.8, 0.7])
    assert (list(last.x), list(last.y), last.line) == ([10, 100], [1.0, 1.0], True)
    numbered = decided(need("gap", {"first": 1.0, "second": 2.0}, above, 0.0)).picture
    assert list(numbered.series[0].x) == [0, 1]
    assert decided(need("nothing", {}, above, 0.0)).picture.series == []


def test_a_stored_interval_is_widened_to_the_level_that_decides() -> None:
    value, low, high = widened(1.0, 1.0 - 1.959964, 1.0 + 2 * 1.959964)
    assert (value, low, high) == pytest.approx((1.0, 1.0 - 3.290527, 1.0 + 2 * 3.290527), abs=1e-5)


def test_heads_without_a_number_count_nowhere() -> None:
    heads = pd.DataFrame(
        {"coupling": np.arange(8.0), "beta": [0.6, 0.55, 0.45, 0.4, 0.35, 0.3, 0.2, np.nan]}
    )
    assert slow_share(heads, "beta").value == pytest.approx(5 / 7)
    assert rank_correlation(heads["coupling"], heads["beta"]).value == pytest.approx(-1.0)


def test_a_refused_scale_is_left_out_of_the_fall() -> None:
    scales = pd.DataFrame(
        {
            "layer": 0,
            "head": [0, 0, 1, 1, 2, 2],
            "scale": [0.25, 2.0] * 3,
            "status": ["ok"] * 5 + ["refused"],
            "beta_fit": [0.5, 0.3, 0.5, 0.2, 0.5, math.nan],
        }
    )
    assert fall_with_scale(scales).value == pytest.approx(0.25)


def test_no_relation_with_the_horizon_is_not_called_a_fall() -> None:
    tables = made_embeddings(0.0, 4)
    assert find_claim("16").decide(tables).verdict != "supported"


def test_exponents_of_heads_at_one_half_do_not_support_claim_7() -> None:
    tables = made_prose((0.5, 0.5, 0.5, 0.5), 2)
    assert find_claim("7").decide(tables).verdict != "supported"

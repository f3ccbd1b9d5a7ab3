"""Normality and coverage by drawing tokens: against Student's law where scores are equal, and
against what is proved.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import esscher as es
from esscher.convergence.normality import Trial, coverage_table, draw_regions, normality_table


def eye(d: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.eye(d, dtype=torch.float64)


def test_without_scores_the_studentised_error_is_students() -> None:
    """A = 0 on the line: C_n = (1 - 1/n) s^2 / n, so t = sqrt(n/(n-1)) t_{n-1}. Coverage within 4
    binomial errors of Student's, Kolmogorov's test at 1 in 10,000; fixed seed.
    """
    n, repeats = 8, 500
    head, law = es.Head([[0.0]], [[1.0]]), es.Gaussian([[2.0]])
    trial = Trial(head, law, torch.tensor([[1.0]]).double(), (n,), 0.95)
    draws = draw_regions(trial, range(repeats))
    factor = math.sqrt((n - 1) / n)
    assert scipy.stats.kstest(factor * draws["student"], scipy.stats.t(n - 1).cdf).pvalue > 1e-4
    np.testing.assert_allclose(draws["chi2"], draws["student"] ** 2, rtol=1e-9)
    (row,) = coverage_table(draws).to_dict("records")
    exact = 1 - 2 * scipy.stats.t(n - 1).sf(factor * scipy.stats.norm.ppf(0.975))
    assert abs(row["normal"] - exact) < 4 * row["normal_stderr"]
    assert row["normal_stderr"] == pytest.approx(math.sqrt(exact * (1 - exact) / repeats), rel=0.1)
    exact_distance = max(
        abs(scipy.stats.t(n - 1).cdf(factor * x) - scipy.stats.norm.cdf(x))
        for x in np.linspace(-4, 4, 801)
    )
    assert row["kolmogorov"] < exact_distance + 3 * row["kolmogorov_noise"]
    assert row["rms"] == pytest.approx(math.sqrt(2.0 / n), rel=0.05)
    assert row["effective_tokens"] == pytest.approx(n)


def test_proved_regions_hold_and_all_become_normal() -> None:
    """Tokens on a sphere, 150 draws: the proved shares are at least .95 but for 4 standard errors,
    the asymptotic one at n = 2000 too, and the distance to normal falls.
    """
    law = es.Sphere(3)
    x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]]).double()
    found = normality_table(es.Head(eye(3), eye(3)), law, x, [10, 2000], repeats=150)
    assert (found["bernstein"] >= 0.95 - 4 * found["bernstein_stderr"]).all()
    assert (found["markov"] >= 0.95 - 4 * found["markov_stderr"]).all()
    small, large = found.to_dict("records")
    assert small["normal"] < 0.9
    assert abs(large["normal"] - 0.95) < 4 * large["normal_stderr"]
    assert large["chi2_mean"] == pytest.approx(1.0, abs=0.2)
    assert large["kolmogorov"] < small["kolmogorov"]
    exact = es.exact_curve(es.Head(eye(3), eye(3)), law, x, [10, 2000])
    assert found["rms"].tolist() == pytest.approx(exact.rms.tolist(), rel=0.15)


def test_a_law_without_bounds_has_no_region_from_them() -> None:
    found = normality_table(
        es.Head(eye(2, 0.3), eye(2)), es.Gaussian(eye(2)), [[1.0, 0.0]], [20], repeats=4
    )
    assert found["bernstein"].isna().all()
    assert found["bernstein_stderr"].isna().all()
    assert found["markov"].notna().all()


def test_draws_do_not_depend_on_who_makes_them() -> None:
    trial = Trial(
        es.Head(eye(2), eye(2)),
        es.Ball(2),
        torch.ones(2, 2).double(),
        (5, 9),
        0.9,
        seed=3,
        name="x",
    )
    whole = draw_regions(trial, range(4))
    parts = pd.concat(
        [draw_regions(trial, range(2, 4)), draw_regions(trial, range(2))], ignore_index=True
    )
    order = ["repeat", "n", "query"]
    pd.testing.assert_frame_equal(
        *(frame.sort_values(order, ignore_index=True) for frame in (whole, parts))
    )


def test_a_table_of_known_draws() -> None:
    """Two queries, four repeats: shares, errors, radii over the rms error, chi-squared over its
    degrees of freedom.
    """
    rows = [
        (r, q, 7, 1.0 if r < 2 else -1.0, 6.0, 4.0, 2.0, 3.0, float(r < 3), 8.0)
        for r in range(4)
        for q in range(2)
    ]
    names = [
        "repeat",
        "query",
        "n",
        "student",
        "chi2",
        "squared",
        "effective_tokens",
        "dim",
        "normal",
        "normal_radius",
    ]
    (row,) = coverage_table(pd.DataFrame(rows, columns=names)).to_dict("records")
    assert (row["n"], row["rms"], row["effective_tokens"]) == (7, 2.0, 2.0)
    assert (row["normal"], row["normal_size"], row["chi2_mean"]) == (0.75, 4.0, 2.0)
    assert row["normal_stderr"] == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 4))
    assert row["kolmogorov"] == pytest.approx(float(scipy.stats.norm.cdf(1.0)) - 0.5)
    assert (row["skewness"], row["kurtosis"]) == (0.0, -2.0)

"""Coverage of confidence regions by drawing tokens: against Student's law where scores are equal,
against what is proved, and on a pool of keys and values.
"""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

import esscher as es
from esscher.papers.coverage import coverage, head_of_pool


def eye(d: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.eye(d, dtype=torch.float64)


def test_without_scores_regions_cover_as_students_law_says() -> None:
    """A = 0 on the line: C_n = (1 - 1/n) s^2 / n, so t = sqrt(n/(n-1)) t_{n-1}. Coverage within 4
    binomial errors of Student's; fixed seed.
    """
    n, repeats = 8, 500
    head, law = es.Head([[0.0]], [[1.0]]), es.Gaussian([[2.0]])
    (row,) = coverage(head, law, [[1.0]], [n], repeats).to_dict("records")
    factor = math.sqrt((n - 1) / n)
    exact = 1 - 2 * scipy.stats.t(n - 1).sf(factor * scipy.stats.norm.ppf(0.975))
    assert abs(row["normal"] - exact) < 4 * row["normal_stderr"]
    assert row["normal_stderr"] == pytest.approx(math.sqrt(exact * (1 - exact) / repeats), rel=0.1)
    assert row["rms"] == pytest.approx(math.sqrt(2.0 / n), rel=0.05)
    assert row["effective_tokens"] == pytest.approx(n)


def test_proved_regions_hold_and_asymptotic_ones_on_many_tokens() -> None:
    """Tokens on a sphere, 150 draws: the proved shares are at least .95 but for 4 standard errors,
    the asymptotic one at n = 2000 too.
    """
    law = es.Sphere(3)
    x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]]).double()
    found = coverage(es.Head(eye(3), eye(3)), law, x, [10, 2000], repeats=150)
    assert (found["bernstein"] >= 0.95 - 4 * found["bernstein_stderr"]).all()
    small, large = found.to_dict("records")
    assert small["normal"] < 0.9
    assert abs(large["normal"] - 0.95) < 4 * large["normal_stderr"]
    assert large["bernstein_size"] > large["normal_size"] > 1.0
    exact = es.exact_curve(es.Head(eye(3), eye(3)), law, x, [10, 2000])
    assert found["rms"].tolist() == pytest.approx(exact.rms.tolist(), rel=0.15)


def test_a_law_without_bounds_has_no_region_from_them() -> None:
    head, law = es.Head(eye(2, 0.3), eye(2)), es.Gaussian(eye(2))
    found = coverage(head, law, [[1.0, 0.0]], [20], repeats=4)
    assert "normal" in found
    assert "bernstein" not in found


def test_a_pool_of_keys_and_values_is_a_law_with_a_head() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, width, dtype=torch.float64, generator=generator)
        for rows, width in ((3, 4), (20, 4), (20, 5))
    )
    head, pool = head_of_pool(k, v, 0.7)
    torch.testing.assert_close(es.limit(head, pool)(q), es.attend(q, k, v, scale=0.7))
    bounds = es.Bounds.of(head, pool, q)
    torch.testing.assert_close(bounds.score, 0.7 * (q @ k.T).amax(1))
    assert (coverage(head, pool, q, [40, 80], repeats=3)["bernstein"] == 1.0).all()

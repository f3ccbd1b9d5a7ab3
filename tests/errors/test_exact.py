"""exact_curve against Monte Carlo, against itself by another road, and in its corners."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors import exact
from esscher.errors.integral import error_from_nodes
from esscher.measures import line as nodes_along


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head_for(d: int, seed: int = 0, size: float = 0.6) -> es.Head:
    return es.Head(
        size * randn(d, d, seed=seed),
        randn(3, d, seed=seed + 1),
        0.2 * randn(d, seed=seed + 2),
        randn(3, seed=seed + 3),
    )


def monte_carlo(
    head: es.Head, law: es.Measure, x: torch.Tensor, n: int, repeats: int, seed: int
) -> torch.Tensor:
    """Squared error averaged over the queries, one number per repeat; many repeats share one
    batched attention.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = law.sample(n * repeats, generator).double().reshape(repeats, n, law.dim)
    q = head.queries(x).double().expand(repeats, -1, -1)
    keys, values = head.keys(tokens), head.values(tokens)
    outputs = torch.softmax(q @ keys.mT, -1) @ values
    return (outputs - es.limit(head, law)(x)).square().sum(-1).mean(-1)


def agrees(samples: torch.Tensor, mse: float, errors: float) -> bool:
    return abs(float(samples.mean()) - mse) <= errors * float(samples.std()) / math.sqrt(
        samples.numel()
    )


def test_gaussian_agrees_with_monte_carlo_at_twenty_random_settings() -> None:
    """3 standard errors (chance of a false alarm 0.05 over the 20; the seed is fixed)."""
    pick = np.random.default_rng(1)
    for case in range(20):
        d, n = int(pick.integers(1, 9)), int(pick.integers(1, 300))
        factor = randn(d, d, seed=case)
        law = es.Gaussian(factor @ factor.T / d, 0.5 * randn(d, seed=case + 100))
        head = head_for(d, case, size=0.5)
        x = law.sample(4, torch.Generator().manual_seed(case))
        curve = es.exact_curve(head, law, x, [n])
        assert agrees(monte_carlo(head, law, x, n, 2000, case), float(curve.rms[0] ** 2), 3.0), (
            case,
            d,
            n,
        )


LINES = [
    ("sphere", lambda: es.Sphere(5, 2.0)),
    ("circle", lambda: es.Sphere(2, 1.0)),
    ("ball", lambda: es.Ball(4, 2.0)),
    ("rademacher", lambda: es.Rademacher(3, 0.8)),
    (
        "pool",
        lambda: es.Pool(randn(30, 3)),
    ),
    (
        "mixture",
        lambda: es.Mixture(
            [0.3, 0.7], [es.Gaussian(0.3 * torch.eye(3).double(), [1.0, 0.0, 1.0]), es.Ball(3, 1.5)]
        ),
    ),
    ("interval", lambda: es.Cube(1, 2.0)),
    ("laplace", lambda: es.Laplace(1, 0.3)),
]


@pytest.mark.parametrize(("name", "make"), LINES, ids=[name for name, _ in LINES])
def test_laws_with_nodes_agree_with_monte_carlo(name: str, make: object) -> None:
    """4 standard errors at three n: false alarm below 0.0002 a law."""
    law = make()  # type: ignore[operator]
    assert law.along(torch.zeros(law.dim).double()) is not None
    head = head_for(law.dim, 7, size=0.5)
    x = law.sample(4, torch.Generator().manual_seed(3)).double()
    curve = es.exact_curve(head, law, x, [1, 4, 60])
    assert curve.kind == "exact"
    for i, n in enumerate(curve.n.tolist()):
        assert agrees(monte_carlo(head, law, x, n, 4000, n), float(curve.rms[i] ** 2), 4.0), (
            name,
            n,
        )


@pytest.mark.parametrize(("name", "make"), LINES, ids=[name for name, _ in LINES])
def test_nodes_reproduce_the_law(name: str, make: object) -> None:
    """Nodes along a tilt have the law's mean, covariance and log-Laplace transform along that tilt,
    at theta and 2 theta.
    """
    law = make()  # type: ignore[operator]
    theta = 0.6 * randn(law.dim, seed=9)
    lines = law.along(theta)
    weights = torch.cat([line.log_weights for line in lines])
    scores = torch.cat([line.scores for line in lines])
    for factor in (0.0, 1.0, 2.0):
        total = torch.logsumexp(weights + factor * scores, 0)
        assert float(total) == pytest.approx(float(law.log_laplace(factor * theta)), abs=1e-11)
        mean = sum(
            (torch.exp(l.log_weights + factor * l.scores - total)[:, None] * l.means).sum(0)
            for l in lines
        )
        torch.testing.assert_close(mean, law.tilted_mean(factor * theta), rtol=1e-10, atol=1e-10)
        cov = sum(
            (torch.exp(l.log_weights + factor * l.scores - total)[:, None, None]
             * ((l.means - mean)[:, :, None] * (l.means - mean)[:, None, :]
                + l.spread[:, None, None] * (l.across @ l.across.T))).sum(0)
            for l in lines
        )  # fmt: skip
        torch.testing.assert_close(cov, law.tilted_cov(factor * theta), rtol=1e-9, atol=1e-9)


def test_gaussian_by_quadrature_along_the_tilt_equals_f1_f2() -> None:
    """Two roads to one number: gaussian_error, and the general nodes (a mixture of one component),
    to 1e-9.
    """
    law = es.Gaussian(torch.diag(torch.tensor([0.5, 1.5, 0.1]).double()), [0.3, -0.2, 1.0])
    head, x = head_for(3, 2, size=1.0), randn(5, 3, seed=8)
    n = [1, 2, 10, 1000, 10**6, 10**12]
    direct, nodes = (
        es.exact_curve(head, law, x, n, details=True),
        es.exact_curve(head, es.Mixture([1.0], [law]), x, n, details=True),
    )
    np.testing.assert_allclose(direct.queries.mse, nodes.queries.mse, rtol=1e-9)
    np.testing.assert_allclose(direct.queries.sum_p2, nodes.queries.sum_p2, rtol=1e-9)
    np.testing.assert_allclose(direct.queries.bias, nodes.queries.bias, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(direct.queries.delta, nodes.queries.delta, rtol=1e-9)
    np.testing.assert_allclose(direct.slope, nodes.slope, rtol=1e-8)
    np.testing.assert_allclose(direct.queries.limit, nodes.queries.limit, rtol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3, 6])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_no_variance_across_the_tilt_is_negative(d: int, rank: int) -> None:
    """Gaussians of small rank, alone and as a mixture of one, in many scales and along tilts they
    do not see: one number.
    """
    for seed in range(4):
        size = 10.0 ** (seed - 2)
        factor = size * randn(d, min(rank, d), seed=seed)
        law = es.Gaussian(factor @ factor.T, randn(d, seed=seed + 50))
        head, x = head_for(d, seed, size=0.6 / size), randn(3, d, seed=seed + 99)
        # zero scores, up to rounding
        blind = head.tilt(x) - head.tilt(x) @ torch.linalg.pinv(law.cov) @ law.cov
        for turned in (head, es.Head(torch.eye(d).double(), head.V)):
            rows = x if turned is head else blind
            direct = es.exact_curve(turned, law, rows, [1, 30, 10**6])
            nodes = es.exact_curve(turned, es.Mixture([1.0], [law]), rows, [1, 30, 10**6])
            assert (np.abs(direct.rms - nodes.rms) <= 1e-9 * direct.rms + 1e-13).all()
            if turned is not head:  # equal scores: the error is that of a mean
                variance = float((head.V @ law.cov @ head.V.T).trace())
                np.testing.assert_allclose(nodes.rms**2, variance / nodes.n, rtol=1e-9, atol=1e-26)


def mixtures() -> list[es.Measure]:
    """Singular and whole parts, nested, from one dimension to six."""
    laws: list[es.Measure] = [
        es.Mixture(
            [0.3, 0.7],
            [es.Gaussian([[0.3 + 0.1 * k]], [float(k)]), es.Gaussian([[0.9 / (k + 1)]], [-0.5])],
        )
        for k in range(4)
    ]
    line = [
        es.Laplace(1, 0.3),
        es.Cube(1, 1.5),
        es.Rademacher(1, 0.7),
        es.Sphere(1, 0.4),
        es.Ball(1, 2.0),
        es.Pool(randn(4, 1)),
    ]
    laws.append(
        es.Mixture(
            [1, 2], [es.Mixture(torch.ones(len(line)).double(), line), es.Gaussian([[0.5]], [0.3])]
        )
    )
    for d in (2, 4, 6):
        thin = randn(d, 1, seed=d)
        parts = [
            es.Gaussian(thin @ thin.T / d, randn(d)),
            es.Gaussian(torch.zeros(d, d).double()),
            es.Ball(d, 1.2),
        ]
        inner = es.Mixture(
            [1, 1, 0], [es.Rademacher(d, 0.5), es.Pool(randn(5, d, seed=3)), es.Sphere(d)]
        )
        laws.append(es.Mixture([0.3, 0.2, 0.3, 0.2], [*parts, inner]))
    return laws


@pytest.mark.parametrize(
    "law", mixtures(), ids=lambda law: f"{len(law.components)} parts, d = {law.dim}"
)
def test_mixtures_agree_with_monte_carlo(law: es.Measure) -> None:
    """4 standard errors at three n: false alarm 0.0002 a law."""
    head, x = (
        head_for(law.dim, 11, size=0.5),
        law.sample(3, torch.Generator().manual_seed(5)).double(),
    )
    curve = es.exact_curve(head, law, x, [1, 5, 50])
    assert curve.kind == "exact"
    for i, n in enumerate(curve.n.tolist()):
        assert agrees(monte_carlo(head, law, x, n, 4000, n), float(curve.rms[i] ** 2), 4.0), n


def test_gaussian_equals_the_exact_curve_of_a_large_pool() -> None:
    """A pool of 200,000 tokens is the law up to sampling: per query within 3 %, and its scatter
    shrinks with the pool.
    """
    law, head = es.Gaussian(0.5 * torch.eye(4).double()), head_for(4, 3, size=0.4)
    x = law.sample(8, torch.Generator().manual_seed(0))
    exact_law = es.exact_curve(head, law, x, [10, 100, 1000])
    tokens = law.sample(200_000, torch.Generator().manual_seed(1))
    pool = es.exact_pool_curve(
        head.queries(x), head.keys(tokens), head.values(tokens), [10, 100, 1000], scale=1.0
    )
    np.testing.assert_allclose(pool.rms, exact_law.rms, rtol=0.02)


def test_sphere_reaches_the_gaussian_in_high_dimension() -> None:
    """Tokens sqrt(d) times the unit sphere look standard normal along any tilt: difference of order
    1/d.
    """
    d = 2000
    head = es.Head(1.2 * torch.eye(d).double(), torch.eye(2, d).double())
    x = torch.zeros(1, d, dtype=torch.float64)
    x[0, 0] = 1.0
    n = [10, 1000, 10**5]
    sphere = es.exact_curve(head, es.Sphere(d, math.sqrt(d)), x, n)
    gauss = es.exact_curve(head, es.Gaussian(torch.eye(d).double()), x, n)
    np.testing.assert_allclose(sphere.rms, gauss.rms, rtol=0.01)


@pytest.mark.parametrize(
    "law",
    [
        es.Gaussian(torch.diag(torch.tensor([0.5, 1.5, 0.1]).double())),
        es.Sphere(3, 2.0),
        es.Ball(3, 2.0),
    ],
    ids=["gaussian", "sphere", "ball"],
)
def test_details_agree_with_monte_carlo(law: es.Measure) -> None:
    """Bias, second moment and covariance of the error entry by entry, 4.5 standard errors; the
    second moment's trace is the MSE exactly.
    """
    head, n, repeats = head_for(3, 4, size=0.8), 12, 60_000
    x = law.sample(2, torch.Generator().manual_seed(1))
    curve = es.exact_curve(head, law, x, [n], details=True)
    generator = torch.Generator().manual_seed(2)
    tokens = law.sample(n * repeats, generator).reshape(repeats, n, 3)
    errors = torch.softmax(head.queries(x) @ head.keys(tokens).mT, -1) @ head.values(
        tokens
    ) - es.limit(head, law)(x)
    assert curve.queries.bias is not None
    assert curve.queries.cov is not None
    assert curve.queries.second_moment is not None
    for i in range(2):
        e = errors[:, i]
        standard = e.std(0) / math.sqrt(repeats)
        assert bool(
            ((e.mean(0) - torch.from_numpy(curve.queries.bias[i, 0])).abs() <= 4.5 * standard).all()
        )
        for centred, found in (
            (e, curve.queries.second_moment),
            (e - e.mean(0), curve.queries.cov),
        ):
            products = centred[:, :, None] * centred[:, None, :]
            standard = products.std(0) / math.sqrt(repeats)
            apart = (products.mean(0) - torch.from_numpy(found[i, 0])).abs()
            assert bool((apart <= 4.5 * standard).all())
    np.testing.assert_allclose(
        np.trace(curve.queries.second_moment, axis1=-2, axis2=-1), curve.queries.mse, rtol=1e-10
    )


@pytest.mark.parametrize(
    "law",
    [
        es.Gaussian(torch.eye(3).double()),
        es.Sphere(3, 3.0),
        es.Mixture([0.5, 0.5], [es.Ball(3), es.Sphere(3)]),
    ],
    ids=["gaussian", "sphere", "mixture"],
)
def test_local_slope_is_the_derivative_in_log_n(law: es.Measure) -> None:
    head, x = head_for(3, 5), randn(4, 3, seed=6)
    for n in (40, 10**6):
        step = n // 20
        curve = es.exact_curve(head, law, x, [n - step, n, n + step])
        assert curve.slope is not None
        left, right = np.log(curve.n[[0, 2]])
        quotient = (np.log(curve.rms[2]) - np.log(curve.rms[0])) / (right - left)
        assert quotient == pytest.approx(float(curve.slope[1]), rel=2e-3)


def test_interpolation_over_tilts_equals_one_query_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    law, head = es.Sphere(6, 3.0), es.Head(randn(6, 6), torch.eye(6).double())
    x = law.sample(60, torch.Generator().manual_seed(0))
    many = es.exact_curve(head, law, x, [5, 10**4])
    monkeypatch.setattr(exact, "CHEBYSHEV", 10**9)
    np.testing.assert_allclose(
        many.queries.mse, es.exact_curve(head, law, x, [5, 10**4]).queries.mse, rtol=1e-9
    )


def test_halving_the_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head, x = es.Head(8 * torch.eye(3).double(), torch.eye(3).double()), randn(3, 3, seed=1)
    for law in (
        es.Sphere(3, 4.0),
        es.Ball(3, 4.0),
        es.Mixture([1.0], [es.Gaussian(torch.eye(3).double())]),
    ):
        before = es.exact_curve(head, law, x, [3, 300, 10**9]).queries.mse
        monkeypatch.setattr(nodes_along, "STEP", 0.15)
        np.testing.assert_allclose(
            before, es.exact_curve(head, law, x, [3, 300, 10**9]).queries.mse, rtol=1e-9
        )
        monkeypatch.undo()


def test_other_laws_go_through_a_stated_pool() -> None:
    law, head = es.Cube(3), head_for(3, 1)
    x = law.sample(3, torch.Generator().manual_seed(0))
    curve = es.exact_curve(head, law, x, [10, 100], pool_size=5000, seed=4)
    assert curve.kind == "pool"
    assert "5000 tokens drawn from Cube (seed 4)" in curve.origin
    tokens = law.sample(5000, torch.Generator().manual_seed(4))
    nodes = error_from_nodes(
        head.queries(x) @ head.keys(tokens).T, None, head.values(tokens), None, [10, 100]
    )
    np.testing.assert_allclose(curve.queries.mse, nodes.mse, rtol=1e-7)


def test_corners() -> None:
    head = es.Head(torch.zeros(3, 3).double(), torch.eye(3).double())
    x = randn(2, 3)
    for law in (es.Gaussian(torch.eye(3).double()), es.Sphere(3), es.Ball(3, 2.0)):
        curve = es.exact_curve(head, law, x, [1, 10])  # no tilt: attention is the sample mean
        np.testing.assert_allclose(curve.rms**2, float(law.cov.trace()) / curve.n, rtol=1e-10)
        np.testing.assert_allclose(curve.effective_tokens, curve.n, rtol=1e-10)
    point = es.exact_curve(
        es.Head(torch.eye(3).double(), torch.eye(3).double()),
        es.Gaussian(torch.zeros(3, 3)),
        x,
        [1, 7],
    )
    np.testing.assert_allclose(point.rms, 0.0, atol=1e-12)
    line = es.exact_curve(es.Head([[2.0]], [[1.0]]), es.Sphere(1), [[1.0]], [1])
    assert line.rms[0] ** 2 == pytest.approx(
        0.5 * ((1 - math.tanh(2)) ** 2 + (1 + math.tanh(2)) ** 2)
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n": [0]}, "n: expected whole numbers"),
        ({"n": [1.5]}, "n: expected whole numbers"),
        ({"n": [float("nan")]}, "n: expected whole numbers"),
        ({"n": []}, "n: expected"),
        ({"queries": torch.zeros(0, 2).double()}, "at least one row"),
        ({"queries": torch.zeros(2, 3).double()}, "rows of length 2"),
        ({"queries": [[3.0, 0.0]], "measure": es.Laplace(2)}, "Laplace has no limit there"),
        ({"measure": es.Sphere(3)}, "dimension 2, the measure has 3"),
        ({"measure": es.Cube(2), "pool_size": 0}, "pool_size"),
        ({"queries": [[1e9, 0.0]], "measure": es.Sphere(2)}, "scale the head down"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], word: str) -> None:
    given = {
        "head": es.Head(torch.eye(2), torch.eye(2)),
        "measure": es.Sphere(2),
        "queries": [[1.0, 0.0]],
        "n": [10],
    }
    with pytest.raises(ValueError, match=word):
        es.exact_curve(**(given | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e7, 1e20, 1e90])
@pytest.mark.parametrize(
    "law",
    [
        es.Sphere(3),
        es.Ball(2),
        es.Mixture([1.0, 1.0], [es.Sphere(2), es.Sphere(2, 2.0)]),
        es.Cube(1),
    ],
)
def test_scores_too_wide_for_the_nodes_are_refused(law: es.Measure, size: float) -> None:
    """Beyond 1e17 the search for the edge of the density did not end: 2 r tanh(y) no longer changes
    with y.
    """
    head = es.Head(size * torch.eye(law.dim).double(), torch.eye(law.dim).double())
    with pytest.raises(ValueError, match="queries: a score range this wide"):
        es.exact_curve(head, law, torch.ones(1, law.dim).double(), [10])

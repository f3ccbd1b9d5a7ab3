"""exact_curve(keep=...) against the plain curve, many digits, simulations of contexts, pools of
keys, and what it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import esscher as es


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def eye(d: int, size: float = 1.0) -> Tensor:
    return size * torch.eye(d, dtype=torch.float64)


LAWS: dict[str, Callable[[], es.Measure]] = {
    "line": lambda: es.Gaussian([[1.0]], [0.5]),
    "gaussian": lambda: es.Gaussian(
        torch.diag(torch.tensor([0.5, 1.5, 0.1]).double()), [0.3, -0.2, 1.0]
    ),
    "sphere": lambda: es.Sphere(4, 2.0),
    "ball": lambda: es.Ball(3, 2.0),
    "mixture": lambda: es.Mixture(
        [0.3, 0.7], [es.Gaussian(eye(3, 0.3), [1.0, 0.0, 1.0]), es.Sphere(3, 1.5)]
    ),
}


def head_for(d: int, seed: int = 0, size: float = 0.6) -> es.Head:
    return es.Head(
        size * randn(d, d, seed=seed),
        randn(2, d, seed=seed + 1),
        0.2 * randn(d, seed=seed + 2),
        randn(2, seed=seed),
    )


@pytest.fixture(params=LAWS)
def law(request: pytest.FixtureRequest) -> es.Measure:
    return LAWS[request.param]()


def setting(law: es.Measure) -> tuple[es.Head, Tensor]:
    return head_for(law.dim, 7), law.sample(3, torch.Generator().manual_seed(3)).double()


# ---- what it must reduce to
# ------------------------------------------------------------------------------------------


def test_random_keys_without_end_are_the_tokens_as_they_come(law: es.Measure) -> None:
    head, x = setting(law)
    n = [1, 16, 1000, 10**6]
    plain, kept = es.exact_curve(head, law, x, n), es.exact_curve(head, law, x, n, keep="random")
    np.testing.assert_allclose(kept.rms, plain.rms, rtol=1e-12)
    assert kept.delta == plain.delta


@pytest.mark.parametrize("rule", ["random", "topk", "topk:5+random:reweight"])
def test_all_keys_of_a_context_are_its_tokens(law: es.Measure, rule: str) -> None:
    head, x = setting(law)
    plain = es.exact_curve(head, law, x, [50])
    kept = es.exact_curve(head, law, x, [50], keep=rule, context=50)
    assert abs(kept.rms[0] - plain.rms[0]) < 4 * kept.stderr[0]
    assert kept.kept == pytest.approx(50)


def test_random_keys_of_a_context_are_a_binomial_number_of_tokens(law: es.Measure) -> None:
    """sum_m P(m of N are kept) x the error at m tokens; none kept: no error. 4 standard errors."""
    head, x = setting(law)
    tokens = 40
    each = es.exact_curve(head, law, x, np.arange(1, tokens + 1)).queries
    found = es.exact_curve(head, law, x, [4, 30], keep="random", context=tokens)
    for j, n in enumerate(found.n.tolist()):
        chance = scipy.stats.binom.pmf(np.arange(1, tokens + 1), tokens, n / tokens)
        wanted = math.sqrt((each.mse @ chance).mean())
        assert abs(found.rms[j] - wanted) < 4 * found.stderr[j]


# ---- simulations
# ------------------------------------------------------------------------------------------


NEYMAN: dict[str, tuple[Callable[[], es.Measure], Tensor]] = {  # a law, and V
    "line": (lambda: es.Gaussian([[1.3]], [0.5]), torch.tensor([[2.0]]).double()),
    "gaussian, any values": (
        lambda: es.Gaussian(torch.diag(torch.tensor([0.5, 1.5, 0.1]).double())),
        randn(3, 3, seed=4),
    ),
    "gaussian, one value": (
        lambda: es.Gaussian(torch.diag(torch.tensor([0.5, 1.5, 0.1]).double())),
        randn(1, 3, seed=4),
    ),
    "sphere": (lambda: es.Sphere(4, 2.0), eye(4)),
    "pool": (lambda: es.Pool(randn(30, 3)), randn(2, 3, seed=5)),
}


def tilted_sample(law: es.Measure, theta: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Tokens under the tilt, by rejection for bounded laws and by moving a Gaussian."""
    if law.is_gaussian:
        return law.sample(count, generator).double() + law.cov.double() @ theta
    y = law.sample(8 * count, generator).double()
    score = y @ theta
    keep = torch.rand(len(y), generator=generator, dtype=torch.float64) < torch.exp(
        score - score.max()
    )
    return y[keep][:count]


@pytest.mark.parametrize("name", NEYMAN)
def test_keys_drawn_by_weight_and_distance(name: str) -> None:
    """n keys of density e |c|, each counted 1/|c| times: error and bias within 4 standard errors at
    3 n; false alarm 0.0008.
    """
    law, V = NEYMAN[name][0](), NEYMAN[name][1]
    head = es.Head(eye(law.dim, 0.8), V)
    x = torch.ones(1, law.dim, dtype=torch.float64) / math.sqrt(law.dim)
    theta, limit = head.tilt(x)[0], es.limit(head, law)(x)[0]
    generator = torch.Generator().manual_seed(2)
    y = tilted_sample(law, theta, 300_000, generator)
    size = (head.values(y) - limit).norm(dim=1)
    y = y[torch.rand(len(y), generator=generator, dtype=torch.float64) < size / size.max()]
    curve = es.exact_curve(head, law, x, [1, 4, 40], keep="neyman", details=True)
    assert curve.kind == "exact"
    for j, n in enumerate((1, 4, 40)):
        c = (head.values(y) - limit)[: len(y) // n * n].reshape(-1, n, V.shape[0])
        p = torch.softmax(-c.norm(dim=2).log(), 1)
        error = (p[:, :, None] * c).sum(1)
        known = [float(curve.queries.mse[0, j]), *curve.queries.bias[0, j].tolist()]
        for drawn, value in zip([error.square().sum(1), *error.T], known, strict=True):
            assert (
                abs(float(drawn.mean()) - value)
                <= 4 * float(drawn.std()) / math.sqrt(len(drawn)) + 1e-12
            )


# ---- formulas
# ------------------------------------------------------------------------------------------


def test_neyman_on_the_line_against_brute_force() -> None:
    """|c| has the density r exp(-r^2/2) once drawn by its size, and n MSE = n^2 int t phi^n dt,
    phi(t) = E exp(-t/|c|).
    """
    n = np.array([1, 2, 10, 100, 10**4])
    found = es.exact_curve(
        es.Head([[3.0]], [[1.0]]), es.Gaussian([[1.0]]), [[1.0]], n, keep="neyman"
    )
    log_r, tau = np.linspace(-30, 2.6, 3001), np.linspace(-30, 7, 1501)[:, None]
    mass = np.exp(2 * log_r - np.exp(2 * log_r) / 2) * (log_r[1] - log_r[0])
    lost = -np.expm1(-np.exp(tau - log_r)) @ mass
    left = np.exp(-np.exp(tau - log_r)) @ mass
    log_phi = np.where(lost < 0.5, np.log1p(-np.minimum(lost, 0.5)), np.log(left))
    wanted = [k * np.exp(2 * tau[:, 0] + k * log_phi).sum() * (tau[1, 0] - tau[0, 0]) for k in n]
    np.testing.assert_allclose(found.queries.mse[0], wanted, rtol=1e-9)
    assert found.queries.mse[0, 0] == pytest.approx(2.0, rel=1e-11)  # E|c|^3 / E|c|


@pytest.mark.parametrize("d", [1, 2, 5])
def test_neyman_on_gaussian_tokens_is_one_number_at_every_query_and_horizon(d: int) -> None:
    law = es.Gaussian(torch.diag(torch.arange(1, d + 1).double()), randn(d))
    V, n = randn(3, d, seed=2), [1, 16, 1000, 10**6, 10**12]
    curves = [
        es.exact_curve(es.Head(eye(d, h), V), law, randn(3, d, seed=4), n, keep="neyman")
        for h in (0.0, 0.5, 4.0, 50.0)
    ]
    for curve in curves:
        np.testing.assert_allclose(
            curve.queries.mse, np.broadcast_to(curves[0].queries.mse[:1], (3, 5)), rtol=1e-11
        )
    size = (law.sample(400_000, torch.Generator().manual_seed(0)) - law.mean) @ V.T
    length = size.norm(dim=1)
    # (E_t |c|)^2: Gaussian tokens have one covariance under every tilt
    limit = float(length.mean()) ** 2
    assert abs(curves[0].delta - limit) <= 4 * 2 * float(length.mean()) * float(
        length.std()
    ) / math.sqrt(len(length))
    assert curves[0].n[-1] * curves[0].rms[-1] ** 2 == pytest.approx(curves[0].delta, rel=1e-6)
    assert curves[0].slope[-1] == pytest.approx(-0.5, abs=1e-6)


def test_random_keys_have_the_exponential_that_neyman_has_not() -> None:
    law, n = es.Gaussian([[1.0]]), [10**15]
    for s in (0.5, 1.0, 2.0, 3.0):
        head = es.Head([[s]], [[1.0]])
        random, neyman = (
            es.exact_curve(head, law, [[1.0]], n, keep=rule).rms[0] ** 2 * n[0]
            for rule in ("random", "neyman")
        )
        assert random == pytest.approx(math.exp(s * s) * (1 + s * s), rel=1e-6)
        assert neyman == pytest.approx(2 / math.pi, rel=1e-6)


def test_a_large_pool_of_the_law_has_its_errors() -> None:
    """Neyman's keys of 10,000 tokens of small scores, against attention on all of them: within 5 %
    (the pool's own scatter is 2 %).
    """
    law, head = es.Gaussian(eye(2, 0.5)), es.Head(eye(2, 0.7), eye(2))
    x = law.sample(3, torch.Generator().manual_seed(0))
    y = law.sample(10_000, torch.Generator().manual_seed(1))
    n = [40, 200]
    pool = es.exact_pool_curve(
        head.queries(x), head.keys(y), head.values(y), n, scale=1.0, keep="neyman"
    )
    np.testing.assert_allclose(
        es.exact_curve(head, law, x, n, keep="neyman").rms, pool.rms, rtol=0.05
    )


def test_neyman_without_end_is_refused_where_sizes_have_no_nodes() -> None:
    law, head = es.Sphere(3, 1.5), es.Head(eye(3), randn(2, 3))
    with pytest.raises(ValueError, match="neyman without end is not known for Sphere tokens"):
        es.exact_curve(head, law, randn(2, 3), [5, 50], keep="neyman")


@pytest.mark.parametrize("law", [es.Gaussian(eye(2)), es.Cube(2)], ids=["gaussian", "cube"])
def test_any_rule_on_a_law_by_contexts_drawn_from_it(law: es.Measure) -> None:
    """Places know nothing of tokens, so that they keep so many tokens as they come; every rule that
    keeps all of a context is attention on its tokens. Four standard errors.
    """
    head, x = es.Head(eye(2), randn(3, 2)), torch.tensor([[1.0, 0.5]]).double()
    plain = es.exact_curve(head, law, x, [16, 40])
    for rule, n, place in [
        ("sinks:4+recent", [16], 0),
        ("strided:3", None, 0),
        ("neyman", [40], 1),
        ("heavy", [40], 1),
    ]:
        found = es.exact_curve(head, law, x, n, keep=rule, context=40 if n else 46, seed=3)
        assert found.kind == "montecarlo"
        assert found.kept == pytest.approx([[16, 40][place]])
        assert abs(found.rms[0] - plain.rms[place]) < 4 * found.stderr[0]


@dataclass(frozen=True)
class Odd(es.keep.Ranked):
    """A rule from outside: keys of odd places first."""

    name: ClassVar[str] = "odd"
    size: int | None = None

    def order(self, context: es.keep.Context) -> torch.Tensor:
        return torch.arange(context.keys) % 2


def test_a_rule_from_outside_on_a_law() -> None:
    law, head, x = es.Gaussian(eye(2)), es.Head(eye(2), eye(2)), randn(2, 2)
    found = es.exact_curve(head, law, x, [8], keep=Odd(), context=16)
    assert abs(found.rms[0] - es.exact_curve(head, law, x, [8]).rms[0]) < 4 * found.stderr[0]


def test_a_law_of_queries_is_drawn() -> None:
    law, head = es.Gaussian(eye(2)), es.Head(eye(2), eye(2))
    curve = es.exact_curve(head, law, law, [8], keep="topk", context=64, draws=5, seed=2)
    x = law.sample(5, torch.Generator().manual_seed(2))
    rows = es.exact_curve(head, law, x, [8], keep="topk", context=64, seed=2)
    np.testing.assert_allclose(curve.rms, rows.rms, rtol=1e-12)
    assert curve.query_stderr[0] > 0


def test_corners() -> None:
    flat = es.Head(torch.zeros(2, 2).double(), torch.zeros(2, 2).double())
    law, x = es.Gaussian(eye(2)), randn(1, 2)
    assert es.exact_curve(flat, law, x, [4], keep="neyman").rms[0] == 0.0
    assert es.exact_curve(flat, law, x, [4], keep="neyman", context=9).rms[0] == 0.0
    assert es.exact_curve(flat, law, x, [4], keep="random", context=10).rms[0] == 0.0
    ladder = es.exact_curve(
        es.Head(eye(2), eye(2)), law, x, [4, 40], keep="topk", context=[64, 640]
    )
    assert ladder.kept == pytest.approx([4, 40])
    assert ladder.slope is None
    assert ladder.delta is None
    shared = es.exact_curve(
        es.Head(eye(2), eye(2)), law, x, [40], keep="topk+random:0.1", context=64
    )
    assert shared.kept == pytest.approx([42.4])  # chance comes on top, as in exact_pool_curve


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"keep": "sinks:4+recent"}, "expected how many tokens that has"),
        ({"keep": "neyman:shared"}, "expected how many tokens"),
        ({"keep": "topk"}, "expected how many tokens"),
        ({"keep": "topk:3+random"}, "expected how many tokens"),
        ({"context": 100}, "only a keep rule has one"),
        ({"keep": "topk", "context": 5}, "expected at most 5, the tokens of the context, got 10"),
        ({"keep": "topk:20+random", "context": 50}, "keeps 20 keys surely"),
        ({"keep": "random", "context": [50, 60]}, "or one for each of 1 n, got 2"),
        ({"keep": "random", "context": 0}, "context: expected whole numbers"),
        ({"keep": "random:0.5", "context": 50}, "every number of the rule is given"),
        ({"keep": "random:0.5", "n": None}, "without a number of their own"),
        ({"keep": "topk", "n": None, "context": 9}, "a part has no number of its own"),
        ({"keep": "best", "context": 50}, "no rule 'best'"),
    ],
)
def test_refusals(given: dict[str, object], word: str) -> None:
    usual = {
        "head": es.Head(eye(2), eye(2)),
        "measure": es.Gaussian(eye(2)),
        "queries": [[1.0, 0.0]],
        "n": [10],
    }
    with pytest.raises(ValueError, match=word):
        es.exact_curve(**(usual | given))  # type: ignore[arg-type]

"""converge against exact curves and known laws; its seeds; what it refuses. Seeds are fixed, so a
test that passes stays so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.integrate import dblquad

import esscher as es
from esscher.errors.montecarlo.converge import Plan, converge
from esscher.inputs import generator_for
from esscher.measures.rotational import Student


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def identity_head(d: int, horizon: float) -> es.Head:
    eye = torch.eye(d).double()
    return es.Head(horizon * eye, eye)


def gaussian(d: int) -> es.Gaussian:
    return es.Gaussian(torch.eye(d).double())


def test_l2_agrees_with_the_exact_curve_at_every_n_and_horizon() -> None:
    """Chi-square of 3 laws x 3 horizons x 3 n, independent draws: false alarm 0.001."""
    total, points = 0.0, 0
    for law in (gaussian(4), es.Sphere(3, 1.5), es.Ball(1, 2.0)):
        x = law.sample(5, torch.Generator().manual_seed(2))
        for horizon in (0.3, 0.7, 1.2):
            head = identity_head(law.dim, horizon)
            ladder = [4, 30, 250]
            curve = converge(
                head,
                law,
                ladder,
                100,
                "l2",
                queries=x,
                sampling="independent",
                experiment=f"{horizon}",
            )["l2"]
            exact = es.exact_curve(head, law, x, ladder)
            assert exact.kind == "exact"
            assert curve.scale == pytest.approx(exact.scale)
            total += float((((curve.rms - exact.rms) / curve.stderr) ** 2).sum())
            points += len(ladder)
    assert scipy.stats.chi2(points).sf(total) > 0.001
    assert scipy.stats.chi2(points).cdf(total) > 0.001  # nor are the standard errors too large


def test_moments_fall_at_rate_one_half_for_a_small_horizon() -> None:
    """Slopes -1/2 within 4 standard errors (false alarm 1e-4 each)."""
    curves = converge(identity_head(3, 0.1), gaussian(3), [100, 200, 400, 800], 60, ("mean", "cov"))
    for curve in curves.values():
        fit = es.fit_rate(curve)
        assert fit.stderr < 0.05
        assert abs(fit.exponent - 0.5) < 4 * fit.stderr, (curve.metric, str(fit))
        assert "closed form" in curve.origin


def test_nested_and_independent_prompts_have_one_law() -> None:
    """Four standard errors at each of 3 n, 4 metrics: false alarm below 0.001."""
    law, head, metrics = gaussian(3), identity_head(3, 0.8), ("mean", "cov", "l2")
    nested = converge(head, law, [10, 30, 90], 150, metrics, seed=1)
    apart = converge(head, law, [10, 30, 90], 150, metrics, seed=2, sampling="independent")
    for name in nested:
        gap = (nested[name].rms - apart[name].rms) / np.hypot(
            nested[name].stderr, apart[name].stderr
        )
        assert np.abs(gap).max() < 4.0, name
    assert (
        np.corrcoef(nested["l2"].samples[:, 1:].T)[0, 1]
        > 0.2
        > np.corrcoef(apart["l2"].samples[:, 1:].T)[0, 1]
    )
    assert "correlated" in nested["mean"].origin
    assert "afresh" in apart["mean"].origin


def test_a_curve_is_made_of_its_samples() -> None:
    curve = converge(identity_head(2, 0.5), gaussian(2), [5, 20], 30, "mean")["mean"]
    assert (curve.kind, curve.metric, curve.samples.shape) == ("montecarlo", "mean", (30, 2))
    assert curve.rms == pytest.approx(np.sqrt(curve.samples.mean(0)))
    half = [np.sqrt(np.delete(curve.samples, i, axis=0).mean(0)) for i in range(30)]  # jackknife
    jackknife = np.sqrt(29 / 30 * ((np.array(half) - np.mean(half, axis=0)) ** 2).sum(0))
    assert curve.stderr == pytest.approx(jackknife, rel=0.1)
    assert curve.q95 == pytest.approx(np.sqrt(np.quantile(curve.samples, 0.95, axis=0)))
    assert curve.scale == pytest.approx(0.5 * np.sqrt(2))
    assert "30 repeats" in curve.origin
    assert list(curve.to_frame()["n"]) == [5, 20]


ALL = ("mean", "cov", "l2", "uniform")


@pytest.mark.parametrize("sampling", ["nested", "independent"])
def test_any_split_order_and_choice_of_metrics_gives_the_same_numbers(sampling: str) -> None:
    head, law = identity_head(2, 0.6), gaussian(2)
    whole = converge(head, law, [6, 17], 5, ALL, seed=3, sampling=sampling)
    made = Plan(head, law, [6, 17], ALL, 3, sampling=sampling)
    again = Plan(head, law, [6, 17], ALL, 3, sampling=sampling)
    units = {number: (again if number % 2 else made).repeat(number) for number in (4, 1, 3, 0, 2)}
    for name, curve in again.curves(units).items():
        assert np.array_equal(curve.samples, whole[name].samples), name
        assert np.array_equal(curve.rms, whole[name].rms)
        assert curve.origin == whole[name].origin
    alone = converge(head, law, [6, 17], 3, "l2", seed=3, sampling=sampling)["l2"]
    assert np.array_equal(alone.samples, whole["l2"].samples[:3])


def test_independent_numbers_of_one_n_do_not_depend_on_the_ladder() -> None:
    head, law = identity_head(2, 0.6), gaussian(2)
    long = converge(head, law, [6, 17, 40], 3, ALL, sampling="independent")
    short = converge(head, law, [17], 3, ALL, sampling="independent")
    for name, curve in short.items():
        assert np.array_equal(curve.samples[:, 0], long[name].samples[:, 1]), name


def test_seeds_are_named_and_distinct() -> None:
    keys = [
        ("a", 0, "nested", 1, "tokens"),
        ("a", 0, 1, 1, "tokens"),
        ("a", 0, "1", 1, "tokens"),
        ("b", 0, 1, 1, "tokens"),
    ]
    keys += [
        ("a", 1, 1, 1, "tokens"),
        ("a", 0, 1, 2, "tokens"),
        ("a", 0, 1, 1, "queries"),
        ("a", 0, 11, "tokens"),
    ]
    seeds = [generator_for(*key).initial_seed() for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [generator_for(*key).initial_seed() for key in keys]
    # the number itself is part of the contract: stored runs must come out again
    assert seeds[0] == FIRST_SEED


FIRST_SEED = 14433407448849098503


def test_repeats_of_two_seeds_and_experiments_differ() -> None:
    def samples(**options: object) -> np.ndarray:
        return converge(identity_head(2, 0.5), gaussian(2), [9], 2, "mean", **options)[
            "mean"
        ].samples  # type: ignore[arg-type]

    base = samples()
    assert not np.array_equal(base, samples(seed=1))
    assert not np.array_equal(base, samples(experiment="other"))
    assert base[0, 0] != base[1, 0]


def test_float32_measures_the_same() -> None:
    head, law = identity_head(5, 0.5), gaussian(5)
    double = converge(head, law, [50, 200], 4, ALL, dtype=torch.float64)
    single = converge(head, law, [50, 200], 4, ALL, dtype=torch.float32)
    for name in double:
        assert single[name].rms == pytest.approx(double[name].rms, rel=1e-4), name
    assert 1e-8 < single["mean"].accuracy < 1e-4
    assert double["mean"].accuracy < 1e-12


def test_the_precision_is_the_one_the_error_needs() -> None:
    """float32 where the noise of sampling is a thousand times its rounding: the same curve to 1e-4,
    at any of these.
    """
    head, law = es.Head(torch.eye(3) / 2, torch.eye(3)), es.Gaussian(torch.eye(3))
    usual = converge(head, law, [50, 2000], 4, ("mean", "cov", "l2"))
    double = converge(head, law, [50, 2000], 4, ("mean", "cov", "l2"), dtype=torch.float64)
    for name, curve in usual.items():
        assert "4 repeats in float32" in curve.origin
        assert "4 repeats in float64" in double[name].origin
        assert curve.rms == pytest.approx(double[name].rms, rel=1e-4), name
        assert (np.abs(curve.rms - double[name].rms) < 1e-3 * double[name].stderr).all()
    far = es.Gaussian(1e-6 * torch.eye(3, dtype=torch.float64), [10.0, 0.0, 0.0])
    assert "in float64" in converge(head, far, [50, 200], 2, "l2")["l2"].origin


def test_hardmax_on_the_line_agrees_with_quadrature() -> None:
    """E|mean| within 4 standard errors of integrals over order statistics at n = 30 .. 3000, both
    signs of A (false alarm below 0.001).
    """
    by_quadrature = {
        1.0: [0.89811762, 0.51919492, 0.37641664],
        -1.0: [0.71805918, 0.48790369, 0.37200784],
    }
    for sign, exact in by_quadrature.items():
        head = es.Head([[sign]], [[1.0]])
        curve = converge(head, es.Gaussian([[4.0]]), [30, 300, 3000], 1500, "hardmax", seed=5)[
            "hardmax"
        ]
        sizes = np.sqrt(curve.samples)
        found, error = sizes.mean(0), sizes.std(0, ddof=1) / np.sqrt(1500)
        assert np.abs((found - exact) / error).max() < 4.0
        assert (curve.rms >= found).all()


def test_hardmax_of_two_tokens_in_three_dimensions() -> None:
    """E|mean output|^2 within 4 standard errors of its integral (false alarm below 0.001). Both
    tokens take themselves, unless <y_1, y_2> > |y_1|^2, r and a y_2's part along y_1: then both
    take y_2.
    """
    switched, _ = dblquad(
        lambda a, r: (
            scipy.stats.norm.pdf(a)
            * scipy.stats.chi.pdf(r, 3)
            * (a * a + 2 - ((r + a) ** 2 + 2) / 4)
        ),
        *(0, np.inf),
        *(lambda r: r, np.inf),
    )
    head = es.Head(torch.eye(3).double(), 2 * torch.eye(3).double())
    curve = converge(head, gaussian(3), [1, 2], 4000, "hardmax", seed=3)["hardmax"]
    squared = curve.samples / 4
    error = squared.std(0, ddof=1) / np.sqrt(len(squared))
    assert np.abs((squared.mean(0) - [3.0, 1.5 + 2 * switched]) / error).max() < 4.0


def test_tokens_of_a_pool_are_drawn_with_replacement() -> None:
    """Within 4 standard errors of the exact curve."""
    pool, n = es.Pool(randn(64, 2)), [8, 32, 48]
    head, x = identity_head(2, 0.2), randn(3, 2, seed=1)
    drawn = converge(head, pool, n, 250, "l2", queries=x)["l2"]
    q, k, v = head.queries(x), head.keys(pool.tokens), head.values(pool.tokens)
    exact = es.exact_pool_curve(q, k, v, n, scale=1.0)
    assert np.abs((drawn.rms - exact.rms) / drawn.stderr).max() < 4.0


def test_ladder_stops_where_the_error_of_the_limit_shows() -> None:
    """Cube in two dimensions: its push-forward is sampled, with its own error."""
    law, head, ladder = es.Cube(2), identity_head(2, 0.4), [8, 64, 512]
    made = Plan(head, law, ladder, ("mean", "l2"))
    own = made.pushforward.mean_error
    assert made.pushforward.method == "sampled"
    curves = converge(head, law, ladder, 6, ("mean", "l2"))
    assert 0.0 < curves["mean"].accuracy < 0.2
    assert curves["mean"].accuracy == pytest.approx(own / curves["mean"].rms[-1], rel=0.01)
    assert f"sampled, own error {own:.2g}" in curves["mean"].origin
    assert curves["l2"].n.tolist() == ladder

    vars(made)["pushforward"] = replace(
        made.pushforward, mean_error=0.21 * float(curves["mean"].rms[1])
    )
    cut = made.curves({number: made.repeat(number) for number in range(6)})["mean"]
    assert cut.n.tolist() == [8]
    assert "left out n = 64, 512" in cut.origin
    assert cut.samples.shape == (6, 1)
    vars(made)["pushforward"] = replace(made.pushforward, mean_error=100.0)
    none = made.curves({number: made.repeat(number) for number in range(2)})["mean"]
    assert none.n.size == none.rms.size == none.stderr.size == 0


def test_student_tokens_are_refused_with_the_reason_unless_nothing_is_tilted() -> None:
    law = Student(2, 5)
    for metrics in ("mean", "l2", "uniform"):
        with pytest.raises(
            ValueError, match=f"metrics: {metrics} compare with attention's limit.*infinite"
        ):
            converge(identity_head(2, 0.5), law, [10, 20], 3, metrics)
    with pytest.raises(
        ValueError, match=r"hardmax limit: Student has unbounded support|Student has no limit there"
    ):
        converge(identity_head(2, 0.5), law, [10, 20], 3, "hardmax")
    flat = es.Head(torch.zeros(2, 2).double(), torch.eye(2).double())
    # the plain mean of n tokens of covariance 5/3 I
    curve = converge(flat, law, [100, 400], 300, "l2")["l2"]
    assert np.abs(curve.rms - np.sqrt(2 * 5 / 3 / curve.n)).max() < 4 * curve.stderr.max()


HEAD, LAW = identity_head(2, 0.5), gaussian(2)
WIDE = es.Head(randn(2, 3), torch.eye(2).double())
BAD = [
    (
        {"metrics": ("mean", "covariance")},
        "metrics: expected some of mean, cov, l2, uniform, hardmax.*'covar",
    ),
    ({"metrics": ()}, "metrics: expected some of"),
    ({"metrics": ("l2", "l2")}, "metrics: expected some of"),
    (
        {"metrics": "hardmax", "measure": es.Gaussian(torch.eye(2), [1.0, 0.0])},
        "hardmax on Gaussian tokens needs mean 0",
    ),
    ({"n": [10, 10]}, "n: expected increasing"),
    ({"n": [20, 10]}, "n: expected increasing"),
    ({"n": [0, 10]}, "n: expected whole numbers"),
    ({"repeats": 0}, "repeats: expected whole numbers"),
    ({"repeats": 1}, "repeats: expected at least 2"),
    ({"repeats": "many"}, "repeats: expected whole numbers"),
    ({"sampling": "sobol"}, "sampling: expected one of nested, independent, got 'sobol'"),
    ({"dtype": torch.float16}, "dtype: expected torch.float32 or torch.float64, got torch.float16"),
    ({"seed": 1.5}, "seed: expected a whole number"),
    ({"radius": -1.0}, "radius: expected a finite number above 0"),
    ({"queries": randn(4, 3)}, "queries: expected rows of length 2"),
    ({"queries": randn(0, 2)}, "queries: expected at least one row"),
    ({"queries": [[1.0, 2.0], [3.0]]}, "queries: "),
    ({"queries": 0}, "queries: expected whole numbers"),
    ({"measure": gaussian(3)}, "head and measure"),
    (
        {"measure": es.Laplace(2, 1.0)},
        "metrics: .*missing: theta: E exp<theta, y> is infinite .*Laplace has no limit there",
    ),
    ({"head": WIDE}, "metrics: expected none of self-attention's"),
    ({"head": WIDE, "metrics": "l2"}, "queries: expected rows of length 3, got None"),
    ({"head": WIDE, "metrics": "uniform"}, "radius: expected a number above 0, got None"),
    (
        {"head": WIDE, "metrics": "l2", "queries": randn(2, 3), "query_inside": True},
        "query_inside: expected False",
    ),
    ({"metrics": "uniform", "query_inside": True}, "query_inside: expected False for uniform"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_bad_input_is_refused_naming_the_field(change: dict[str, object], message: str) -> None:
    call: dict[str, object] = {"head": HEAD, "measure": LAW, "n": [10, 20], "repeats": 2, **change}
    with pytest.raises(ValueError, match=message):
        converge(**call)  # type: ignore[arg-type]


def test_given_queries_of_another_dimension_work() -> None:
    curves = converge(WIDE, LAW, [10, 20], 3, ("l2", "uniform"), queries=randn(2, 3), radius=0.5)
    assert set(curves) == {"l2", "uniform"}

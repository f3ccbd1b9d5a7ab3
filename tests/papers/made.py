"""Made-up tables in which each claim is true, and in which it is false, to try its rule on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from esscher.papers.claim import Tables
from esscher.papers.claims_heads import MIXED, MOMENTS, OUTPUT, SHARED, WINDOW
from esscher.papers.claims_icl import COVARIANCES, MODELS, NOISE
from esscher.theory.bohbot import hardmax_mean_abs_asymptotic
from esscher.theory.sharp import l2_exponent_rms

TRAINED = (10, 100, 1000)


def grid(**values: Any) -> pd.DataFrame:
    """A table with a row for each combination of values; a single value stands for itself."""
    lists = [[one] if isinstance(one, str | int | float) else [*one] for one in values.values()]
    return pd.MultiIndex.from_product(lists, names=[*values]).to_frame(index=False)


def made_errors(
    exponents: Mapping[tuple[int, str], float], seed: int, repeats: int = 60
) -> pd.DataFrame:
    """Squared errors with root mean square n^-exponent for each (point, metric), as ``esscher
    converge`` stores them. Repeats spread like chi-squared with 8 degrees of freedom.
    """
    rng = np.random.default_rng(seed)
    ladder = (1000, 2000, 4000, 8000, 16000, 32000)
    parts = []
    for (point, metric), power in exponents.items():
        own = grid(point=point, metric=metric, repeat=range(repeats), n=ladder)
        spread = rng.chisquare(8, len(own)) / 8
        parts.append(own.assign(squared=own["n"] ** (-2.0 * power) * spread, limit_squared=1.0))
    return pd.concat(parts, ignore_index=True)


def made_sweep(exponents: tuple[float, float], seed: int) -> Tables:
    """Two points, at low and at high coupling, whose errors fall with these exponents."""
    metrics = ("mean", "cov")
    rows = grid(point=(0, 1), metric=metrics)
    rows["coupling"] = rows["point"].map({0: 0.001, 1: 10.0})
    rows["bohbot"] = rows["point"].map({0: 0.49, 1: 0.3})
    rows["bohbot_experimental"] = rows["point"].map({0: 0.5, 1: 0.4})
    chosen = {(point, metric): exponents[point] for point in (0, 1) for metric in metrics}
    return {"sweep": {"rates": rows, "errors": made_errors(chosen, seed, repeats=200)}}


def made_ablation(exponents: tuple[float, ...], seed: int) -> Tables:
    """Errors of one law, and 72 heads whose exponents fall as much."""
    rng = np.random.default_rng(seed)
    chosen = {(point, "mean"): power for point, power in enumerate(exponents)}
    rows = grid(point=range(len(exponents)), metric="mean")
    scales = [
        made_heads(72)
        .drop(columns="status")
        .assign(scale=point, beta_fit=rng.normal(power, 0.01, 72))
        for point, power in enumerate(exponents)
    ]
    rates = rows.assign(coupling=10.0 ** rows["point"])
    own = {"rates": rates, "errors": made_errors(chosen, seed)}
    return {"ablation": own, "heads": {"scales": pd.concat(scales)}}


def made_uniform(growth: float, seed: int) -> Tables:
    """Uniform errors with exponent 1/2, and constants like exp(growth R^2), like (1 + R)^2 where it
    is 0.
    """
    radius = np.arange(0.5, 6.1, 0.5)
    constant = np.exp(growth * radius**2) if growth else (1 + radius) ** 2
    edge = pd.DataFrame({"radius": radius, "n": 1e15, "rms": constant / math.sqrt(1e15)})
    errors = made_errors({(point, "uniform"): 0.5 for point in range(3)}, seed)
    rates = pd.DataFrame({"point": [0, 1, 2], "value": [0.5, 1.0, 1.5]})
    return {"balls": {"errors": errors, "rates": rates}, "edge": {"evidence": edge}}


def made_support(growth: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = grid(square=range(1, 6), what=("uniform", "mean"), n=(10.0, 1e3, 1e5))
    uniform, mean = np.exp(growth * rows["square"]), np.sqrt(rows["square"])
    size = np.where(rows["what"] == "uniform", uniform, mean) * rng.uniform(0.99, 1, len(rows))
    return {"supports": {"evidence": rows.assign(rms=size / np.sqrt(rows["n"]))}}


def made_hardmax(power: float, seed: int) -> Tables:
    """Absolute means that follow the asymptote times n^-power."""
    rng = np.random.default_rng(seed)
    rows = grid(n=(100, 316, 1000, 3162, 10000, 31623, 100000), repeat=range(400))
    size = hardmax_mean_abs_asymptotic(rows["n"].to_numpy()) * (rows["n"] / 100) ** -power
    return {"hardmax": {"errors": rows.assign(squared=(size * rng.gamma(4, 0.25, len(rows))) ** 2)}}


def made_draws(case: tuple[float, float], seed: int) -> Tables:
    """Errors that follow Student's law with some degrees of freedom, of variance 1 in each of two
    coordinates; and n times a bound.
    """
    freedom, bound = case
    rng = np.random.default_rng(seed)
    rows = grid(law="made", n=(100, 10_000), prompt=range(8000)).drop(columns="prompt")
    scale = np.sqrt(freedom / rng.chisquare(freedom, (len(rows), 1)))
    error = rng.standard_normal((len(rows), 2)) * scale
    size = (error**2).sum(axis=1)
    rows = rows.assign(bound=bound / rows["n"], squared=size / rows["n"], size=size, own_size=size)
    return {"draws": {"evidence": rows.assign(coordinate=error[:, 0])}}


def made_slopes(shift: float, seed: int) -> Tables:
    """Errors whose slopes are this far, about, from the exponents."""
    rng = np.random.default_rng(seed)
    rows = grid(dim=1, horizon=(0.5, 1.0, 2.0), n=[10.0**power for power in range(2, 16)])
    sharp = {h: l2_exponent_rms(h) + shift * rng.uniform(0.8, 1) for h in (0.5, 1.0, 2.0)}
    return {"slopes": {"evidence": rows.assign(rms=rows["n"] ** -rows["horizon"].map(sharp))}}


def made_heads(count: int) -> pd.DataFrame:
    """A table of measured heads, 12 in each layer."""
    place = np.arange(count)
    return pd.DataFrame({"layer": place // 12, "head": place % 12, "status": "ok"})


def made_prose(ends: tuple[float, float, float, float], seed: int) -> Tables:
    """72 heads of rising coupling. Exponents of the mean go from the first number to the second,
    those of the covariance from the third to the fourth.
    """
    rng = np.random.default_rng(seed)
    coupling = np.geomspace(0.1, 100, 72)
    heads = made_heads(72).assign(coupling=coupling, beta_paper=0.5 / (1 + 32 * coupling))
    for column, first in {"beta_mean": 0, "beta_cov": 2, "beta_fit": 0}.items():
        heads[column] = np.linspace(ends[first], ends[first + 1], 72) + rng.normal(0, 0.01, 72)
    for column in MOMENTS:
        heads[f"{column}_low"], heads[f"{column}_high"] = heads[column] - 0.02, heads[column] + 0.02
    return {"prose": {"heads": heads}}


def made_references(moves: float, seed: int) -> Tables:
    """Half of the exponents differ by so much."""
    small = np.random.default_rng(seed).normal(0.4, 0.05, 72)
    moved = small + np.where(np.arange(72) % 2, moves, 0.0)
    tables: dict[str, Any] = {}
    for n, exponents in {"4096": small, "16384": moved}.items():
        heads = made_heads(72).assign(beta_fit=exponents)
        for column in MOMENTS:
            ends = {f"{column}_low": exponents - 0.02, f"{column}_high": exponents + 0.02}
            heads = heads.assign(**{column: exponents}, **ends)
        tables[n] = {"heads": heads}
    return tables


def made_tails(coordinate: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    layers = pd.DataFrame({"layer": np.arange(6)})
    for kind, size in (("norm", -0.1), ("coordinate", coordinate)):
        ratio = rng.normal(size, 0.005, 6)
        tail = "Pareto" if size > 0 else "Gaussian"
        layers[f"{kind}_ratio"], layers[f"{kind}_tail"] = ratio, tail
        layers[f"{kind}_ratio_low"], layers[f"{kind}_ratio_high"] = ratio - 0.01, ratio + 0.01
    return {"prose": {"layers": layers}}


def made_domains(noise: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    own = rng.normal(0.4, 0.05, 72)
    return {
        domain: {"heads": made_heads(72).assign(beta_fit=own + rng.normal(0, 0.05 * noise, 72))}
        for domain in ("prose", "code", "legal")
    }


def made_probe(ends: tuple[float, float], seed: int) -> Tables:
    """90 heads of rising coupling, exponents from one end to the other, that fall by 0.2 with the
    scale of the scores.
    """
    rng = np.random.default_rng(seed)
    exponent = np.linspace(*ends, 90) + rng.normal(0, 0.02, 90)
    heads = made_heads(90).assign(coupling=np.geomspace(1, 1000, 90), beta_fit=exponent)
    scaled = heads.assign(scale=2.0, beta_fit=exponent - 0.2 + rng.normal(0, 0.02, 90))
    scales = pd.concat([heads.assign(scale=0.25), scaled]).drop(columns="status")
    return {"probe": {"heads": heads, "scales": scales}}


def made_critical(noise: tuple[float, float], seed: int) -> Tables:
    """Exponents told by critical scale and coupling, each with so much noise."""
    rng = np.random.default_rng(seed)
    critical, coupling = noise
    own = rng.normal(0.4, 0.05, 90)
    heads = made_heads(90).assign(beta_fit=own)
    heads["critical_scale"] = np.exp(own + 0.05 * critical * rng.standard_normal(90))
    heads["coupling"] = np.exp(-own - 0.05 * coupling * rng.standard_normal(90))
    return {"minilm": {"heads": heads}, "smollm2": {"heads": heads}}


def made_neyman(case: tuple[float, float], seed: int) -> Tables:
    """Two horizons; random keys are slow, Neyman's have an exponent at the second; and the spread
    of the tilted law.
    """
    power, spread = case
    chosen = {(0, "neyman"): 0.5, (1, "neyman"): power, (0, "random"): 0.5, (1, "random"): 0.2}
    errors = made_errors(chosen, seed, repeats=200).assign(law="signs", spread=spread)
    errors["horizon"] = errors["point"].map({0: 0.5, 1: 4.0})
    return {"neyman": {"evidence": errors.drop(columns=["point", "limit_squared"])}}


# error at a tenth of the keys, exponent
NEAREST = {"random": (1.0, 0.35), WINDOW: (0.6, 0.2)}
CHOSEN = {"topk": (0.3, 0.6), "neyman": (0.2, 0.9)}


def made_windows(errors: dict[str, tuple[float, float]], seed: int) -> Tables:
    """Frontiers of 60 heads: each rule's error at a tenth of 400 keys, and its exponent."""
    rng = np.random.default_rng(seed)
    parts = []
    for rule, (size, power) in errors.items():
        own = grid(layer=range(5), head=range(12), rule=rule, share=(0.05, 0.1, 0.25))
        sizes, powers = rng.normal([np.log(size), power], 0.05, (60, 2)).repeat(3, axis=0).T
        error = np.exp(sizes) * (own["share"] / 0.1) ** -powers
        parts.append(own.assign(kept=400 * own["share"], rms=error, relative=error))
    return {"windows": {"frontier": pd.concat(parts, ignore_index=True)}}


def made_together(ratio: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = grid(text=(0, 1), layer=range(12), subset=SHARED)
    rows["independent"] = rng.uniform(0.1, 0.5, 24)
    rows["exact"] = rows["independent"] * ratio * np.exp(rng.normal(0, 0.03, 24))
    return {"together": {"together": rows}}


def made_depth(final: float, seed: int) -> Tables:
    """Layers with exponent 0.35, and final errors of two rules, the second with another."""
    rng = np.random.default_rng(seed)
    draws = grid(rule=("heavy", "random"), text=range(10), keep=(0.1, 0.2, 0.4), metric="error")
    slopes = rng.normal(np.repeat([0.35, final], 10), 0.02).repeat(3)
    draws = draws.assign(kept=256 * draws["keep"], value=draws["keep"] ** -slopes)
    layers = grid(rule=("heavy", "random"), layer=[OUTPUT, *map(str, range(30))])
    layers["exponent"] = rng.normal(0.35, 0.05, len(layers))
    return {"depth": {"draws": draws, "depth": layers}}


def made_embeddings(slope: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    draws = grid(text=range(300), metric="cosine").assign(horizon=rng.uniform(1, 2, 300))
    draws["value"] = 0.7 + slope * draws["horizon"] + rng.normal(0, 0.03, 300)
    return {"embeddings": {"draws": draws}}


def made_limit(slope: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = grid(mean=0.0, rank=4, repeat=range(40))
    rows = rows.assign(slope=rng.normal(slope, 0.02, 40), spread=rng.normal(1, 0.05, 40))
    return {"long": {"evidence": rows}}


def made_concentration(case: tuple[float, float], seed: int) -> Tables:
    """Differences that fall with an exponent, and flat bounds."""
    power, bound = case
    rng = np.random.default_rng(seed)
    names = {"output": "s-16-mended", "gradient_U": "s-gradient-u", "gradient_V": "s-gradient-v"}
    places = {"covariance": COVARIANCES, "n": (10, 100, 1000, 10_000)}
    errors = grid(**places, against=("linear", "limit"), metric=names, repeat=range(32))
    spread = rng.chisquare(40, len(errors)) / 40
    errors["squared"] = errors["n"] ** (-2.0 * power) * spread
    exact = grid(**places, against="linear")
    exact["error"] = exact["n"] ** -power
    bounds = grid(**places, metric=names, rms=bound, exponent=0.01)
    bounds["name"] = bounds["metric"].map(names)
    return {"concentration": {"errors": errors, "exact": exact, "bounds": bounds}}


def made_conventions(power: float, seed: int) -> Tables:
    outer, inner = ({(point, "l2"): value for point in range(2)} for value in (0.5, power))
    return {
        "outside": {"errors": made_errors(outer, seed, repeats=200)},
        "inside": {"errors": made_errors(inner, seed + 1, repeats=200)},
    }


def made_ends(distance: float, seed: int) -> Tables:
    """Flows that end about this far from the limit."""
    rng = np.random.default_rng(seed)
    ends = grid(what="ends", case=range(8))
    ends["distance"], ends["moved"] = distance * rng.uniform(0.5, 1, 8), rng.uniform(0.3, 1, 8)
    return {"flows": {"evidence": ends}}


def made_risks(power: float, seed: int) -> Tables:
    """Flows that end at the limit, and risks that fall like L^-power."""
    ends = made_ends(1e-6, seed)["flows"]["evidence"]
    risks = grid(what="risks", dim=3, case=(0, 1), length=(1e2, 1e3, 1e4, 1e5), zero=1.5)
    risks["risk"] = np.random.default_rng(seed).uniform(1, 2, 8) * risks["length"] ** -power
    return {"flows": {"evidence": pd.concat([ends, risks], ignore_index=True)}}


def made_training(errors: tuple[float, float], seed: int) -> Tables:
    """Errors above the noise of (softmax, linear) at L = 10, falling like 1/L; trainings arrive but
    for their noise.
    """
    rng = np.random.default_rng(seed)
    size = {**dict(zip(MODELS, errors, strict=True)), "bayes": 0.01}
    flow = grid(covariance=COVARIANCES, length=(*TRAINED, 100_000), model=size)
    flow["mse"] = NOISE + 10 * flow["model"].map(size) / flow["length"]
    final = grid(covariance=COVARIANCES, length=TRAINED, seed=range(20), model=MODELS, stderr=1e-5)
    exact = NOISE + 10 * final["model"].map(size) / final["length"]
    final["mse"] = exact + rng.normal(0, 1e-5, len(final))
    return {"flow": {"final": flow}, "training": {"final": final}}


def made_flows(case: tuple[float, str], seed: int) -> Tables:
    """Squared distances like L^-falls, and a model that is stuck at a third of the starts."""
    falls, stuck = case
    rng = np.random.default_rng(seed)
    places = {"covariance": COVARIANCES, "length": TRAINED, "seed": range(60)}
    flows = grid(**places, model=MODELS)
    lost = (flows["model"] == stuck) & (flows["seed"] % 3 == 0)
    flows["status"] = np.where(lost, "stuck", "ok")
    distance = grid(**places, time=(10.0, 1000.0))
    size = distance["length"] ** -falls * rng.uniform(0.8, 1.2, len(distance))
    distance["weights2"] = np.where(distance["time"] == 10.0, 0.1, 1.0) * size
    return {"flows": {"flows": flows, "distance": distance}}


def made_ratio(ratio: float, seed: int) -> Tables:
    """Errors above the noise that are so many times larger for the anisotropic covariance."""
    rng = np.random.default_rng(seed)
    flow = grid(covariance=COVARIANCES, length=TRAINED, model=(*MODELS, "bayes"))
    size = np.where(flow["covariance"] == "isotropic", 1.0, ratio) * rng.uniform(1, 1.01, len(flow))
    return {"flow": {"final": flow.assign(mse=NOISE + size / flow["length"])}}


def made_hardmax_beyond(case: tuple[float, float], seed: int) -> Tables:
    """Exponents of a law, and of heads, between 1000 and 32,000 tokens."""
    law, own = case
    exponents = np.random.default_rng(seed).normal(own, 0.01, 72)
    heads = made_heads(72).drop(columns="status").assign(first=64, last=1024, beta_mean=exponents)
    heads = heads.assign(beta_mean_low=exponents - 0.01, beta_mean_high=exponents + 0.01)
    errors = made_errors({(0, "hardmax"): law}, seed, repeats=200)
    return {"d = 2": {"errors": errors}, "heads": {"evidence": heads}}


MADE: dict[str, Any] = {
    "b-1-sub-parametric": (made_sweep, (0.5, 0.3), (0.5, 0.55)),
    "b-2-proved-rate": (made_sweep, (0.5, 0.4), (0.5, 0.28)),
    "b-37-equality": (made_sweep, (0.5, 0.4), (0.5, 0.3)),
    "b-3-falls-with-scale": (made_ablation, (0.5, 0.4, 0.2), (0.5, 0.5, 0.5)),
    "b-4-uniform": (made_uniform, 0.25, 0.55),
    "b-5-support": (made_support, 1.0, 0.1),
    "b-6-hardmax": (made_hardmax, 0.0, 0.3),
    "t-28-normality": (made_draws, (1e6, 3.0), (1.0, 3.0)),
    "t-29-variance": (made_draws, (1e6, 3.0), (1e6, 1.0)),
    "t-30-chi-squared": (made_draws, (1e6, 3.0), (1.0, 3.0)),
    "o-32-sharp": (made_slopes, 0.01, -0.05),
    "b-7-heads": (made_prose, (0.48, 0.2, 0.48, 0.2), (0.48, 0.2, 0.65, 0.55)),
    "b-8-critical-path": (made_prose, (0.5, 0.3, 0.6, 0.4), (0.5, 0.502, 0.6, 0.602)),
    "b-9-references": (made_references, 0.01, 0.15),
    "b-10-tails": (made_tails, -0.05, 0.05),
    "b-12-domains": (made_domains, 0.1, 3.0),
    "o-36-language-model": (made_probe, (0.48, 0.3), (0.3, 0.48)),
    "o-34-neyman": (made_neyman, (0.5, 1.0), (0.5, 0.3)),
    "b-13-sparse-rates": (
        made_windows,
        {**NEAREST, **CHOSEN},
        {**NEAREST, **CHOSEN, WINDOW: (0.6, 0.5)},
    ),
    "b-15-window-and-random": (
        made_windows,
        {**NEAREST, MIXED: (0.4, 0.4)},
        {**NEAREST, MIXED: (0.8, 0.4)},
    ),
    "b-11-heads-together": (made_together, 1.0, 0.6),
    "b-14-depth": (made_depth, 0.35, 0.6),
    "b-16-downstream-horizon": (made_embeddings, -0.15, 0.05),
    "s-17-limit": (made_limit, 1.0, 1.1),
    "s-18-outputs": (made_concentration, (0.5, 100.0), (0.1, 0.2)),
    "s-19-gradients": (made_concentration, (0.5, 100.0), (0.1, 0.2)),
    "s-20-near-linear": (made_concentration, (0.5, 100.0), (0.05, 100.0)),
    "s-26-query-inside": (made_conventions, 0.5, 0.35),
    "s-24-finite-linear": (made_ends, 1e-6, 0.2),
    "s-25-singular": (made_ends, 1e-6, 0.2),
    "s-23-bayes": (made_risks, 1.0, 0.1),
    "s-21-risks": (made_training, (0.6, 0.4), (0.4, 0.6)),
    "s-38-anisotropic": (made_ratio, 1.2, 1.0),
    "b-39-hardmax-beyond": (made_hardmax_beyond, (0.06, 0.1), (0.2, 0.1)),
    "o-40-critical-scale": (made_critical, (0.2, 3.0), (3.0, 0.2)),
    "s-22-distance": (made_flows, (1.0, ""), (-0.5, "")),
    "s-27-stability": (made_flows, (1.0, "linear"), (1.0, "softmax")),
}


def made_true(name: str, seed: int) -> Tables:
    """Tables in which the claim is true."""
    made, true, _ = MADE[name]
    found: Tables = made(true, seed)
    return found


def made_false(name: str, seed: int) -> Tables:
    made, _, false = MADE[name]
    found: Tables = made(false, seed)
    return found

"""Keys that are kept, and what the model loses: the exact error of keep rules, the rates of sparse
variants, heads of a layer together, depth, single heads against the output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from esscher.errors.pool_curve import exact_pool_curve
from esscher.intervals import Interval
from esscher.keep import parse
from esscher.keep.context import Context
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.rules import above, below, decided, exponent, grid, inside, line, need, points

# ---- 33: the exact error of a rule against drawn sets of keys


def measure_rule(
    rule: str, keys: int, kept: int, pools: int, draws: int, rng: np.random.Generator
) -> Rows:
    """The error by the formula, and its mean over sets of keys drawn by the rule, for pools of
    Gaussian keys and values with three queries each.
    """
    rows = []
    for pool in range(pools):
        shapes = ((3, 4), (keys, 4), (keys, 3))
        q, k, v = (torch.from_numpy(rng.standard_normal(shape)) for shape in shapes)
        exact = exact_pool_curve(q, k, v, [kept], scale=1.0, keep=rule).rms[0] ** 2
        squares = drawn_squares(Context.of(q, k, v, 1.0), rule, kept, draws, rng)
        drawn = {"drawn": squares.mean(), "stderr": squares.std() / draws**0.5}
        rows.append({"rule": rule, "pool": pool, "exact": exact, **drawn})
    return rows


def drawn_squares(
    context: Context, rule: str, kept: int, draws: int, rng: np.random.Generator
) -> Any:
    """Squared errors of drawn sets of keys, mean over the queries. A set without keys counts as no
    error, as it does in the integral.
    """
    inclusion = parse(rule).include(context, kept)
    chance = inclusion.probability.numpy()
    weight = 1.0 if inclusion.weight is None else inclusion.weight.numpy()
    e = np.exp(context.scores.numpy()) * weight  # (m, N)
    values = context.v.numpy()
    limit = context.attention.numpy() @ values
    found = np.zeros(draws)
    for i in range(len(e)):
        drawn = (rng.random((draws, e.shape[1])) < chance[i]) * e[i]
        total = drawn.sum(1, keepdims=True)
        output = drawn @ values / np.where(total > 0, total, 1.0)
        found += np.where(total[:, 0] > 0, np.square(output - limit[i]).sum(1), 0.0) / len(e)
    return found


def made_rules(off: float, seed: int) -> Tables:
    """Drawn errors that are ``off`` times the exact ones for one rule of two."""
    rng = np.random.default_rng(seed)
    rows = grid(rule=("random", "neyman"), pool=range(6)).assign(exact=0.1, stderr=0.001)
    ratio = np.where(rows["rule"] == "neyman", off, 1.0) + rng.normal(0, 0.01, len(rows))
    return {"rules": {"evidence": rows.assign(drawn=0.1 * ratio)}}


@claim("o-33-keep-rules", made_rules, 1.0, 1.2, measure_rule)
def keep_rules(tables: Tables, close: list[float]) -> Decision:
    ratios = {}
    for rule, own in tables["rules"]["evidence"].groupby("rule", sort=False):
        total = own["exact"].sum()
        ratio = float(own["drawn"].sum() / total)
        half = 3.29 * float(np.sqrt(np.square(own["stderr"]).sum()) / total)
        ratios[rule] = Interval(ratio, ratio - half, ratio + half)
    x = range(len(ratios))
    series = [points("drawn over exact", x, ratios.values()), line("1", x, 1.0)]
    return decided(
        need("drawn over exact mean squared error", ratios, inside, *close),
        picture=Picture(f"rule: {', '.join(ratios)}", "ratio of mean squared errors", series),
    )


# ---- 34: Neyman's keys on a law

DIM = 4


def measure_neyman(
    point: int, horizon: float, n: list[int], repeats: int, rng: np.random.Generator
) -> Rows:
    """Squared errors on n random keys, and on n keys drawn with density in proportion to e |c|
    times the law's and weighted by one over it. Tokens N(0, I), score horizon <x, y>, value y, a
    query x ~ N(0, I) for each repeat.
    """
    rows = []
    for repeat in range(repeats):
        theta = horizon * rng.standard_normal(DIM)
        tokens = rng.standard_normal((n[-1], DIM))
        direction = rng.standard_normal((n[-1], DIM))
        # |c| has density in proportion to |c| times that of a Gaussian's norm
        length = np.sqrt(rng.chisquare(DIM + 1, n[-1]))
        norms = np.linalg.norm(direction, axis=1, keepdims=True)
        chosen = theta + length[:, None] * direction / norms
        # log of e times the law over the proposal, constants dropped
        log_weight = chosen @ theta - np.square(chosen).sum(1) / 2
        log_weight = log_weight + np.square(length) / 2 - np.log(length)
        place = {"point": point, "horizon": horizon, "repeat": repeat}
        drawn = {"random": (tokens, tokens @ theta), "neyman": (chosen, log_weight)}
        for rule, (keys, scores) in drawn.items():
            weight = np.exp(scores - scores.max())
            total, summed = np.cumsum(weight), np.cumsum(weight[:, None] * keys, axis=0)
            for count in n:
                out = summed[count - 1] / max(total[count - 1], 1e-300)
                error = {"squared": float(np.square(out - theta).sum())}
                limit = {"limit_squared": float(theta @ theta)}
                rows.append({**place, "metric": rule, "n": count, **error, **limit})
    return rows


def made_neyman(second: float, seed: int) -> Tables:
    """Two horizons; random keys are slow at the second, Neyman's have this exponent."""
    chosen = {(0, "neyman"): 0.5, (1, "neyman"): second, (0, "random"): 0.5, (1, "random"): 0.2}
    errors = rules.made_errors(chosen, seed, repeats=200)
    return {"neyman": {"evidence": errors.assign(horizon=errors["point"].map({0: 0.5, 1: 4.0}))}}


@claim("o-34-neyman", made_neyman, 0.5, 0.3, measure_neyman)
def neyman(tables: Tables, flat: float) -> Decision:
    errors = tables["neyman"]["evidence"]
    x = errors.groupby("point")["horizon"].first()
    chosen, random = (
        {f"horizon {x[i]:g}": exponent(errors, rule, i) for i in x.index}
        for rule in ("neyman", "random")
    )
    last = errors[(errors["n"] == errors["n"].max()) & (errors["metric"] == "neyman")]
    sizes = np.sqrt(last.groupby("point")["squared"].mean())
    spread = float(sizes.max() / sizes.min())
    series = [
        points("Neyman's keys", x, chosen.values()),
        points("random keys", x, random.values()),
        line("1/2", x, 0.5),
    ]
    return decided(
        need("exponent of Neyman's keys", chosen, inside, 0.45, 0.55),
        need(f"largest over smallest error at n = {errors['n'].max()}", spread, below, flat),
        picture=Picture("horizon", "exponent", series, log="x"),
        note=f"random keys have {[*random.values()][-1].value:.3f} at the largest horizon",
    )


# ---- 13 and 15: sparse variants on every head of MiniLM: random keys; Longformer's window (the
# keys nearest to a query) with a global first token; BigBird's, with random keys beside; keys
# shared by the queries; keys of each query; the floor

WINDOW, MIXED = "sinks:1+recent", "sinks:1+recent:16+random:reweight"
NEAREST = {"random": (1.0, 0.35), WINDOW: (0.6, 0.2)}  # error at a tenth of the keys, exponent
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


@claim(
    "b-13-sparse-rates",
    made_windows,
    {**NEAREST, **CHOSEN},
    {**NEAREST, **CHOSEN, WINDOW: (0.6, 0.5)},
)
def sparse_rates(tables: Tables) -> Decision:
    """Compares b of error ~ keys^-b between rules, head by head, at 2 to 25 % of the keys."""
    frontier = tables["windows"]["frontier"]
    some = frontier[frontier["share"].between(0.02, 0.25) & (frontier["rms"] > 0)]
    fits = {
        place: -np.polyfit(np.log(own["kept"]), np.log(own["rms"]), 1)[0]
        for place, own in some.groupby(["layer", "head", "rule"], sort=False)
        if len(own) > 2
    }
    found = pd.Series(fits).unstack()
    shares = {}
    for rule in ("topk", "neyman", WINDOW):
        pair = found[[rule, "random"]].dropna()
        shares[rule] = rules.share_of((pair[rule] > pair["random"]).sum(), len(pair))
    told = ", ".join(f"{rule} {value:.2f}" for rule, value in found.median().sort_values().items())
    series = [points(rule, found["random"], found[rule]) for rule in shares]
    series.append(rules.diagonal("the same", found["random"]))
    nearest = shares.pop(WINDOW)
    return decided(
        need("share of heads in which it falls faster than random", shares, above, 0.5),
        need(f"the same, {WINDOW}", nearest, below, 0.5),
        picture=Picture("exponent of random keys", "exponent", series),
        note=f"median exponents over {len(found)} heads: {told}",
    )


@claim(
    "b-15-window-and-random",
    made_windows,
    {**NEAREST, MIXED: (0.4, 0.4)},
    {**NEAREST, MIXED: (0.8, 0.4)},
)
def window_and_random(tables: Tables) -> Decision:
    three, place = [MIXED, WINDOW, "random"], ["layer", "head", "share"]
    by_rule = tables["windows"]["frontier"].pivot(index=place, columns="rule", values="relative")
    better, told = {}, []
    for size, own in by_rule[three].dropna().groupby("share"):
        mixed, window, random = (own[rule] for rule in three)
        better[size] = rules.share_of(((mixed < window) & (mixed < random)).sum(), len(own))
        medians = " / ".join(f"{own[rule].median():.2f}" for rule in three)
        told.append(f"{size:.0%} {medians}")
    asked = {
        f"{size:.0%} of the keys": share
        for size, share in better.items()
        if any(np.isclose(size, (0.1, 0.25)))
    }
    x = [*better]
    series = [points("errs less than either", x, better.values())]
    series.append(line("half of the heads", x, 0.5))
    return decided(
        need("share of heads in which it errs less than either", asked, above, 0.5),
        picture=Picture("share of the keys kept", "share of heads", series, log="x"),
        note=f"median errors of both / window / random by keys kept: {', '.join(told)}",
    )


# ---- 11 and 35: heads of SmolLM2, together and one at a time

SHARED = "one for all heads"


def made_together(ratio: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    rows = grid(text=(0, 1), layer=range(12), subset=SHARED)
    rows["independent"] = rng.uniform(0.1, 0.5, 24)
    rows["exact"] = rows["independent"] * ratio * np.exp(rng.normal(0, 0.03, 24))
    return {"together": {"together": rows}}


@claim("b-11-heads-together", made_together, 1.0, 0.6)
def heads_together(tables: Tables, alike: list[float]) -> Decision:
    rows = tables["together"]["together"]
    own = rows[rows["subset"] == SHARED]
    ratio = own["exact"] / own["independent"]
    found = rules.share_of(ratio.between(*alike).sum(), len(own))
    by_layer = ratio.groupby(own["layer"]).mean()
    low, high = by_layer.idxmin(), by_layer.idxmax()
    ends = own["layer"].min(), own["layer"].max()
    series = [points("one text", own["layer"], ratio), *(line(f"{b}", ends, b) for b in alike)]
    return decided(
        need("share of layers and texts near 1", found, above, 0.5),
        picture=Picture("layer", "error over that of independent heads", series),
        note=f"median of {len(by_layer)} layers {by_layer.median():.2f}, least"
        f" {by_layer[low]:.2f} (layer {low}), most {by_layer[high]:.2f} (layer {high})",
    )


def made_single(noise: float, seed: int) -> Tables:
    error, other = np.random.default_rng(seed).standard_normal((2, 200))
    heads = pd.DataFrame(dict.fromkeys(("relative", "plain", "first_order"), np.exp(error)))
    return {"single": {"sensitivity": heads.assign(kl=np.exp(2 * error + noise * other))}}


@claim("o-35-heads-predict", made_single, 0.3, 30.0)
def heads_predict(tables: Tables, useful: float) -> Decision:
    heads = tables["single"]["sensitivity"]
    predictors = ("relative", "plain", "first_order")
    relative, plain, first = (
        rules.rank_correlation(heads[name], heads["kl"]) for name in predictors
    )
    series = [points("heads", heads["relative"], heads["kl"])]
    return decided(
        need("rank correlation of the relative error", relative, above, useful),
        picture=Picture("relative error of the head", "divergence, nats", series, log="xy"),
        note=f"over {len(heads)} heads; of the plain error {plain.value:.2f}, of the first order by"
        f" gradients {first.value:.2f}",
    )


# ---- 14: depth

OUTPUT = "output"


def made_depth(final: float, seed: int) -> Tables:
    """Layers with exponent 0.35, and a final error with another."""
    rng = np.random.default_rng(seed)
    draws = grid(text=range(10), keep=(0.1, 0.2, 0.4), metric="error")
    slopes = rng.normal(final, 0.02, 10).repeat(3)
    draws = draws.assign(kept=256 * draws["keep"], value=draws["keep"] ** -slopes)
    layers = pd.DataFrame({"layer": [OUTPUT, *map(str, range(30))]})
    layers["exponent"] = [final, *rng.normal(0.35, 0.05, 30)]
    return {"depth": {"draws": draws, "depth": layers}}


@claim("b-14-depth", made_depth, 0.35, 0.15)
def depth(tables: Tables, same: float) -> Decision:
    """Compares the exponents of every text's final error with the median over layers."""
    draws, layers = tables["depth"]["draws"], tables["depth"]["depth"]
    single = layers[layers["layer"] != OUTPUT]["exponent"]
    middle = float(single.median())
    final = []
    for _, own in draws[draws["metric"] == "error"].groupby("text"):
        means = own.groupby("keep")[["kept", "value"]].mean()
        final.append(-float(np.polyfit(np.log(means["kept"]), np.log(means["value"]), 1)[0]))
    found = rules.mean_interval(final)
    gap = Interval(*(end - middle for end in found))
    logits = replace(points("logits", [0, len(single) - 1], [found, found]), line=True)
    series = [points("attention of a layer", range(len(single)), single), logits]
    return decided(
        need("exponent of the logits less the layers' median", gap, inside, -same, same),
        picture=Picture("layer", "exponent in the keys kept", series),
        note=f"logits {found.value:.2f} over {len(final)} texts; attention of {len(single)} layers,"
        f" at the full model's inputs, {middle:.2f} ({single.min():.2f} to {single.max():.2f})",
    )


# ---- 16: agreement against the horizon of a text


def made_embeddings(slope: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    draws = grid(text=range(300), metric="cosine").assign(horizon=rng.uniform(1, 2, 300))
    draws["value"] = 0.7 + slope * draws["horizon"] + rng.normal(0, 0.03, 300)
    return {"embeddings": {"draws": draws}}


@claim("b-16-downstream-horizon", made_embeddings, -0.15, 0.05)
def downstream_horizon(tables: Tables, weak: float) -> Decision:
    """A rank correlation above ``weak`` is no fall to speak of."""
    draws = tables["embeddings"]["draws"]
    texts = draws[draws["metric"] == "cosine"].groupby("text")
    horizon, cosine = texts["horizon"].first(), texts["value"].mean()
    order = rules.rank_correlation(horizon, cosine)
    third = horizon.rank(pct=True)
    low, high = cosine[third <= 1 / 3].mean(), cosine[third > 2 / 3].mean()
    verdict = "refuted" if order.low > weak else below(order, 0.0)
    return decided(
        rules.Part("rank correlation with the horizon", order, "below 0", verdict),
        picture=Picture("horizon of the text", "cosine", [points("texts", horizon, cosine)]),
        note=f"over {len(cosine)} texts, horizons {horizon.min():.2f} to {horizon.max():.2f}; mean"
        f" cosine {low:.3f} in the third of lowest horizon, {high:.3f} in the highest",
    )

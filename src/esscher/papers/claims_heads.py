"""Rules of the claims on real heads. [B] on MiniLM, of the BERT family, and on SmolLM2, a causal
language model, with text that needs no download; and keys that are kept: the rates of sparse
variants, heads of a layer together, depth.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from esscher.corpus.spec import CorpusSpec
from esscher.intervals import Interval
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.rules import above, below, decided, exponent, inside, line, need, points
from esscher.probe.moments import moment_units, unit_moments
from esscher.probe.session import open_session
from esscher.probe.spec import ProbeSpec

MOMENTS = {"beta_mean": "mean of the outputs", "beta_cov": "covariance of the outputs"}


def measured(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads of a probe that have numbers."""
    return heads[heads["status"] == "ok"]


def slow_share(heads: pd.DataFrame, column: str) -> Interval:
    """The share of heads whose exponent is below the 1/2 of an average."""
    known = heads[column].dropna()
    return rules.share_of((known < 0.5).sum(), len(known))


def fitted(heads: pd.DataFrame, column: str) -> list[Interval]:
    """Exponents of heads that have one, each with its 99.9 % interval."""
    columns = heads[[column, f"{column}_low", f"{column}_high"]].dropna()
    return [rules.widened(*stored) for stored in columns.to_numpy()]


def fall_with_scale(scales: pd.DataFrame) -> Interval:
    """The exponent at the smallest alpha less that at the largest, mean over heads (table
    ``scales`` of a probe).
    """
    by_head = scales.pivot(index=["layer", "head"], columns="scale", values="beta_fit")
    return rules.mean_interval((by_head.iloc[:, 0] - by_head.iloc[:, -1]).dropna())


def by_coupling(heads: pd.DataFrame, columns: dict[str, str]) -> Picture:
    """Exponents against the coupling: a series for each column, with its label."""
    x = heads["coupling"].to_numpy()
    series = [points(label, x, heads[column]) for column, label in columns.items()]
    half = line("1/2", [x.min(), x.max()], 0.5)
    return Picture("coupling Psi", "exponent", [*series, half], log="x")


# ---- 7 and 8: below 1/2, in the order of the coupling, as the coupling predicts


@claim("b-7-heads")
def slow_heads(tables: Tables) -> Decision:
    heads = measured(tables["prose"]["heads"])
    shares = {
        label: rules.share_below(fitted(heads, column), 0.5) for column, label in MOMENTS.items()
    }
    order = rules.rank_correlation(heads["coupling"], heads["beta_mean"])
    exact = slow_share(heads, "beta_fit").value
    exact_order = rules.rank_correlation(heads["coupling"], heads["beta_fit"]).value
    told = " and ".join(f"{share.value:.0%} ({label})" for label, share in shares.items())
    return decided(
        need("share of heads below 1/2", shares, above, 0.5),
        need("rank correlation of the mean's exponent with the coupling", order, below, 0.0),
        picture=by_coupling(heads, {**MOMENTS, "beta_fit": "L2 error, exact"}),
        note=f"of {len(heads)} heads are below 1/2 {told}; the L2 error of the attention map, which"
        f" [B] does not fit, in {exact:.0%}, with correlation {exact_order:.2f}",
    )


@claim("b-8-critical-path")
def critical_path(tables: Tables, useful: float) -> Decision:
    heads = measured(tables["prose"]["heads"])
    x = heads["beta_paper"].to_numpy()
    gaps, order = {}, {}
    for column, label in MOMENTS.items():
        order[label] = rules.rank_correlation(x, heads[column])
        columns = ["layer", "head", "beta_paper", column, f"{column}_low", f"{column}_high"]
        for layer, head, predicted, *stored in heads[columns].dropna().to_numpy():
            gap = Interval(*(end - predicted for end in rules.widened(*stored)))
            gaps[f"{label}, layer {layer:.0f} head {head:.0f}"] = gap
    distance = (heads["beta_mean"] - heads["beta_paper"]).median()
    series = [points(label, x, heads[column]) for column, label in MOMENTS.items()]
    axes = "predicted 1/(2(1 + 32 Psi))", "measured exponent"
    return decided(
        need("rank correlation of predicted and measured", order, above, useful),
        need("measured exponent less predicted", gaps, above, 0.0),
        picture=Picture(*axes, [*series, rules.diagonal("equal", x)], log="x"),
        note=f"of {len(heads)} heads the prediction is {x.max():.4f} at most and {distance:.2f} too"
        " low in the median",
    )


# ---- 9: larger references


@claim("b-9-references")
def references(tables: Tables, moved: float, stays: float) -> Decision:
    """Moments are sampled anew for each reference, so that a head has moved where the interval of
    its change lies beyond ``moved``.
    """
    rows = pd.concat(
        [measured(own["heads"]).assign(tokens=int(tokens)) for tokens, own in tables.items()]
    )
    low, high = rows["tokens"].min(), rows["tokens"].max()
    columns = [f"{column}{end}" for column in MOMENTS for end in ("", "_low", "_high")]
    place = ["layer", "head"]
    heads = rows[[*place, "tokens", "beta_fit", *columns]].dropna().sort_values(place)
    heads = heads[heads.duplicated(place, keep=False)]
    small, large = (heads[heads["tokens"] == size] for size in (low, high))
    shifts, kept, series = {}, {}, []
    for column, label in MOMENTS.items():
        pairs = zip(fitted(small, column), fitted(large, column), strict=True)
        changes = [rules.difference(b, a) for a, b in pairs]
        shifts[label] = rules.mean_interval(change.value for change in changes)
        same = [change.low < moved and change.high > -moved for change in changes]
        kept[label] = rules.share_of(sum(same), len(same))
        series.append(points(label, small[column], fitted(large, column)))
    exact = np.abs(large["beta_fit"].to_numpy() - small["beta_fit"].to_numpy())
    axes = f"exponent, {low} tokens", f"exponent, {high} tokens"
    return decided(
        need("mean change of the exponent", shifts, inside, -moved, moved),
        need("share of heads whose exponent stays", kept, above, stays),
        picture=Picture(*axes, [*series, rules.diagonal("same", small[column])]),
        note=f"exact exponents of the L2 error change by {exact.max():.3f} at most",
    )


# ---- 10: tails

KINDS = {"norm": "norms", "coordinate": "coordinates"}


@claim("b-10-tails")
def tails(tables: Tables) -> Decision:
    layers = tables["prose"]["layers"]
    ratios, told = {}, []
    for kind, plural in KINDS.items():
        columns = layers[["layer", f"{kind}_ratio", f"{kind}_ratio_low", f"{kind}_ratio_high"]]
        for layer, *stored in columns.to_numpy():
            ratios[plural, layer] = rules.widened(*stored)
        words = layers[f"{kind}_tail"].value_counts()
        told.append(f"{plural}: " + ", ".join(f"{count} {word}" for word, count in words.items()))
    return decided(
        need("log-likelihood a value, Pareto less Gaussian", ratios, below, 0.0),
        x="layer",
        note=f"laws of the largest values in {len(layers)} layers, by likelihood at 95 %:"
        f" {'; '.join(told)}",
    )


# ---- 39: hardmax beyond the line


def measure_hardmax(tokens: int, repeats: int, rng: np.random.Generator) -> Rows:
    """Exponents of the mean output of heads whose scores are multiplied by 10^4."""
    corpus, seed = CorpusSpec(packaged="prose", max_tokens=tokens), int(rng.integers(2**31))
    spec = ProbeSpec(model="minilm", corpus=corpus, moments=repeats, scales=(1e4,), seed=seed)
    session = open_session(spec)
    found = [unit_moments(session, unit) for unit in moment_units(session)]
    heads, n = pd.concat([own["scaled_moments"] for own in found]), found[0]["curves"]["n"]
    rows: Rows = heads.assign(first=n.min(), last=n.max()).to_dict("records")
    return rows


def logarithmic(first: float, last: float) -> float:
    """The exponent of 1/sqrt(ln n) between two n."""
    return 0.5 * float(np.log(np.log(last) / np.log(first)) / np.log(last / first))


@claim("b-39-hardmax-beyond", measure_hardmax)
def hardmax_beyond(tables: Tables, near: float) -> Decision:
    gaps: dict[str, Interval] = {}
    for name, own in tables.items():
        if name != "heads":
            n = own["errors"]["n"]
            slow = logarithmic(float(n.min()), float(n.max()))
            gaps[name] = Interval(*(end - slow for end in exponent(own["errors"], "hardmax")))
    heads = tables["heads"]["evidence"]
    slow = logarithmic(float(heads["first"].min()), float(heads["last"].max()))
    found = fitted(heads, "beta_mean")
    return decided(
        need("exponent less that of 1/sqrt(ln n)", gaps, inside, -near, near),
        need("share of heads so slow", rules.share_below(found, slow + near), above, 0.5),
        x=f"law: {', '.join(gaps)}",
        note=f"median exponent of {len(found)} heads {heads['beta_mean'].median():.2f}, where"
        f" 1/sqrt(ln n) has {slow:.2f}",
    )


# ---- 12: other domains


@claim("b-12-domains")
def domains(tables: Tables, agree: float) -> Decision:
    heads = {name: measured(own["heads"]) for name, own in tables.items()}
    place = ["layer", "head"]
    table = pd.DataFrame({name: own.set_index(place)["beta_fit"] for name, own in heads.items()})
    table = table.dropna()
    pairs = {
        f"{a} and {b}": rules.rank_correlation(table[a], table[b])
        for a, b in itertools.combinations(table, 2)
    }
    told = ", ".join(f"{pair} {found.value:.2f}" for pair, found in pairs.items())
    medians = ", ".join(f"{domain} {table[domain].median():.3f}" for domain in table)
    return decided(
        need("rank correlation", pairs, above, agree),
        x=f"pair: {', '.join(pairs)}",
        note=f"over {len(table)} heads: {told}; median exponents: {medians}",
    )


# ---- 36: claims 1, 3 and 7 on a causal language model


@claim("o-36-language-model")
def language_model(tables: Tables, fall: float) -> Decision:
    """The rules of claims 1, 3 and 7 on the exponents of the L2 error."""
    heads = measured(tables["probe"]["heads"])
    coupled = heads[heads["coupling"] >= heads["coupling"].quantile(0.75)]
    order = rules.rank_correlation(heads["coupling"], heads["beta_fit"])
    high, every = slow_share(coupled, "beta_fit"), slow_share(heads, "beta_fit")
    return decided(
        need("rank correlation with the coupling", order, below, 0.0),
        need("share of heads below 1/2", every, above, 0.5),
        need("the same in the quarter of highest coupling", high, above, 0.5),
        need("fall with alpha", fall_with_scale(tables["probe"]["scales"]), above, fall),
        picture=by_coupling(heads, {"beta_fit": "L2 error, exact"}),
    )


# ---- 40: the critical scale against the coupling


@claim("o-40-critical-scale")
def critical_order(tables: Tables) -> Decision:
    """Slow heads have a small critical scale and a large coupling: rank correlations of opposite
    sign, compared in size.
    """
    gains, series, told = {}, [], []
    for name, own in tables.items():
        heads = measured(own["heads"])[["critical_scale", "coupling", "beta_fit"]].dropna()
        gains[name] = rules.bootstrapped(
            heads, lambda own: float(own.corr("spearman")["beta_fit"].iloc[:2].sum())
        )
        rho = heads.corr("spearman")["beta_fit"]
        told.append(f"{name}: critical scale {rho.iloc[0]:.2f}, coupling {rho.iloc[1]:.2f}")
        series.append(points(name, heads["critical_scale"], heads["beta_fit"]))
    return decided(
        need("rank correlation, critical scale over coupling", gains, above, 0.0),
        picture=Picture("critical scale", "exponent of the L2 error", series, log="x"),
        note=f"rank correlations with the exponent: {'; '.join(told)}",
    )


# ---- 34: Neyman's keys on laws of finitely many points

DIM = 4


def finite_law(law: str, rng: np.random.Generator) -> Any:
    """Equally likely tokens: signs, or 4096 draws of clusters of unequal size, or of Laplace's."""
    drawn = rng.standard_normal((4096, DIM))
    if law == "signs":
        return np.array([*itertools.product((-1.0, 1.0), repeat=DIM)])
    if law == "clusters":
        kind = rng.integers(4, size=4096)
        return (
            rng.standard_normal((4, DIM))[kind] + np.array([0.1, 0.3, 1.0, 2.0])[kind, None] * drawn
        )
    return rng.laplace(size=(4096, DIM))


def measure_neyman(
    law: str, horizon: float, n: list[int], repeats: int, rng: np.random.Generator
) -> Rows:
    """Squared errors on n random keys, and on n keys drawn with chances in proportion to e |c| and
    weighted by one over it. Score horizon <x, y>, value y, a query x ~ N(0, I) for each repeat.
    ``spread``: the trace of the tilted covariance, n times the squared error of tilted draws.
    """
    rows = []
    for repeat in range(repeats):
        tokens = finite_law(law, rng)
        theta = horizon * rng.standard_normal(DIM)
        p = np.exp(tokens @ theta - (tokens @ theta).max())
        p /= p.sum()
        tokens = tokens - tokens[p.argmax()]  # or rounding takes the distance of one that has all
        limit = p @ tokens
        distance = np.linalg.norm(tokens - limit, axis=1)
        chance = p * distance / (p @ distance)
        even = np.full(len(p), 1 / len(p))
        place = {"law": law, "horizon": horizon, "repeat": repeat, "spread": p @ distance**2}
        for rule, chances in {"random": even, "neyman": chance}.items():
            taken = rng.choice(len(p), n[-1], p=chances)
            weight = p[taken] / chances[taken]
            total = np.cumsum(weight)
            summed = np.cumsum(weight[:, None] * (tokens[taken] - limit), axis=0)
            for count in n:
                squared = float(np.square(summed[count - 1] / total[count - 1]).sum())
                rows.append({**place, "metric": rule, "n": count, "squared": squared})
    return rows


@claim("o-34-neyman", measure_neyman)
def neyman(tables: Tables, half: list[float], most: float) -> Decision:
    """The error at the largest n is compared with that of as many draws of the tilted law itself,
    whose spread depends on law and query.
    """
    errors = tables["neyman"]["evidence"]
    cells = errors.groupby(["law", "horizon"], sort=True)
    errors = errors.assign(point=cells.ngroup())
    places = [*cells.groups]
    fits = {
        rule: {place: exponent(errors, rule, i) for i, place in enumerate(places)}
        for rule in ("neyman", "random")
    }
    last = errors[errors["n"] == errors["n"].max()]
    means = last.groupby(["metric", "law", "horizon"])[["squared", "spread"]].mean()
    ratios = np.sqrt(means["squared"] * errors["n"].max() / means["spread"])
    return decided(
        need("exponent of Neyman's keys", fits["neyman"], inside, *half),
        need(
            f"error over that of tilted draws, n = {errors['n'].max()}",
            ratios["neyman"].to_dict(),
            below,
            most,
        ),
        x="horizon",
        log="x",
        note=f"random keys have errors up to {ratios['random'].max():.3g} times those of tilted"
        f" draws, and exponents from {min(fit.value for fit in fits['random'].values()):.2f}",
    )


# ---- 13 and 15: sparse variants on every head of MiniLM: random keys; Longformer's window (the
# keys nearest to a query) with a global first token; BigBird's, with random keys beside; keys
# shared by the queries; keys of each query; the floor

WINDOW, MIXED = "sinks:1+recent", "sinks:1+recent:16+random:reweight"


@claim("b-13-sparse-rates")
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
    nearest = shares.pop(WINDOW)
    return decided(
        need("share of heads in which it falls faster than random", shares, above, 0.5),
        need(f"the same, {WINDOW}", nearest, below, 0.5),
        x=f"rule: {', '.join(shares)}",
        note=f"median exponents over {len(found)} heads: {told}",
    )


@claim("b-15-window-and-random")
def window_and_random(tables: Tables) -> Decision:
    three, place = [MIXED, WINDOW, "random"], ["layer", "head", "share"]
    by_rule = tables["windows"]["frontier"].pivot(index=place, columns="rule", values="relative")
    asked, told = {}, []
    for size, own in by_rule[three].dropna().groupby("share"):
        mixed, window, random = (own[rule] for rule in three)
        share = rules.share_of(((mixed < window) & (mixed < random)).sum(), len(own))
        if any(np.isclose(size, (0.1, 0.25))):
            asked[f"{size:.0%} of the keys"] = share
        medians = " / ".join(f"{own[rule].median():.2f}" for rule in three)
        told.append(f"{size:.0%} {medians}")
    return decided(
        need("share of heads in which it errs less than either", asked, above, 0.5),
        x=", ".join(asked),
        note=f"median errors of both / window / random by keys kept: {', '.join(told)}",
    )


# ---- 11: heads of SmolLM2 together

SHARED = "one for all heads"


@claim("b-11-heads-together")
def heads_together(tables: Tables, alike: list[float]) -> Decision:
    rows = tables["together"]["together"]
    own = rows[rows["subset"] == SHARED]
    ratio = own["exact"] / own["independent"]
    found = rules.share_of(ratio.between(*alike).sum(), len(own))
    by_layer = ratio.groupby(own["layer"]).mean()
    low, high = by_layer.idxmin(), by_layer.idxmax()
    series = [points("one text", own["layer"], ratio)]
    return decided(
        need("share of layers and texts near 1", found, above, 0.5),
        picture=Picture("layer", "error over that of independent heads", series),
        note=f"median of {len(by_layer)} layers {by_layer.median():.2f}, least"
        f" {by_layer[low]:.2f} (layer {low}), most {by_layer[high]:.2f} (layer {high})",
    )


# ---- 14: depth

OUTPUT = "output"


@claim("b-14-depth")
def depth(tables: Tables, same: float) -> Decision:
    """Compares the exponents of every text's final error with the median over layers, for each
    rule.
    """
    draws, layers = tables["depth"]["draws"], tables["depth"]["depth"]
    draws = draws[draws["metric"] == "error"]
    gaps, told = {}, []
    for rule, own in draws.groupby("rule"):
        single = layers[(layers["layer"] != OUTPUT) & (layers["rule"] == rule)]["exponent"]
        middle = float(single.median())
        final = []
        for _, text in own.groupby("text"):
            means = text.groupby("keep")[["kept", "value"]].mean()
            final.append(-float(np.polyfit(np.log(means["kept"]), np.log(means["value"]), 1)[0]))
        found = rules.mean_interval(final)
        gaps[str(rule)] = Interval(*(end - middle for end in found))
        told.append(
            f"{rule}: logits {found.value:.2f} over {len(final)} texts, attention of {len(single)}"
            f" layers at the full model's inputs {middle:.2f}"
            f" ({single.min():.2f} to {single.max():.2f})"
        )
    return decided(
        need("exponent of the logits less the layers' median", gaps, inside, -same, same),
        x=f"rule: {', '.join(gaps)}",
        note="; ".join(told),
    )


# ---- 16: agreement against the horizon of a text


@claim("b-16-downstream-horizon")
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

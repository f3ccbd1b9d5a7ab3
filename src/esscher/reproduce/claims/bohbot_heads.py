"""[B] on real heads: MiniLM, of the BERT family, on text that needs no download."""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from esscher.models.corpus.spec import CorpusSpec
from esscher.models.probe.spec import ProbeSpec
from esscher.reproduce.bible import bible
from esscher.reproduce.claim import Claim, Decision, Picture, Rows, Scale, Series, Tables
from esscher.reproduce.decide import above, all_of, below, rank_correlation, share_of, widened
from esscher.reproduce.evidence import EvidenceSpec
from esscher.reproduce.on_heads import by_coupling, measured, ordered_by_coupling, slow_share
from esscher.reproduce.probes import DOMAINS, encoder
from esscher.runs import RunSpec, execute

__all__ = ["CLAIMS"]

MOMENTS = {"beta_mean": "mean of the outputs", "beta_cov": "covariance of the outputs"}
# rank correlation from which on a prediction is of use: with less, most pairs of near heads are in
# doubt
USEFUL = 0.5


def prose(scale: Scale, seed: int) -> dict[str, RunSpec]:
    return {"prose": encoder(scale, seed)}


# ---- 7: below 1/2, in the order of the coupling
# ----------------------------------------------------------------------------


def decide_heads(tables: Tables) -> Decision:
    heads = measured(tables["prose"]["heads"])
    shares = {column: slow_share(heads, column) for column in MOMENTS}
    order = ordered_by_coupling(heads, "beta_mean")
    verdict = all_of(
        (*(above(*share[1:], 0.5) for share in shares.values()), below(*order[1:], 0.0))
    )
    worst = min(shares, key=lambda column: shares[column][0])
    exact, exact_order = slow_share(heads, "beta_fit")[0], ordered_by_coupling(heads, "beta_fit")[0]
    told = " and ".join(f"the {MOMENTS[column]} in {shares[column][0]:.0%}" for column in MOMENTS)
    reason = (
        f"of {len(heads)} heads {told} have exponents below 1/2; rank correlation of the mean's"
        f" with the coupling {order[0]:.2f}. The L2 error of the attention map, which [B] does not"
        f" fit, is below 1/2 in {exact:.0%}, with correlation {exact_order:.2f}"
    )
    picture = by_coupling(heads, {**MOMENTS, "beta_fit": "L2 error, exact"})
    return Decision(
        verdict, f"share of heads below 1/2, {MOMENTS[worst]}", *shares[worst], reason, picture
    )


# ---- 8: the critical path
# ------------------------------------------------------------------------------------------


def decide_path(tables: Tables) -> Decision:
    heads = measured(tables["prose"]["heads"])
    verdicts, broken = [], 0
    for column in MOMENTS:
        for row in (
            heads[["beta_paper", column, f"{column}_low", f"{column}_high"]].dropna().to_numpy()
        ):
            _, low, high = widened(*row[1:])
            verdicts.append(above(low, high, row[0]))
            broken += high < row[0]
    order = {column: rank_correlation(heads["beta_paper"], heads[column]) for column in MOMENTS}
    worst = min(order, key=lambda column: order[column][0])
    verdict = all_of((*verdicts, *(above(*found[1:], USEFUL) for found in order.values())))
    largest, distance = (
        heads["beta_paper"].max(),
        (heads["beta_mean"] - heads["beta_paper"]).median(),
    )
    told = " and ".join(f"{order[column][0]:.2f} ({MOMENTS[column]})" for column in MOMENTS)
    reason = (
        f"{broken} of {len(verdicts)} measured exponents lie below the predicted, which is"
        f" {largest:.4f} at most and {distance:.2f} too low in the median; predicted and measured"
        f" order of {len(heads)} heads: rank correlation {told}"
    )
    x = heads["beta_paper"].to_numpy()
    series = [Series(label, x, heads[column].to_numpy()) for column, label in MOMENTS.items()]
    ends = [float(x.min()), float(x.max())]
    picture = Picture(
        "predicted 1/(2(1 + 32 Psi))",
        "measured exponent",
        (*series, Series("equal", ends, ends, line=True)),
        "x",
    )
    return Decision(verdict, f"rank correlation, {MOMENTS[worst]}", *order[worst], reason, picture)


def made_heads(mean: tuple[float, float], cov: tuple[float, float], seed: int) -> Tables:
    """72 heads of rising coupling, whose exponents go from the first number to the second."""
    rng = np.random.default_rng(seed)
    place = np.arange(72)
    coupling = 10.0 ** (3 * place / 71 - 1)
    frame = {
        "layer": place // 12,
        "head": place % 12,
        "status": "ok",
        "coupling": coupling,
        "beta_paper": 0.5 / (1 + 32 * coupling),
    }
    for column, (first, last) in {"beta_mean": mean, "beta_cov": cov, "beta_fit": mean}.items():
        value = np.linspace(first, last, 72) + 0.01 * rng.standard_normal(72)
        frame |= {column: value}
        if column in MOMENTS:
            frame |= {f"{column}_low": value - 0.02, f"{column}_high": value + 0.02}
    return {"prose": {"heads": pd.DataFrame(frame)}}


# ---- 9: larger references
# ------------------------------------------------------------------------------------------

REFERENCES = (4096, 16384)
LARGE_REFERENCES = (16384, 131072, 1_000_000)
MOVED, STAYS = 0.05, 0.8  # a head keeps its verdict if its exponent moves less; so many heads must


def references(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Quick: the packaged prose. Full: up to a million tokens of the Bible."""
    if scale == "quick":
        corpora = {
            f"{tokens}": CorpusSpec(packaged="prose", max_tokens=tokens) for tokens in REFERENCES
        }
        return {
            name: ProbeSpec(
                model="minilm",
                corpus=corpus,
                queries=32,
                kept_queries=4,
                layers=(0, 1, 3, 5),
                seed=seed,
            )
            for name, corpus in corpora.items()
        }
    parts = tuple({"tokens": tokens, "queries": 32} for tokens in LARGE_REFERENCES)
    return {"bible": EvidenceSpec(claim="b-9-references", parts=parts, seed=seed)}


def measure_reference(tokens: int, queries: int, rng: np.random.Generator) -> Rows:
    """Exponents of the L2 error of every head, the Bible's first tokens being the pool."""
    text = bible()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "bible.txt"
        source.write_text(text, "utf-8")
        corpus = CorpusSpec(text=(str(source),), max_tokens=tokens)
        seed = int(rng.integers(2**31))
        spec = ProbeSpec(model="minilm", corpus=corpus, queries=queries, kept_queries=4, seed=seed)
        heads = measured(execute(spec, Path(folder) / "run").table("heads"))
    return [
        {"tokens": tokens, **row} for row in heads[["layer", "head", "beta_fit"]].to_dict("records")
    ]


def by_reference(tables: Tables) -> pd.DataFrame:
    """(heads, tokens of the reference): exponents."""
    if "bible" in tables:
        rows = tables["bible"]["evidence"]
    else:
        rows = pd.concat(
            [
                measured(tables[name]["heads"]).assign(tokens=int(name))
                for name in map(str, REFERENCES)
            ]
        )
    return (
        rows.pivot(index=["layer", "head"], columns="tokens", values="beta_fit")
        .sort_index(axis=1)
        .dropna()
    )


def decide_references(tables: Tables) -> Decision:
    found = by_reference(tables)
    first, last = found.iloc[:, 0], found.iloc[:, -1]
    stays = share_of(int(((last - first).abs() < MOVED).sum()), len(found))
    order = rank_correlation(first, last)
    moved = (last - first).abs().max()
    reason = (
        f"from a reference of {found.columns[0]:.0f} tokens to one of {found.columns[-1]:.0f} the"
        f" exponents of {stays[0]:.0%} of {len(found)} heads move by less than {MOVED}, the most by"
        f" {moved:.3f}, the median from {first.median():.3f} to {last.median():.3f}; rank"
        f" correlation {order[0]:.2f}; below 1/2 are {(first < 0.5).mean():.0%} and"
        f" {(last < 0.5).mean():.0%}"
    )
    series = [
        Series(f"{tokens:.0f} tokens", first.to_numpy(), found[tokens].to_numpy())
        for tokens in found.columns[1:]
    ]
    ends = [float(first.min()), float(first.max())]
    axes = f"exponent, {found.columns[0]:.0f} tokens", "exponent, larger reference"
    picture = Picture(*axes, (*series, Series("the same", ends, ends, line=True)))
    return Decision(
        above(*stays[1:], STAYS), "share of heads that keep their exponent", *stays, reason, picture
    )


def made_references(moves: float, seed: int) -> Tables:
    """Half of the exponents differ by so much."""
    rng = np.random.default_rng(seed)
    place = np.arange(72)
    small = 0.4 + 0.05 * rng.standard_normal(72)
    frame = {"layer": place // 12, "head": place % 12, "status": "ok"}
    large = small + np.where(place % 2, moves, 0.0)
    return {
        str(tokens): {"heads": pd.DataFrame({**frame, "beta_fit": value})}
        for tokens, value in zip(REFERENCES, (small, large), strict=True)
    }


# ---- 10: tails
# ------------------------------------------------------------------------------------------

KINDS = {"norm": "norms", "coordinate": "coordinates"}


def decide_tails(tables: Tables) -> Decision:
    layers = tables["prose"]["layers"]
    ratios = {}
    for kind in KINDS:
        columns = layers[[f"{kind}_ratio", f"{kind}_ratio_low", f"{kind}_ratio_high"]]
        ratios[kind] = [widened(*row) for row in columns.to_numpy()]
    verdict = all_of(below(low, high, 0.0) for rows in ratios.values() for _, low, high in rows)
    worst = max((row for rows in ratios.values() for row in rows), key=lambda row: row[0])
    told = []
    for kind, plural in KINDS.items():
        words = layers[f"{kind}_tail"].value_counts()
        told.append(f"{plural}: " + ", ".join(f"{count} {word}" for word, count in words.items()))
    reason = (
        f"laws of the largest values in {len(layers)} layers, by likelihood at 95 %:"
        f" {'; '.join(told)}"
    )
    x = layers["layer"].to_numpy()
    series = []
    for kind, rows in ratios.items():
        value, low, high = (np.array(part) for part in zip(*rows, strict=True))
        series.append(Series(KINDS[kind], x, value, low, high))
    line = Series(
        "Gaussian and Pareto fit alike", [float(x.min()), float(x.max())], [0.0, 0.0], line=True
    )
    picture = Picture("layer", "log-likelihood a value, Pareto less Gaussian", (*series, line))
    return Decision(verdict, "largest ratio of a layer", *worst, reason, picture)


def made_tails(coordinate: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    frame: dict[str, object] = {"layer": np.arange(6)}
    for kind, ratio in (("norm", -0.1), ("coordinate", coordinate)):
        value = ratio + 0.005 * rng.standard_normal(6)
        frame |= {
            f"{kind}_ratio": value,
            f"{kind}_ratio_low": value - 0.01,
            f"{kind}_ratio_high": value + 0.01,
        }
        frame |= {f"{kind}_tail": "Gaussian" if ratio < 0 else "Pareto"}
    return {"prose": {"layers": pd.DataFrame(frame)}}


# ---- 12: other domains
# ------------------------------------------------------------------------------------------

AGREE = 0.7


def domains(scale: Scale, seed: int) -> dict[str, RunSpec]:
    return {domain: encoder(scale, seed, domain) for domain in DOMAINS}


def decide_domains(tables: Tables) -> Decision:
    heads = {
        domain: measured(tables[domain]["heads"]).set_index(["layer", "head"])["beta_fit"]
        for domain in DOMAINS
    }
    table = pd.DataFrame(heads).dropna()
    pairs = {
        pair: rank_correlation(table[pair[0]], table[pair[1]])
        for pair in itertools.combinations(DOMAINS, 2)
    }
    verdict = all_of(above(*found[1:], AGREE) for found in pairs.values())
    least = min(pairs, key=lambda pair: pairs[pair][0])
    told = ", ".join(f"{a} and {b} {found[0]:.2f}" for (a, b), found in pairs.items())
    medians = ", ".join(f"{domain} {table[domain].median():.3f}" for domain in DOMAINS)
    reason = (
        f"rank correlations of exponents over {len(table)} heads: {told}; median exponents:"
        f" {medians}"
    )
    first = table[DOMAINS[0]].to_numpy()
    series = [Series(domain, first, table[domain].to_numpy()) for domain in DOMAINS[1:]]
    ends = [float(first.min()), float(first.max())]
    picture = Picture(
        f"exponent on {DOMAINS[0]}",
        "exponent",
        (*series, Series("the same", ends, ends, line=True)),
    )
    return Decision(
        verdict, f"rank correlation, {least[0]} and {least[1]}", *pairs[least], reason, picture
    )


def made_domains(noise: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    place = np.arange(72)
    own = rng.standard_normal(72)
    frame = {"layer": place // 12, "head": place % 12, "status": "ok"}
    return {
        domain: {
            "heads": pd.DataFrame(
                {**frame, "beta_fit": 0.4 + 0.05 * (own + noise * rng.standard_normal(72))}
            )
        }
        for domain in DOMAINS
    }


CLAIMS = (
    Claim(
        id="b-7-heads",
        number=7,
        seen=(
            "Exponents of these heads on another text, and of four layers on this one, before the"
            " rule was written."
        ),
        source="[B] section 6, BERT experiment",
        statement=(
            "Mean and covariance of the outputs of BERT heads converge more slowly than 1/sqrt(n),"
            " the more so the higher the coupling of the head."
        ),
        hypothesis=(
            "The 72 heads of MiniLM on 8192 tokens of prose (full: 16,384), n from 64 to an eighth"
            " of them, which are keys and queries at once."
        ),
        rule=(
            "Supported if with 99.9 % intervals more than half of the heads have exponents below"
            " 1/2, for the mean and for the covariance, and the rank correlation of the mean's"
            " exponent with the coupling is below 0. Refuted if one of the shares lies below a"
            " half, or the correlation above 0."
        ),
        refuted_by=(
            "A moment of which most heads have exponents of 1/2 or more, or exponents that rise"
            " with the coupling."
        ),
        runs=prose,
        decide=decide_heads,
        holds=partial(made_heads, (0.48, 0.2), (0.48, 0.2)),
        fails=partial(made_heads, (0.48, 0.2), (0.65, 0.55)),
    ),
    Claim(
        id="b-8-critical-path",
        number=8,
        seen=(
            "A rule on the better predicted moment alone, probably undecided, was replaced after"
            " four layers were seen."
        ),
        source="[B] section 6 and Theorem 4.4: Sigma, A, Psi, then 1/(2(1 + 32 Psi))",
        statement=(
            "The exponent that a head's coupling predicts tells the measured one: none is below it,"
            " and heads predicted to be slower are slower."
        ),
        hypothesis=(
            "Every head of every layer of MiniLM on 8192 tokens of prose (full: 16,384); mean and"
            " covariance of the outputs by Monte Carlo subsampling. The theorem is about"
            " Gaussian-like tokens and large n."
        ),
        rule=(
            "Supported if no 99.9 % interval of a measured exponent reaches below the predicted"
            f" one, and the rank correlation of predicted and measured is above {USEFUL} with its"
            " interval, for the mean and for the covariance. Refuted by one interval below the"
            f" prediction, or by a correlation below {USEFUL}."
        ),
        refuted_by=(
            "A head slower than predicted, or an order of heads that the prediction does not tell."
        ),
        runs=prose,
        decide=decide_path,
        holds=partial(made_heads, (0.5, 0.3), (0.6, 0.4)),
        fails=partial(made_heads, (0.5, 0.502), (0.6, 0.602)),
    ),
    Claim(
        id="b-9-references",
        number=9,
        source="[B] section 6, references of up to a million tokens",
        statement=(
            "A larger reference in place of the limit leaves what is said of a head unchanged."
        ),
        hypothesis=(
            "Heads of MiniLM, exponents of the L2 error between the same n, 64 to 4096. Quick: 4096"
            " tokens of prose against 16,384. Full: 16,384, 131,072 and 1,000,000 tokens of the"
            " King James Bible."
        ),
        rule=(
            f"A head keeps its verdict if its exponent moves by less than {MOVED}. Supported if the"
            f" share of such heads, from the smallest reference to the largest, lies above {STAYS}"
            " with its 99.9 % interval; refuted if it lies below."
        ),
        refuted_by=f"More than one head in five whose exponent moves by {MOVED} or more.",
        runs=references,
        decide=decide_references,
        holds=partial(made_references, 0.01),
        fails=partial(made_references, 0.15),
        measure=measure_reference,
    ),
    Claim(
        id="b-10-tails",
        number=10,
        seen="Tails of four of the six layers.",
        source="[B] next check: tails of embeddings",
        statement=(
            "Tokens that enter a layer are sub-Gaussian: the tails of their norms and coordinates"
            " are no heavier than a Gaussian's."
        ),
        hypothesis=(
            "Every layer of MiniLM, 8192 tokens of prose (full: 16,384), the largest values, tokens"
            " taken as independent."
        ),
        rule=(
            "Supported if in every layer the Gaussian tail is likelier than a Pareto tail, for"
            " norms and for coordinates, with the 99.9 % interval of the ratio; refuted if in one"
            " layer Pareto's is."
        ),
        refuted_by="A layer with a tail that a Pareto law fits better beyond the interval.",
        runs=prose,
        decide=decide_tails,
        holds=partial(made_tails, -0.05),
        fails=partial(made_tails, 0.05),
    ),
    Claim(
        id="b-12-domains",
        number=12,
        source="[B] next check: other domains",
        statement=(
            "The same heads are slow on any text: the order of heads by their exponents agrees"
            " between prose, code and law."
        ),
        hypothesis=(
            "The 72 heads of MiniLM on 8192 tokens of each packaged text (full: 16,384), exponents"
            " of the exact L2 error."
        ),
        rule=(
            f"Supported if the rank correlation over heads is above {AGREE} for every two texts,"
            " with its 99.9 % interval; refuted if one lies below."
        ),
        refuted_by=f"Two texts with a rank correlation below {AGREE}.",
        runs=domains,
        decide=decide_domains,
        holds=partial(made_domains, 0.1),
        fails=partial(made_domains, 3.0),
    ),
)

"""From heads to the model: heads of a layer together, depth, agreement against the horizon, single
heads against the output.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from esscher.models.corpus.spec import CorpusSpec
from esscher.models.downstream.spec import DownstreamSpec
from esscher.reproduce.claim import Claim, Decision, Picture, Scale, Series, Tables, Verdict
from esscher.reproduce.decide import above, below, inside, mean_interval, rank_correlation, share_of
from esscher.runs import RunSpec

__all__ = ["CLAIMS"]

PROSE = CorpusSpec(packaged="prose")
RANDOM = "sinks:4+random"


# ---- 11 and 35: heads of SmolLM2, together and one at a time
# ---------------------------------------------------------------


def language(scale: Scale, seed: int, texts: int, **settings: Any) -> DownstreamSpec:
    """A prefill of SmolLM2 of which every third layer, or in full all, keeps a fifth of the keys at
    random, and the first 4.
    """
    quick = scale == "quick"
    return DownstreamSpec(
        model="smollm2",
        corpus=PROSE,
        texts=texts if quick else 2,
        window=256 if quick else 512,
        decode=32 if quick else 64,
        rules=(RANDOM,),
        sizes=(0.2,),
        draws=1,
        layers=tuple(range(0, 30, 3)) if quick else None,
        seed=seed,
        **settings,
    )


def together(scale: Scale, seed: int) -> dict[str, RunSpec]:
    return {"together": language(scale, seed, 2, together=True)}


def single(scale: Scale, seed: int) -> dict[str, RunSpec]:
    return {"single": language(scale, seed, 1, sensitivity=True)}


ALIKE = (0.8, 1.25)  # the error of a layer over that of independent heads
SHARED = "one for all heads"


def decide_together(tables: Tables) -> Decision:
    rows = tables["together"]["together"]
    own = rows[rows["subset"] == SHARED]
    ratio = own["exact"] / own["independent"]
    hits = ratio.between(*ALIKE)
    found = share_of(int(hits.sum()), len(own))
    by_layer = ratio.groupby(own["layer"]).mean()
    low, high = by_layer.idxmin(), by_layer.idxmax()
    reason = (
        "the error of a layer over the root of its heads' summed squares is"
        f" {by_layer.median():.2f} in the median of {len(by_layer)} layers, least"
        f" {by_layer[low]:.2f} (layer {low}), most {by_layer[high]:.2f} (layer {high})"
    )
    x = own["layer"].to_numpy()
    ends = [float(x.min()), float(x.max())]
    lines = (Series(f"{bound}", ends, [bound, bound], line=True) for bound in ALIKE)
    picture = Picture(
        "layer",
        "error over that of independent heads",
        (Series("one text", x, ratio.to_numpy()), *lines),
    )
    return Decision(
        above(*found[1:], 0.5), "share of layers and texts near 1", *found, reason, picture
    )


def made_together(ratio: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    layer = np.tile(np.arange(12), 2)
    independent = rng.uniform(0.1, 0.5, 24)
    exact = independent * ratio * np.exp(0.03 * rng.standard_normal(24))
    frame = {
        "text": np.repeat([0, 1], 12),
        "layer": layer,
        "subset": SHARED,
        "exact": exact,
        "independent": independent,
    }
    return {"together": {"together": pd.DataFrame(frame)}}


USEFUL = 0.5


def decide_single(tables: Tables) -> Decision:
    heads = tables["single"]["sensitivity"]
    found = {
        name: rank_correlation(heads[name], heads["kl"])
        for name in ("relative", "plain", "first_order")
    }
    reason = (
        f"rank correlation with the divergence of the next token, over {len(heads)} heads: relative"
        f" error {found['relative'][0]:.2f}, plain error {found['plain'][0]:.2f}, first order by"
        f" gradients {found['first_order'][0]:.2f}"
    )
    points = Series("heads", heads["relative"].to_numpy(), heads["kl"].to_numpy())
    picture = Picture("relative error of the head", "divergence, nats", (points,), log="xy")
    return Decision(
        above(*found["relative"][1:], USEFUL),
        "rank correlation of the relative error",
        *found["relative"],
        reason,
        picture,
    )


def made_single(noise: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    error = rng.standard_normal(60)
    kl = np.exp(2 * error + noise * rng.standard_normal(60))
    predictors = dict.fromkeys(("relative", "plain", "first_order"), np.exp(error))
    return {"single": {"sensitivity": pd.DataFrame({**predictors, "kl": kl})}}


# ---- 14: depth
# ------------------------------------------------------------------------------------------

OUTPUT = "output"
SAME_RATE = 0.1


def depth(scale: Scale, seed: int) -> dict[str, RunSpec]:
    quick = scale == "quick"
    return {
        "depth": DownstreamSpec(
            model="smollm2",
            corpus=PROSE,
            texts=8 if quick else 48,
            window=256 if quick else 512,
            decode=16 if quick else 64,
            rules=(RANDOM,),
            sizes=(0.1, 0.2, 0.4),
            draws=1,
            seed=seed,
        )
    }


def decide_depth(tables: Tables) -> Decision:
    """Exponents of every text's final error, against the median exponent of the layers' own
    errors.
    """
    draws, layers = tables["depth"]["draws"], tables["depth"]["depth"]
    single = layers[layers["layer"] != OUTPUT]["exponent"]
    middle = float(single.median())
    final = []
    for _, own in draws[draws["reading"] == "error"].groupby("text"):
        means = own.groupby("size")[["kept", "value"]].mean()
        final.append(-float(np.polyfit(np.log(means["kept"]), np.log(means["value"]), 1)[0]))
    value, low, high = mean_interval(final)
    reason = (
        f"the error of the logits falls with exponent {value:.2f} over {len(final)} texts, those of"
        f" {len(single)} layers' attention at the full model's inputs with {middle:.2f} in the"
        f" median ({single.min():.2f} to {single.max():.2f})"
    )
    x = np.arange(len(single), dtype=np.float64)
    ends = [0.0, float(len(single) - 1)]
    lines = (Series("logits", ends, [value, value], [low, low], [high, high], line=True),)
    picture = Picture(
        "layer",
        "exponent in the keys kept",
        (Series("attention of a layer", x, single.to_numpy()), *lines),
    )
    verdict = inside(low - middle, high - middle, -SAME_RATE, SAME_RATE)
    return Decision(
        verdict,
        "exponent of the logits less the layers' median",
        value - middle,
        low - middle,
        high - middle,
        reason,
        picture,
    )


def made_depth(final: float, seed: int) -> Tables:
    """Layers with exponent 0.35, and a final error with another."""
    rng = np.random.default_rng(seed)
    rows = [
        {"text": text, "size": size, "kept": 256 * size, "reading": "error", "value": size**-slope}
        for text, slope in enumerate(final + 0.02 * rng.standard_normal(10))
        for size in (0.1, 0.2, 0.4)
    ]
    exponents = [
        {"layer": str(layer), "exponent": 0.35 + 0.05 * rng.standard_normal()}
        for layer in range(30)
    ]
    return {
        "depth": {
            "draws": pd.DataFrame(rows),
            "depth": pd.DataFrame([{"layer": OUTPUT, "exponent": final}, *exponents]),
        }
    }


# ---- 16: agreement against the horizon of a text
# ---------------------------------------------------------------------------


def embeddings(scale: Scale, seed: int) -> dict[str, RunSpec]:
    """Texts of 128 tokens through MiniLM, every query keeping a fifth of its keys at random."""
    quick = scale == "quick"
    return {
        "embeddings": DownstreamSpec(
            model="minilm",
            corpus=PROSE,
            texts=48 if quick else 400,
            window=128,
            rules=("random",),
            sizes=(0.2,),
            draws=2 if quick else 4,
            seed=seed,
        )
    }


WEAK = -0.2  # a rank correlation nearer to 0 is no fall to speak of


def decide_horizon(tables: Tables) -> Decision:
    draws = tables["embeddings"]["draws"]
    texts = (
        draws[draws["reading"] == "cosine"]
        .groupby("text")
        .agg(horizon=("horizon", "first"), value=("value", "mean"))
    )
    order = rank_correlation(texts["horizon"], texts["value"])
    verdict: Verdict = "refuted" if order[1] > WEAK else below(*order[1:], 0.0)
    third = texts["horizon"].rank(pct=True)
    low, high = texts["value"][third <= 1 / 3].mean(), texts["value"][third > 2 / 3].mean()
    reason = (
        f"over {len(texts)} texts the rank correlation of the cosine with the full model's"
        f" embedding and the text's horizon is {order[0]:.2f}; mean cosine {low:.3f} in the third"
        f" of lowest horizon, {high:.3f} in the highest; horizons {texts['horizon'].min():.2f} to"
        f" {texts['horizon'].max():.2f}"
    )
    picture = Picture(
        "horizon of the text",
        "cosine",
        (Series("texts", texts["horizon"].to_numpy(), texts["value"].to_numpy()),),
    )
    return Decision(verdict, "rank correlation with the horizon", *order, reason, picture)


def made_embeddings(slope: float, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    horizon = rng.uniform(1, 2, 300)
    frame = {"text": np.arange(300), "horizon": horizon, "reading": "cosine"}
    return {
        "embeddings": {
            "draws": pd.DataFrame(
                {**frame, "value": 0.7 + slope * horizon + 0.03 * rng.standard_normal(300)}
            )
        }
    }


CLAIMS = (
    Claim(
        id="b-11-heads-together",
        number=11,
        seen=(
            "A run on one text; layers were added because it could not be decided, bars did not"
            " change."
        ),
        source="[B] next check: several heads in parallel",
        statement=(
            "Heads of a layer that lose the same keys err nearly independently: the layer's error"
            " is the root of the summed squares of its heads' errors."
        ),
        hypothesis=(
            "SmolLM2-135M, the first 4 and a fifth of the other keys of a prefill kept at random,"
            " one set for all heads; exact errors behind W_O."
        ),
        rule=(
            f"Supported if the share of layers and texts whose error is {ALIKE[0]} to {ALIKE[1]}"
            " times that of independent heads lies above a half with its 99.9 % interval; refuted"
            " if it lies below."
        ),
        refuted_by="Most layers outside this range.",
        runs=together,
        decide=decide_together,
        holds=partial(made_together, 1.0),
        fails=partial(made_together, 0.6),
    ),
    Claim(
        id="b-14-depth",
        number=14,
        source="[B] open question: depth; answered here",
        statement=(
            "Depth leaves the rate as it is: the error of the logits falls in the keys kept like"
            " the errors of the layers' attention do."
        ),
        hypothesis=(
            "SmolLM2-135M, a tenth to two fifths of the keys of a prefill kept at random in all"
            " layers, beside the first 4."
        ),
        rule=(
            "Supported if the exponent of the logits' error less the median of the layers' lies"
            f" within {SAME_RATE} of 0, with its 99.9 % interval over texts; refuted if all of it"
            " lies outside."
        ),
        refuted_by=(
            f"A final exponent that differs by more than {SAME_RATE} from the layers' median."
        ),
        runs=depth,
        decide=decide_depth,
        holds=partial(made_depth, 0.35),
        fails=partial(made_depth, 0.15),
    ),
    Claim(
        id="b-16-downstream-horizon",
        number=16,
        source="[B] later version: downstream agreement",
        statement=(
            "Texts on which the heads' horizon is larger agree less with the full model when keys"
            " are dropped."
        ),
        hypothesis=(
            "MiniLM, texts of 128 tokens, every query keeps a fifth of its keys at random; cosine"
            " of the embedding with the full model's, horizon the median over heads on the text."
        ),
        rule=(
            "Supported if the rank correlation over texts lies below 0 with its 99.9 % interval;"
            f" refuted if the interval lies above {WEAK}."
        ),
        refuted_by=f"A rank correlation above {WEAK}: no fall, or one too weak to matter.",
        runs=embeddings,
        decide=decide_horizon,
        holds=partial(made_embeddings, -0.15),
        fails=partial(made_embeddings, 0.05),
    ),
    Claim(
        id="o-35-heads-predict",
        number=35,
        seen=(
            "A run on one text; heads were added because it could not be decided, bars did not"
            " change."
        ),
        source="esscher, sensitivity of single heads",
        statement=(
            "The relative error of a head's output, at the full model's inputs, tells how much the"
            " model's next tokens change when this head alone drops keys."
        ),
        hypothesis=(
            "SmolLM2-135M, the first 4 and a fifth of the other keys of a prefill kept at random."
        ),
        rule=(
            "Supported if the rank correlation over heads of the error with the divergence of the"
            f" next token is above {USEFUL} with its 99.9 % interval; refuted if it is below."
        ),
        refuted_by=f"A rank correlation below {USEFUL}.",
        runs=single,
        decide=decide_single,
        holds=partial(made_single, 0.3),
        fails=partial(made_single, 30.0),
    ),
)

"""Probes that several claims read: one spec each, so that a run is done once."""

from __future__ import annotations

from typing import Literal, get_args

from esscher.models.corpus.spec import CorpusSpec
from esscher.models.probe.spec import ProbeSpec
from esscher.reproduce.claim import Scale

__all__ = ["DOMAINS", "encoder", "language_model", "windows"]

Domain = Literal["prose", "code", "legal"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
POOL = {"quick": 8192, "full": 16384}  # tokens
ALPHAS = (0.25, 1.0, 2.0)  # what scores are multiplied with
SPARSE = (
    "random",
    "sinks:1+recent",
    "sinks:1+recent:16+random:reweight",
    "heavy",
    "topk",
    "neyman",
)
"""Random keys, Longformer's window (the keys nearest to a query) with a global first token,
BigBird's with random keys beside, keys shared by the queries, keys of each query, and the floor.
"""


def encoder(scale: Scale, seed: int, packaged: Domain = "prose") -> ProbeSpec:
    """Every head of MiniLM on a pool of packaged text; of the prose also output moments and scaled
    scores.
    """
    quick, prose = scale == "quick", packaged == "prose"
    return ProbeSpec(
        model="minilm",
        corpus=CorpusSpec(packaged=packaged, max_tokens=POOL[scale]),
        queries=48 if quick else 128,
        kept_queries=12 if quick else 32,
        moments=(30 if quick else 100) if prose else 0,
        scales=ALPHAS if prose else (),
        seed=seed,
    )


def windows(scale: Scale, seed: int) -> ProbeSpec:
    """Every head of MiniLM, a query's own window of 512 tokens, and the errors of sparse
    variants.
    """
    quick = scale == "quick"
    return ProbeSpec(
        model="minilm",
        corpus=CorpusSpec(packaged="prose", max_tokens=1024 if quick else 4096),
        window=512,
        pool="sequence",
        queries=32 if quick else 128,
        kept_queries=16 if quick else 64,
        rules=SPARSE,
        seed=seed,
    )


def language_model(scale: Scale, seed: int) -> ProbeSpec:
    """Heads of SmolLM2, each query at the end of its window, with scaled scores: every third layer,
    or all.

    Exponents are fitted to at most an eighth of the keys: beyond, draws with replacement have met
    all of them, and the error falls because the keys run out, however slow the head.
    """
    quick = scale == "quick"
    window = 1024 if quick else 2048
    return ProbeSpec(
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

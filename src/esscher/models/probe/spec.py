"""What a probe measures, as plain data: the same as a YAML file, as flags and as a Python object."""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from esscher.models.corpus.spec import CorpusSpec
from esscher.runs import RunSpec, register

__all__ = ["ProbeSpec", "drawn_ladder", "kept_ladder", "own_ladder"]

WINDOW = 512  # tokens of a window unless the model takes fewer
KEYS = 16384  # tokens of text unless told otherwise
SMALLEST = 16  # first n of a ladder
BEYOND = 1024  # how far beyond the pool the errors of draws with replacement are followed
ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # a class in a module
FRACTIONS = (0.75, 0.9, 1.0)  # of the pool, at the end of the ladder of kept keys


class ProbeSpec(RunSpec):
    """What ``esscher probe`` runs."""

    job: Literal["probe"] = "probe"
    model: str = Field(default="packaged", description="hub name or folder; packaged is the model that comes as a package")
    revision: str | None = Field(default=None, description="revision of a hub model")
    corpus: CorpusSpec = CorpusSpec(max_tokens=KEYS)
    window: PositiveInt | None = Field(default=None, description="tokens of a window, special ones included")
    pool: Literal["corpus", "sequence"] = Field(
        default="corpus",
        description="whose keys: corpus (of all windows) or sequence (of a query's own, as the mask allows)",
    )
    special: bool = Field(default=False, description="special tokens are part of the pool")
    queries: PositiveInt = Field(default=256, description="queries of each head")
    kept_queries: PositiveInt = Field(default=64, description="of them, queries with errors of kept keys, and with tails")
    layers: tuple[int, ...] | None = Field(default=None, description="layers, 0,2-4; all when left out")
    heads: tuple[int, ...] | None = Field(default=None, description="heads, 0,2-4; all when left out")
    n: tuple[int, ...] | None = Field(default=None, description="token numbers: 16:4096:9 or 100,1000; up to the pool")
    epsilons: tuple[float, ...] = Field(
        default=(0.05, 0.1, 0.2), description="relative error to count tokens for; may be repeated"
    )
    moments: int = Field(default=0, ge=0, description="Monte Carlo repeats of the outputs' mean and covariance")
    moments_n: tuple[int, ...] | None = Field(default=None, description="token numbers of these")
    statistics: tuple[str, ...] = Field(default=(), description="statistics from elsewhere, 'module:Class' each")
    batch: PositiveInt = Field(default=4096, description="tokens of one forward pass")
    part: PositiveInt = Field(default=131072, description="tokens of one piece of a large corpus")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32", description="floating point of the model: float32, float64, bfloat16 or float16"
    )
    threads: PositiveInt = 1

    @field_validator("n", "moments_n", mode="before")
    @classmethod
    def _ladder(cls, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        from esscher.convergence.montecarlo.ladder import parse_ladder  # help and flags do not wait for torch

        return tuple(parse_ladder(value).tolist())

    @field_validator("statistics")
    @classmethod
    def _entries(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not ENTRY.fullmatch(entry):
                raise ValueError(f"expected 'module:Class', got {entry!r}")
        return value

    @field_validator("layers", "heads")
    @classmethod
    def _numbers(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not value or min(value) < 0:
            raise ValueError(f"expected whole numbers from 0 on, got {list(value)}")
        return tuple(sorted(set(value)))

    @field_validator("epsilons")
    @classmethod
    def _errors(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < epsilon < 1 for epsilon in value):
            raise ValueError(f"expected relative errors between 0 and 1, got {list(value)}")
        return tuple(sorted({*value, 0.1}))


def own_ladder(spec: ProbeSpec, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of tokens up to the pool's size: those given, or half octaves from 16 on and the pool's size."""
    if spec.n is not None:
        largest = max(spec.n)
        if largest > keys:
            raise ValueError(f"n: the pool has {keys} keys, got n = {largest}; give more text (--max-tokens) or smaller n")
        return np.array(spec.n, dtype=np.int64)
    halves = SMALLEST * np.sqrt(2.0) ** np.arange(2 * max(int(np.log2(max(keys, SMALLEST) / SMALLEST)), 0) + 2)
    inside = np.unique(halves[halves <= keys].round().astype(np.int64))
    return np.unique(np.append(inside, keys))


def drawn_ladder(spec: ProbeSpec, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For draws with replacement: also octaves beyond the pool, where the law of the pool is still the law."""
    own = own_ladder(spec, keys)
    octaves = int(np.log2(BEYOND))
    return np.unique(np.concatenate([own, own[-1] * 2 ** np.arange(1, octaves + 1)]))


def kept_ladder(spec: ProbeSpec, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For kept keys: those given below the pool's size, or octaves and the last steps; and the pool, where the error is 0."""
    if spec.n is not None:
        return np.unique([*(n for n in spec.n if n < keys), keys])
    octaves = SMALLEST * 2 ** np.arange(int(np.ceil(np.log2(max(keys / SMALLEST, 1)))))
    ends = np.array([max(1, round(keys * fraction)) for fraction in FRACTIONS])
    return np.unique(np.concatenate([octaves[octaves < 0.7 * keys], ends]).astype(np.int64))


register("probe", "esscher.models.probe.job:PROBE")  # here, so that naming the job does not import what computes it

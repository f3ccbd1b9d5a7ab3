"""What a probe measures, as plain data: the same as a YAML file, as flags and as a Python
object.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveInt, field_validator

from esscher.corpus.spec import CorpusSpec, open_rules, places, split_numbers
from esscher.runs import RunSpec, register

Counts = npt.NDArray[np.int64]

WINDOW = 512  # tokens of a window unless the model takes fewer
OWN_WINDOW = 2048  # the same where a window is the pool of its own queries
KEYS = 16384  # tokens of text unless told otherwise
ALLOWED = 0.1  # relative error that budgets allow, where nothing else is asked
SMALLEST = 16  # first n of a ladder
BEYOND = 1024  # how far beyond the pool the errors of draws with replacement are followed
FIT = (64, 4096)  # numbers of keys that exponents are fitted between where the pool is the corpus
# in a query's own context: from SMALLEST to this part of its keys; beyond, draws with replacement
# meet the same keys again, and the error falls because they run out
OWN_FIT = 8
COMPARED = 1024  # keys at which the error of every head is told
FIXED = (64, 256, COMPARED, 4096)  # keys that every curve has
FEWEST_POINTS = 3  # of a fit
FLOOR = "neyman"  # the keep rule of least error, to first order, that no other goes below
RULES = (  # keep rules that are compared unless told otherwise
    "random",
    "streamingllm",
    "snapkv",
    "heavy",
    "keynorm",
    "expected",
    "topk",
    "topk:16+random:reweight",
    "neyman:shared",
    FLOOR,
)
# of a window's keys, that they keep
SHARES = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.4, 0.6, 0.8)
NO_RULES = ("none",)  # as a flag, which has no empty list


class ProbeSpec(RunSpec):
    """What ``esscher probe`` runs."""

    job: Literal["probe"] = "probe"
    model: str = Field(
        default="packaged",
        description="minilm (default) or smollm2, a folder, a GGUF file or a hub name",
    )
    revision: str | None = Field(default=None, description="revision of a hub model")
    corpus: CorpusSpec = CorpusSpec(max_tokens=KEYS)
    window: PositiveInt | None = Field(
        default=None, description="tokens of a window, special tokens included"
    )
    pool: Literal["auto", "corpus", "sequence"] = Field(
        default="auto",
        description="keys that a query sees: corpus (of the whole text), sequence (of its own"
        " window) or auto (sequence for a causal model)",
    )
    positions: tuple[int, ...] | None = Field(
        default=None,
        description="positions of the queries in a window, from 0, e.g. 511,1023",
    )
    queries: PositiveInt = Field(default=256, description="queries of each head")
    kept_queries: PositiveInt = Field(
        default=64, description="queries used for the costly statistics"
    )
    layers: tuple[int, ...] | None = Field(
        default=None, description="layers, e.g. 0,2-4 (default: all)"
    )
    heads: tuple[int, ...] | None = Field(
        default=None, description="heads, e.g. 0,2-4 (default: all)"
    )
    n: tuple[int, ...] | None = Field(
        default=None, description="numbers of keys to store errors at, e.g. 16:4096:9 or 100,1000"
    )
    fit: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="smallest and largest n of the fit of exponents"
    )
    epsilons: tuple[float, ...] = Field(
        default=(0.05, 0.1, 0.2),
        description="relative error to find the tokens needed for; may be repeated",
    )
    moments: int = Field(
        default=0, ge=0, description="Monte Carlo repeats of the outputs' mean and covariance"
    )
    moments_n: tuple[int, ...] | None = Field(default=None, description="token numbers of these")
    rules: tuple[str, ...] | None = Field(
        default=None,
        description="eviction rules to compare, e.g. snapkv, or none; may be repeated",
    )
    scales: tuple[float, ...] = Field(
        default=(),
        description="also measure heads with scores multiplied by these numbers, e.g. 0.1,1,10",
    )
    statistics: tuple[str, ...] = Field(
        default=(), description="statistics from elsewhere, 'module:Class' each"
    )
    batch: PositiveInt = Field(default=4096, description="tokens of one forward pass")
    part: PositiveInt = Field(default=131072, description="tokens of one part of a large corpus")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32",
        description="floating point of the model: float32, float64, bfloat16, float16",
    )

    @field_validator("n", "moments_n", mode="before")
    @classmethod
    def _ladder(cls, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        # help and flags do not wait for torch
        from esscher.inputs import parse_ladder

        return tuple(parse_ladder(value).tolist())

    @field_validator("fit")
    @classmethod
    def _range(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and fit_points(value).size < FEWEST_POINTS:
            raise ValueError(
                f"expected a smaller and a larger number with at least {FEWEST_POINTS} half octaves"
                f" between them, got {value[0]} and {value[1]}"
            )
        return value

    @field_validator("scales", mode="before")
    @classmethod
    def _factors(cls, value: Any) -> Any:
        return split_numbers(value, "0.1,1,10")

    @field_validator("scales")
    @classmethod
    def _positive(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(scale > 0 for scale in value):
            raise ValueError(f"expected finite numbers above 0, got {list(value)}")
        return tuple(sorted(set(value)))

    @field_validator("rules", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> tuple[str, ...] | None:
        """No rule is asked for by NO_RULES."""
        if value is None:
            return None
        none = value in (NO_RULES[0], NO_RULES, list(NO_RULES))
        return () if none else open_rules(value, fixed=True)

    @property
    def compared(self) -> tuple[str, ...]:
        """The keep rules whose errors are found; none where the pool is the corpus, whose keys have
        no place.
        """
        return () if self.pool != "sequence" else RULES if self.rules is None else self.rules

    @field_validator("layers", "heads", "positions")
    @classmethod
    def _numbers(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return places(value)

    @field_validator("epsilons")
    @classmethod
    def _errors(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < epsilon < 1 for epsilon in value):
            raise ValueError(f"expected relative errors between 0 and 1, got {list(value)}")
        return tuple(sorted({*value, 0.1}))


def own_ladder(spec: ProbeSpec, keys: int) -> Counts:
    """The numbers of tokens up to the pool's size: those given, or half octaves from 16 on and the
    pool's size.
    """
    if spec.n is not None:
        return np.array(spec.n if min(spec.n) <= keys else (keys, *spec.n), dtype=np.int64)
    return fit_points((SMALLEST, keys))


def fit_range(spec: ProbeSpec, keys: int) -> tuple[int, int]:
    """The smallest and the largest n that exponents are fitted between; ``keys``: that a query
    sees, on average.

    In an own context of few keys the range begins below SMALLEST, so that it has enough points.
    """
    if spec.fit is not None:
        return spec.fit
    if spec.pool != "sequence":
        return FIT
    high = max(4, keys // OWN_FIT)
    return min(SMALLEST, high // 2), high


def fit_points(fit: tuple[int, int]) -> Counts:
    """The n that an exponent is fitted to: half octaves from the smallest on, and the largest."""
    low, high = fit
    halves = low * np.sqrt(2.0) ** np.arange(math.floor(2 * np.log2(high / low)) + 1)
    return np.unique(np.append(halves.round().astype(np.int64), high))


def drawn_ladder(spec: ProbeSpec, keys: int) -> Counts:
    """For draws with replacement: also the pool's size and octaves beyond, where the law of the
    pool is still the law, and the n that are the same for every pool: those of the fit, and FIXED.
    """
    beyond = keys * 2 ** np.arange(int(np.log2(BEYOND)) + 1)
    return np.unique(
        np.concatenate(
            [own_ladder(spec, keys), beyond, fit_points(fit_range(spec, keys)), FIXED]
        ).astype(np.int64)
    )


def kept_sizes(keys: int) -> Counts:
    """For keep rules: the numbers of keys that are SHARES of a window's, one at least."""
    return np.maximum(1, np.round(np.array(SHARES) * keys)).astype(np.int64)


# here, so that naming the job does not import what computes it
register("probe", "esscher.probe.job:PROBE")


# ---- The settings of ``es.probe``, under the names of the flags.

# a flag, and the field that holds several of them
RENAMED = {"epsilon": "epsilons", "scale": "scales"}


def read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ProbeSpec from settings."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "rules" and not isinstance(value, str | None):
            value = [str(rule) for rule in value]  # rules may be objects
        elif name in RENAMED and not isinstance(value, str | Iterable):
            value = [value]
        elif isinstance(value, Iterable) and not isinstance(value, str | Mapping):
            value = [part.item() if hasattr(part, "item") else part for part in value]
        found[RENAMED.get(name, name)] = value
    own = {name: found.pop(name) for name in CorpusSpec.model_fields if name in found}
    return {**found, "corpus": {"max_tokens": KEYS, **found.pop("corpus", {}), **own}}

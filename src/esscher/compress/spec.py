"""What is asked of a model that keeps a few keys, as plain data: the same as a YAML file, as flags
and as a Python object.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from esscher.corpus.spec import CorpusSpec, open_rules, places, split_numbers
from esscher.runs import RunSpec, register

UNIFORM, CUT, _ = SPLITS = ("uniform", "cut", "budget")
# tokens of a window: of a language model before it is continued, of an encoder
PREFILL, ENCODED = 1024, 256
DECODE = 128
# of a cache: sinks and the last queries' own keys are always kept, as the presses of others do
RULES = (
    *(
        "sinks:4+random",
        "sinks:4+recent",
        "sinks:4+recent:32+keynorm",
        "sinks:4+recent:32+expected",
    ),
    *("sinks:4+recent:32+heavy", "sinks:4+recent:32+heavy:pool=5"),
    *("sinks:4+recent:32+impact", "sinks:4+recent:32+impact:pool=5"),
)
EVERY = (  # of queries that each choose for themselves, or stand in an encoder
    *(
        "random",
        "sinks:4+random:reweight",
        "sinks:1+recent",
        "keynorm",
        "expected",
        "heavy",
        "impact",
        "topk",
    ),
)


class DownstreamSpec(RunSpec):
    """What ``esscher downstream`` runs."""

    job: Literal["downstream"] = "downstream"
    model: str = Field(
        default="packaged",
        description="minilm (packaged is the same) or smollm2, a folder, a GGUF file or a hub name",
    )
    revision: str | None = Field(default=None, description="revision of a hub model")
    corpus: CorpusSpec = CorpusSpec()
    texts: PositiveInt = Field(
        default=3, description="texts, windows spread evenly over the corpus"
    )
    window: PositiveInt | None = Field(
        default=None, description="tokens of a text; of a language model those of the prefill"
    )
    decode: PositiveInt = Field(
        default=DECODE, description="tokens by which a language model continues each text"
    )
    when: Literal["auto", "cache", "every"] = Field(
        default="auto",
        description=(
            "cache (prefill on all keys, then a few), every (every query keeps a few) or auto"
        ),
    )
    rules: tuple[str, ...] | None = Field(
        default=None, description="keep rules such as sinks:4+recent; may be repeated"
    )
    sizes: tuple[float, ...] = Field(
        default=(0.05, 0.1, 0.2),
        description=(
            "shares of the cache kept, below 1, or keys of a head on average, from 1 on; separated"
            " by commas"
        ),
    )
    splits: tuple[Literal["uniform", "cut", "budget"], ...] = Field(
        default=("uniform",),
        description=(
            "how heads share the keys: uniform (the same share of each head's cache), cut (one cut"
            " over all heads) or budget; may be repeated"
        ),
    )
    budget: str | None = Field(
        default=None, description="run of esscher probe whose errors split the keys between heads"
    )
    weights: str | None = Field(
        default=None,
        description=(
            "what heads count in that split: none (all alike), or a run with --sensitivity; the"
            " probe's own gradients when left out"
        ),
    )
    draws: PositiveInt = Field(default=2, description="draws of rules that keep by chance")
    observe: PositiveInt = Field(
        default=64, description="last queries of a prefill that the rules of a cache look at"
    )
    layers: tuple[int, ...] | None = Field(
        default=None, description="layers that drop keys, 0,2-4; all when left out"
    )
    heads: tuple[int, ...] | None = Field(
        default=None, description="query heads that drop keys, 0,2-4; all when left out"
    )
    needles: int = Field(
        default=0, ge=0, description="facts planted in the texts, to be found again"
    )
    sensitivity: bool = Field(
        default=False, description="also compress one head at a time, by the first rule and size"
    )
    together: bool = Field(
        default=False,
        description="also errors of layers at fixed inputs, heads together, predicted and measured",
    )
    depth: bool = Field(
        default=False, description="also drop keys in one layer at a time, against the first order"
    )
    dtype: Literal["float32", "float64"] = Field(
        default="float32", description="floating point of the model: float32 or float64"
    )

    @field_validator("sizes", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return split_numbers(value, "0.05,0.1 or 64,128")

    @field_validator("sizes")
    @classmethod
    def _sizes(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or not all(size > 0 and (size < 1 or size == int(size)) for size in value):
            raise ValueError(
                f"expected shares above 0 and below 1, or whole numbers of keys, got {list(value)}"
            )
        return tuple(sorted(set(value)))

    @field_validator("rules", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError(f"expected a list of keep rules, got {value!r}")
        return None if value is None else open_rules(value)

    @field_validator("splits")
    @classmethod
    def _splits(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in value) or (UNIFORM,)

    @field_validator("layers", "heads")
    @classmethod
    def _places(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return places(value)

    @property
    def compared(self) -> tuple[str, ...]:
        """The rules, those for the way keys are kept where none are given."""
        return self.rules if self.rules is not None else RULES if self.when == "cache" else EVERY

    def share(self, size: float, held: float) -> float:
        """A size as a share of the cache; ``held``: keys that a head's cache holds, on average."""
        return size if size < 1 else min(1.0, size / held)


# naming the job does not import what computes it
register("downstream", "esscher.compress.job:DOWNSTREAM")

"""What ``esscher compress`` measures, as plain data: YAML file, flags and Python object alike."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from esscher.corpus.spec import CorpusSpec, open_rules, places, split_numbers
from esscher.runs import RunSpec, register

PREFILL, ENCODED = 1024, 256  # tokens of a prompt; of a text for an encoder
DECODE = 128
# ends of a rule's text: kept keys get new values and weights; new values alone
REFIT, VALUES = "+refit", "+values"
RULES = (
    "fisher+refit",
    "fisher",
    "kvzip_plus",
    "kvzip",
    "kvgrad",
    "restkv",
    "snapkv",
    "expected",
    "streamingllm",
    "random",
)
EVERY = ("random", "sinks:1+recent", "expected", "heavy", "impact", "topk")  # each query its own


def parted(text: str) -> tuple[str, str]:
    """A rule's text without its end, and the end: ``REFIT``, ``VALUES`` or nothing."""
    end = next((end for end in (REFIT, VALUES) if text.endswith(end)), "")
    return text.removesuffix(end), end


class CompressSpec(RunSpec):
    """What ``esscher compress`` runs."""

    job: Literal["compress"] = "compress"
    model: str = Field(
        default="packaged",
        description="minilm (packaged is the same) or smollm2, a folder, a GGUF file or a hub name",
    )
    revision: str | None = Field(default=None, description="revision of a hub model")
    corpus: CorpusSpec = CorpusSpec()
    keep: tuple[float, ...] | None = Field(
        default=None,
        description="shares of the cache to keep, e.g. 0.1,0.2 (default: 0.05,0.1,0.2)",
    )
    kl: PositiveFloat | None = Field(
        default=None,
        description="instead of --keep: the loss that may be added, in nats per token",
    )
    rules: tuple[str, ...] | None = Field(
        default=None,
        description=(
            "eviction rules, e.g. fisher or sinks:4+recent, with +refit at the end to give"
            " kept keys new values and weights, +values values alone; may be repeated"
        ),
    )
    splits: tuple[Literal["uniform", "cut", "layer", "pages", "exact"], ...] | None = Field(
        default=None,
        description=(
            "how heads share the budget: cut (one threshold for all heads), layer (one for each"
            " layer), exact (by exact errors in nats), uniform (the same share each), pages (blocks"
            " of 16 keys); may be repeated (default: cut for fisher, exact for other scores by"
            " queries, else uniform)"
        ),
    )
    texts: PositiveInt = Field(default=3, description="prompts, spread evenly over the text")
    window: PositiveInt | None = Field(
        default=None, description="tokens of a prompt (default: 1024, 256 for an encoder)"
    )
    decode: PositiveInt = Field(default=DECODE, description="tokens decoded after each prompt")
    again: PositiveInt | None = Field(
        default=None,
        description=(
            "compress the cache again every so many decoded tokens (default: later keys are all"
            " kept)"
        ),
    )
    needles: NonNegativeInt = Field(
        default=0,
        description=(
            "prompts with planted facts, asked for after compression, for each kind of"
            " --needle-kinds"
        ),
    )
    needle_kinds: tuple[Literal["single", "several", "distractor"], ...] = Field(
        default=("single", "several", "distractor"),
        description=(
            "kinds of planted facts: single (one fact), several (four facts, all asked for),"
            " distractor (a fact beside a similar one); may be repeated (default: all three)"
        ),
    )
    check: bool = Field(
        default=False, description="also predict with cross terms between heads, beside measured KL"
    )
    when: Literal["auto", "cache", "every"] = Field(
        default="auto",
        description=(
            "when keys are dropped: cache (once, after the prompt), every (at every query, for"
            " encoders) or auto"
        ),
    )
    draws: PositiveInt = Field(default=2, description="draws of rules that keep by chance")
    observe: PositiveInt = Field(
        default=64, description="last queries of the prompt that rules such as snapkv read"
    )
    replay: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description=(
            "share of the prompt that is replayed to score keys; 0 is faster and finds fewer facts"
        ),
    )
    sinks: NonNegativeInt = Field(default=4, description="first keys that are always kept")
    recent: NonNegativeInt = Field(default=16, description="last keys that are always kept")
    layers: tuple[int, ...] | None = Field(
        default=None, description="layers to compress, e.g. 0,2-4 (default: all)"
    )
    sensitivity: bool = Field(
        default=False, description="also compress one head at a time, by the first rule and size"
    )
    together: bool = Field(
        default=False,
        description=(
            "also compute the exact error of each layer when its heads lose the same random keys"
        ),
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32", description="floating point of the model"
    )

    @field_validator("keep", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        return None if value is None else split_numbers(value, "0.05,0.1")

    @field_validator("keep")
    @classmethod
    def _keep(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and (not value or not all(0 < share <= 1 for share in value)):
            raise ValueError(f"expected shares of the cache above 0 and up to 1, got {list(value)}")
        return None if value is None else tuple(sorted(set(value)))

    @field_validator("rules", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        texts = (value,) if isinstance(value, str) else tuple(value)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected a list of rules, got {value!r}")
        found = (open_rules(rule)[0] + end for rule, end in map(parted, texts))
        return tuple(dict.fromkeys(found))

    @field_validator("layers")
    @classmethod
    def _places(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return places(value)

    @model_validator(mode="after")
    def _again(self) -> CompressSpec:
        if self.again is not None and self.decode % self.again:
            raise ValueError(
                f"again: expected a divisor of the {self.decode} decoded tokens, got {self.again}"
            )
        return self

    @property
    def compared(self) -> tuple[str, ...]:
        """The rules; the usual ones where none are given."""
        return self.rules if self.rules is not None else EVERY if self.when == "every" else RULES

    @property
    def shares(self) -> tuple[float, ...]:
        """Sizes asked for; none where a loss is asked for instead."""
        return () if self.kl is not None else self.keep or (0.05, 0.1, 0.2)


# naming the job does not import what computes it
register("compress", "esscher.compress.job:COMPRESS")

"""Settings of ``esscher converge normality``, as plain data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from esscher.errors.montecarlo.spec import Count, HeadSpec, Ladder, Law
from esscher.probe.spec import KEYS, ProbeSpec
from esscher.runs import RunSpec, register
from esscher.runs.spec import Plain


class LawCase(Plain):
    """Tokens of a law, and a head for them."""

    name: str
    law: Law
    head: HeadSpec = HeadSpec()


class ModelCase(Plain):
    """A head of a model: its keys and values, pooled over a text, drawn with replacement; its own
    queries.
    """

    name: str
    layer: Annotated[int, Field(ge=0)]
    head: Annotated[int, Field(ge=0)]


class NormalitySpec(RunSpec):
    """What ``esscher converge normality`` runs: cases by name, laws and heads of one model."""

    job: Literal["normality"] = "normality"
    title: str = ""
    laws: tuple[LawCase, ...] = ()
    heads: tuple[ModelCase, ...] = ()
    model: str = ProbeSpec.model_fields["model"].default
    tokens: PositiveInt = KEYS  # of text, in the pool of the model's heads
    n: Ladder = Field(description="token numbers: 1e3:3e4:12 or 100,1000")
    repeats: int = Field(default=500, ge=2, le=1_000_000, description="draws of the tokens")
    queries: Count = 3
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    dtype: Literal["float64"] = "float64"

    @model_validator(mode="after")
    def _some_cases(self) -> NormalitySpec:
        names = [case.name for case in self.cases]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                "laws and heads: expected some cases, each name once, got"
                f" {', '.join(names) or 'none'}"
            )
        return self

    @property
    def cases(self) -> tuple[LawCase | ModelCase, ...]:
        return (*self.laws, *self.heads)

    @property
    def probe(self) -> ProbeSpec:
        """The probe whose pool and queries these are."""
        return ProbeSpec.read(
            {
                "model": self.model,
                "corpus": {"max_tokens": self.tokens},
                "pool": "corpus",
                "queries": self.queries,
                "kept_queries": self.queries,
                "layers": sorted({case.layer for case in self.heads}),
                "seed": self.seed,
                "device": self.device,
                "threads": self.threads,
            }
        )


# naming the job does not import what computes it
register("normality", "esscher.papers.normality:NORMALITY")

"""What the commands ``esscher icl`` ask for and run, as plain data; which runs the figures of [S]
need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from esscher.errors.montecarlo.spec import read_ladder
from esscher.runs import RunSpec, register
from esscher.runs.spec import Plain, Seed

LENGTHS = Field(description="prompt lengths: 10,100,1000 or 10:1e4:7")
NAMED = ("scaled", "identity")


def read_task_cov(value: Any) -> Any:
    """W as a name or a matrix; a file, with a row of numbers a line, is read, so that a spec does
    not depend on it.
    """
    if not isinstance(value, str) or value in NAMED:
        return value
    try:
        lines = Path(value).read_text("utf-8").splitlines()
        rows = tuple(
            tuple(float(part) for part in line.replace(",", " ").split())
            for line in lines
            if line.strip()
        )
    except (OSError, ValueError) as cause:
        expected = f"expected {', '.join(NAMED)} or a file with a row of numbers a line"
        raise ValueError(f"task_cov: {expected}, got {value!r}: {cause}") from cause
    return rows


Covariances = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="of x: isotropic, kms:RHO or diag:A,B,...; several separated by spaces",
    ),
]
Lengths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), LENGTHS]
OrderedLengths = Annotated[
    tuple[int, ...], BeforeValidator(lambda value: read_ladder(value, "lengths")), LENGTHS
]
Dim = Annotated[int, Field(ge=1, le=4096, description="dimension of the covariates")]
Noise = Annotated[float, Field(ge=0, description="variance of the label noise")]
TaskCov = Annotated[
    str | tuple[tuple[float, ...], ...],
    BeforeValidator(read_task_cov),
    Field(
        description="of the tasks w: scaled (I/d), identity, or a file with a row of numbers a line"
    ),
]
QueryInside = Annotated[bool, Field(description="put the query's own token into its prompt")]
Alpha = Annotated[
    Annotated[float, Field(gt=0)] | None,
    Field(description="size of the first weights; by default half of Theorem 5.2's limit"),
]


Part = Annotated[float, Field(gt=0)]


class RiskFlags(Plain):
    """A task and the prompts on which a layer is judged."""

    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 100, 1000)
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    query_inside: QueryInside = False
    query_covariance: str | None = Field(
        default=None, description="of the query, where it is not that of the prompt"
    )


class LengthFlags(Plain):
    """How close to the best risk the end of the flow is to come."""

    epsilon: tuple[Part, ...] = Field(
        default=(0.01,),
        min_length=1,
        description="excess risks, half mean squared errors, separated by commas",
    )
    covariances: Covariances = ("isotropic", "kms:0.5")
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    alpha: Alpha = None
    query_inside: QueryInside = False


Optimizer = Literal["sgd", "adam"]
LossName = Literal["square", "half"]
Schedule = Literal["constant", "linear", "cosine"]


class TrainSpec(RunSpec):
    """What ``esscher icl train`` runs; the defaults are the experiments of [S], appendix A."""

    job: Literal["icl-train"] = "icl-train"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: Lengths = (10, 100, 1000)
    seeds: int = Field(
        default=3, ge=1, le=10_000, description="how many first weights are trained from"
    )
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    steps: int = Field(default=500_000, ge=1, le=10**9, description="steps of training")
    batch: int = Field(default=128, ge=1, le=1 << 20, description="prompts in a step")
    rate: float = Field(default=1e-3, gt=0, description="learning rate")
    optimizer: Optimizer = Field(default="sgd", description="optimizer: sgd or adam")
    loss: LossName = Field(
        default="square",
        description="loss: square, or half of it as [S] writes; SGD on half is half the rate",
    )
    schedule: Schedule = Field(
        default="constant", description="course of the rate: constant, linear or cosine"
    )
    warmup: int = Field(default=0, ge=0, le=10**9, description="steps over which the rate rises")
    heads: int = Field(
        default=1, ge=1, le=1024, description="heads of each model; more than one is slower"
    )
    records: int = Field(
        default=200, ge=1, le=10**6, description="steps at which training is recorded, about"
    )
    evaluation: int = Field(
        default=4096, ge=2, le=10**9, description="prompts that measure the error at each"
    )
    final_evaluation: int = Field(
        default=100_000, ge=2, le=10**9, description="prompts that measure it at the end"
    )
    bound: float = Field(
        default=1e4, gt=0, description="a batch whose loss is not below this stops its model"
    )

    @field_validator("lengths")
    @classmethod
    def _small_first(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("covariances")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))


PAPER = TrainSpec()


class FlowSpec(RunSpec):
    """What ``esscher icl flow`` runs. The flow starts where Theorem 5.2 of [S] does."""

    job: Literal["icl-flow"] = "icl-flow"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 30, 100, 300, 1000, 10_000, 100_000, 1_000_000)
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    alpha: Alpha = None
    query_inside: QueryInside = False
    trajectory: bool = Field(
        default=False,
        description="also the flows in time, with their distances and Lemma E.1's bound",
    )
    until: float = Field(default=100.0, gt=0, description="time at which the flows in time end")
    points: int = Field(default=24, ge=2, le=10**4, description="times at which they are recorded")
    draws: int = Field(
        default=4000, ge=2, le=10**9, description="prompts that sample the best predictor's error"
    )


class StabilitySpec(RunSpec):
    """What ``esscher icl stability`` runs: flows of (O, V, K, Q) from the first weights of as many
    seeds.
    """

    job: Literal["icl-stability"] = "icl-stability"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 100, 1000)
    starts: int = Field(
        default=100,
        ge=1,
        le=10**6,
        description="how many first weights flow, as icl train --seeds draws them",
    )
    training: float = Field(
        default=1000.0,
        gt=0,
        le=1e9,
        description="time of training, twice rate times steps: who has not arrived then is stuck",
    )
    until: float = Field(
        default=1e5, gt=0, le=1e9, description="time at which a flow ends, to see who arrives later"
    )
    dim: Dim = 5
    noise: Noise = 0.1
    times: int = Field(default=100, ge=2, le=10**5, description="times at which a flow is recorded")
    block: int = Field(default=5, ge=1, le=10**6, description="starts in a unit of work")

    @model_validator(mode="after")
    def _ordered(self) -> StabilitySpec:
        if self.until < self.training:
            raise ValueError(
                f"until: expected a time of at least that of training, {self.training:g}, got"
                f" {self.until:g}"
            )
        return self


class ConcentrationSpec(RunSpec):
    """What ``esscher icl concentration`` runs."""

    job: Literal["icl-concentration"] = "icl-concentration"
    covariances: Covariances = ("isotropic", "kms:0.5")
    lengths: OrderedLengths = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
    dim: Dim = 5
    noise: Noise = 0.1
    task_cov: TaskCov = "scaled"
    repeats: int = Field(
        default=32, ge=2, le=10**6, description="groups of prompts, resampled for the intervals"
    )
    prompts: int = Field(default=128, ge=1, le=1 << 20, description="prompts in a group")


# here, so that naming a job does not import what computes it
register("icl-train", "esscher.icl.jobs:TRAIN")
register("icl-flow", "esscher.icl.jobs:FLOW")
register("icl-stability", "esscher.icl.jobs:STABILITY")
register("icl-concentration", "esscher.icl.jobs:CONCENTRATION")


ISOTROPIC, KMS = "isotropic", "kms:0.5"


@dataclass(frozen=True)
class IclFigure:
    """A figure of [S]: what it shows, for which covariance, and the runs it reads."""

    name: str
    shows: str
    covariance: str
    title: str
    runs: tuple[str, ...]


def _pair(
    numbers: tuple[int, int], shows: str, title: str, runs: tuple[str, ...]
) -> list[IclFigure]:
    names = (ISOTROPIC, "isotropic"), (KMS, "Kac-Murdock-Szegoe 0.5")
    return [
        IclFigure(f"fig{number}", shows, covariance, f"{title}, {name} covariates", runs)
        for number, (covariance, name) in zip(numbers, names, strict=True)
    ]


FIGURES = {
    figure.name: figure
    for figure in sorted(
        [
            *_pair((1, 5), "concentration", "Softmax attention becomes linear", ("concentration",)),
            *_pair((2, 6), "final", "Risk after training", ("train", "flow")),
            *_pair((3, 7), "distance", "Distance between the trained models", ("train",)),
            *_pair((4, 8), "training", "Risk along training", ("train", "flow")),
        ],
        key=lambda figure: figure.name,
    )
}


class FigureFlags(Plain):
    """Which figures, and of what size."""

    only: str | None = Field(default=None, description="some figures: fig2,fig3; all when left out")
    quick: bool = Field(default=False, description="minutes instead of the paper's size")
    seed: Seed = 0


def choose_figures(names: str | None) -> list[IclFigure]:
    """Figures by name, "fig2,fig3" or "2,3"; all of them when nothing is asked."""
    if names is None:
        return list(FIGURES.values())
    chosen = []
    for name in names.split(","):
        key = f"fig{name.strip().lower().removeprefix('figure').removeprefix('fig')}"
        if key not in FIGURES:
            raise ValueError(f"figure: expected some of {', '.join(FIGURES)}, got {name.strip()!r}")
        chosen.append(FIGURES[key])
    return list(dict.fromkeys(chosen))


def specs_for(figures: list[IclFigure], quick: bool, seed: int = 0) -> dict[str, RunSpec]:
    """The runs those figures need, for the covariances they show.

    Quick: a rate four times the paper's for a twentieth of its steps, so a fifth of its training
    time; two seeds; fewer and shorter prompts.
    """
    covariances = tuple(dict.fromkeys(figure.covariance for figure in figures))
    needed = {run for figure in figures for run in figure.runs}
    train: dict[str, Any] = {"covariances": covariances, "seed": seed}
    concentration, flow = dict(train), dict(train)
    if quick:
        train |= {
            "lengths": (10, 30, 100),
            "seeds": 2,
            "steps": 25_000,
            "rate": 4e-3,
            "records": 60,
            "final_evaluation": 20_000,
        }
        concentration |= {"lengths": (10, 30, 100, 300, 1000), "repeats": 16, "prompts": 64}
        flow |= {"lengths": (10, 30, 100), "draws": 1000}
    specs = {
        "concentration": ConcentrationSpec(**concentration),
        "train": TrainSpec(**train),
        "flow": FlowSpec(**flow),
    }
    return {name: spec for name, spec in specs.items() if name in needed}

"""Specs of the runs and flags of ``esscher icl``; the figures of [S] and the runs they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from esscher.errors.montecarlo.spec import read_ladder
from esscher.runs import RunSpec, register
from esscher.runs.spec import Plain

if TYPE_CHECKING:
    from esscher.icl.tasks import LinearTask

ISOTROPIC, KMS = "isotropic", "kms:0.5"


def _split(separator: str | None) -> BeforeValidator:
    """Flags are text; specs may have lists."""
    return BeforeValidator(lambda text: text.split(separator) if isinstance(text, str) else text)


Covariances = Annotated[
    tuple[str, ...], _split(None), AfterValidator(lambda names: tuple(dict.fromkeys(names)))
]
Lengths = Annotated[
    tuple[int, ...],
    BeforeValidator(lambda value: read_ladder(value, "lengths")),
    Field(description="prompt lengths: 10,100,1000 or 10:1e4:7"),
]


class _Task(BaseModel):
    """The laws of covariates, tasks and labels; the defaults are those of [S], appendix A."""

    covariances: Covariances = Field(
        default=(ISOTROPIC, KMS),
        min_length=1,
        description="covariance of x: isotropic, kms:RHO or diag:A,B,...; several with spaces",
    )
    dim: int = Field(default=5, ge=1, le=4096, description="dimension of the covariates")
    noise: float = Field(default=0.1, ge=0, description="variance of the label noise")
    task_cov: Literal["scaled", "identity"] = Field(
        default="scaled", description="covariance of the tasks w: scaled (I/d) or identity"
    )

    def task(self, covariance: str) -> LinearTask:
        """The task with one of the covariances."""
        from esscher.icl.tasks import as_task

        return as_task(covariance, self.dim, self.noise, self.task_cov)


class LengthFlags(_Task, Plain):
    """How close to the best risk the end of the flow is to come."""

    epsilon: Annotated[tuple[Annotated[float, Field(gt=0)], ...], _split(",")] = Field(
        default=(0.01,),
        min_length=1,
        description="excess risks (half the mean squared error), separated by commas",
    )


class TrainSpec(_Task, RunSpec):
    """What ``esscher icl train`` runs; the defaults are the experiments of [S], appendix A."""

    job: Literal["icl-train"] = "icl-train"
    lengths: Lengths = (10, 100, 1000)
    seeds: int = Field(
        default=3, ge=1, le=10_000, description="number of random initial weights to train from"
    )
    steps: int = Field(default=500_000, ge=1, le=10**9, description="steps of training")
    batch: int = Field(default=128, ge=1, le=1 << 20, description="prompts in a step")
    rate: float = Field(default=1e-3, gt=0, description="learning rate")
    records: int = Field(
        default=200, ge=1, le=10**6, description="steps at which training is recorded, about"
    )
    evaluation: int = Field(
        default=4096, ge=2, le=10**9, description="prompts that measure the error at each"
    )
    final_evaluation: int = Field(
        default=100_000, ge=2, le=10**9, description="prompts that measure it at the end"
    )


class FlowSpec(_Task, RunSpec):
    """What ``esscher icl flow`` runs. The flow starts where Theorem 5.2 of [S] does."""

    job: Literal["icl-flow"] = "icl-flow"
    lengths: Lengths = (10, 30, 100, 300, 1000, 10_000, 100_000, 1_000_000)


class StabilitySpec(_Task, RunSpec):
    """What ``esscher icl stability`` runs: flows of (O, V, K, Q) from the first weights of as many
    seeds.
    """

    job: Literal["icl-stability"] = "icl-stability"
    lengths: Lengths = (10, 100, 1000)
    starts: int = Field(
        default=100,
        ge=1,
        le=10**6,
        description="number of random initial weights, drawn as in icl train --seeds",
    )
    training: float = Field(
        default=1000.0,
        gt=0,
        le=1e9,
        description="time of training, 2 * rate * steps; flows that have not ended then are stuck",
    )
    until: float = Field(
        default=1e5, gt=0, le=1e9, description="later time until which flows go on"
    )
    times: int = Field(default=100, ge=2, le=10**5, description="times at which a flow is recorded")
    block: int = Field(default=5, ge=1, le=10**6, description="starts in a unit of work")


class ConcentrationSpec(_Task, RunSpec):
    """What ``esscher icl concentration`` runs."""

    job: Literal["icl-concentration"] = "icl-concentration"
    lengths: Lengths = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
    repeats: int = Field(
        default=32, ge=2, le=10**6, description="groups of prompts, resampled for the intervals"
    )
    prompts: int = Field(default=128, ge=1, le=1 << 20, description="prompts in a group")


# here, so that naming a job does not import what computes it
register("icl-train", "esscher.icl.jobs:TRAIN")
register("icl-flow", "esscher.icl.jobs:FLOW")
register("icl-stability", "esscher.icl.jobs:STABILITY")
register("icl-concentration", "esscher.icl.jobs:CONCENTRATION")


@dataclass(frozen=True)
class IclFigure:
    """A figure of [S]: what it shows, for which covariance, and the runs it reads."""

    name: str
    shows: str
    covariance: str
    title: str
    runs: tuple[str, ...]


_SHOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "concentration": ("Softmax attention becomes linear", ("concentration",)),
    "final": ("Risk after training", ("train", "flow")),
    "distance": ("Distance between the trained models", ("train",)),
    "training": ("Risk along training", ("train", "flow")),
}
# Figures 1 to 4 with isotropic covariates, 5 to 8 the same with others
FIGURES = {
    f"fig{first + place}": IclFigure(
        f"fig{first + place}", shows, covariance, f"{title}, {name} covariates", runs
    )
    for first, covariance, name in ((1, ISOTROPIC, ISOTROPIC), (5, KMS, "Kac-Murdock-Szegoe 0.5"))
    for place, (shows, (title, runs)) in enumerate(_SHOWN.items())
}


def choose_figures(names: str | None) -> list[IclFigure]:
    """Figures by name, "fig2,fig3" or "2,3"; all of them when nothing is asked."""
    if names is None:
        return list(FIGURES.values())
    chosen = []
    for name in names.split(","):
        key = f"fig{name.strip().removeprefix('fig')}"
        if key not in FIGURES:
            raise ValueError(f"figure: expected some of {', '.join(FIGURES)}, got {name.strip()!r}")
        chosen.append(FIGURES[key])
    return list(dict.fromkeys(chosen))


def specs_for(figures: list[IclFigure], quick: bool, seed: int = 0) -> dict[str, RunSpec]:
    """The runs those figures need, for the covariances they show.

    Quick: ten times the paper's rate for a fiftieth of its steps, so a fifth of its training time;
    two seeds; fewer and shorter prompts.
    """
    common: dict[str, Any] = {
        "covariances": tuple(dict.fromkeys(figure.covariance for figure in figures)),
        "seed": seed,
    }
    kinds = {"concentration": ConcentrationSpec, "train": TrainSpec, "flow": FlowSpec}
    smaller: dict[str, dict[str, Any]] = {
        "concentration": {"lengths": (10, 30, 100, 300, 1000), "repeats": 16, "prompts": 64},
        "train": {"lengths": (10, 30, 100), "seeds": 2, "steps": 10_000, "rate": 1e-2}
        | {"records": 60, "final_evaluation": 20_000},
        "flow": {"lengths": (10, 30, 100)},
    }
    needed = {run for figure in figures for run in figure.runs}
    return {
        name: spec(**common | (smaller[name] if quick else {}))
        for name, spec in kinds.items()
        if name in needed
    }

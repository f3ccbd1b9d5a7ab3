"""Which runs Figures 1 to 8 of [S] are made from, at the paper's size and at one of minutes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from esscher.icl.concentration.spec import ConcentrationSpec
from esscher.icl.flow.spec import FlowSpec
from esscher.icl.training.spec import TrainSpec
from esscher.runs import RunSpec
from esscher.runs.spec import Plain, Seed

__all__ = ["FIGURES", "FigureFlags", "IclFigure", "choose_figures", "specs_for"]

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

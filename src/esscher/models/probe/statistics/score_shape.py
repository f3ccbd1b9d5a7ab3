"""The shape of a head's scores against the Gaussian of equal variance: a verdict, histograms and
survivals.
"""

from __future__ import annotations

import pandas as pd

from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.identity import HEAD, LAYER
from esscher.models.probe.statistics.statistic import Findings, Found, Statistic
from esscher.runs.columns import Column
from esscher.tails.scores import score_histogram

__all__ = ["ScoreShape"]

STANDARD = Column("z", "float", "z", "Score in standard deviations above the query's mean.")


class ScoreShape(Statistic):
    name = "score_shape"
    reads = ("replacement",)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        help_text = (
            "Whether the scores are as light-tailed as theory assumes: sub-Gaussian, heavier or"
            " lighter."
        )
        return (Column("score_verdict", "word", "scores", help_text),)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        density = Column(
            "density", "float", "density", "Density of the standardised scores of all queries."
        )
        survival = Column(
            "survival", "float", "survival", "Share of the scores above z standard deviations."
        )
        gaussian = Column(
            "gaussian", "float", "Gaussian", "The same for a Gaussian of equal variance."
        )
        return {
            "scores": (STANDARD, density, gaussian, LAYER, HEAD),
            "tails": (STANDARD, survival, gaussian, LAYER, HEAD),
        }

    def finish(self, state: None, found: Found) -> Findings:
        masses = found.states["replacement"].masses
        grid = masses.grid
        shape = score_histogram(masses.cells, masses.first, grid.spacing, points=grid.points)
        middle = 0.5 * (shape.edges[1:] + shape.edges[:-1])
        scores = pd.DataFrame(
            {"z": middle, "density": shape.density, "gaussian": shape.gaussian_density}
        )
        tails = pd.DataFrame(
            {"z": shape.at, "survival": shape.survival, "gaussian": shape.gaussian_survival}
        )
        return Findings({"score_verdict": shape.verdict}, {"scores": scores, "tails": tails}, shape)

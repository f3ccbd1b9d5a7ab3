"""Fitted exponents of the sampled moments of a head's outputs, where the spec asks for them."""

from __future__ import annotations

from esscher.models.probe.moments import moment_row
from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Findings, Found, Statistic
from esscher.runs.columns import Column

__all__ = ["OutputMoments", "moment_columns"]


def moment_columns(spec: ProbeSpec) -> tuple[Column, ...]:
    """Those of a head; a layer has the same."""
    return _COLUMNS if spec.moments else ()


class OutputMoments(Statistic):
    """The curves are sampled from whole layers (esscher.models.probe.moments); here they are
    read.
    """

    name = "output_moments"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return moment_columns(spec)

    def finish(self, state: None, found: Found) -> Findings:
        return Findings(moment_row(found.layer.sampled, found.head) if found.spec.moments else {})


_COLUMNS = (
    Column(
        "beta_mean",
        "float",
        "exponent of the mean",
        "Exponent fitted to the sampled error of the mean output.",
        short="mean",
        ends=("beta_mean_low", "beta_mean_high"),
        metric="mean",
    ),
    Column("beta_mean_low", "float", "exponent of the mean, low", "Lower end of its interval."),
    Column("beta_mean_high", "float", "exponent of the mean, high", "Upper end of its interval."),
    Column(
        "beta_cov",
        "float",
        "exponent of the covariance",
        "Exponent fitted to the sampled error of the output covariance.",
        short="covariance",
        ends=("beta_cov_low", "beta_cov_high"),
        metric="cov",
    ),
    Column(
        "beta_cov_low", "float", "exponent of the covariance, low", "Lower end of its interval."
    ),
    Column(
        "beta_cov_high", "float", "exponent of the covariance, high", "Upper end of its interval."
    ),
)

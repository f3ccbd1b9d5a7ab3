"""From the final state of a layer to its rows: what the statistics find of every head, and what is
known of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from esscher.hf.maps import LinearMaps
from esscher.probe import layer as head_state
from esscher.probe.agreement import AGREEMENT
from esscher.probe.budget import BUDGET
from esscher.probe.curves import curve_rows
from esscher.probe.layer import HeadState, LayerState
from esscher.probe.looks import LOOKS, with_sinks
from esscher.probe.moment_stream import LIMITS
from esscher.probe.moments import WHOLE_LAYER, Sampled, moment_row
from esscher.probe.session import Places
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.base import LAYER, Failure, Found, Met
from esscher.probe.statistics.errors import moment_columns
from esscher.probe.statistics.registry import statistics_of
from esscher.probe.statistics.shape import REACH
from esscher.probe.tokens import TAIL_COLUMNS, LayerSummary, largest_variance, tail_row
from esscher.runs.columns import Column

Moments = Mapping[tuple[int, str], Sampled]  # sampled, by head and metric


def columns(spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
    """The columns of every table, in their order."""
    statistics = statistics_of(spec)
    heads = [column for statistic in statistics for column in statistic.columns(spec)]
    found = {"heads": with_sinks(heads), "looks": LOOKS}
    found |= {
        "layers": (*LAYERS, *TAIL_COLUMNS, *moment_columns(spec)),
        "budget": BUDGET,
    }
    found |= {"agreement": AGREEMENT} if spec.moments else {}
    found |= {"limits": LIMITS} if spec.moments else {}
    for statistic in statistics:
        found |= statistic.tables(spec)
    return found


@dataclass
class Tables:
    """Rows by table, as they are found; ``long``: tables that have several rows of a head."""

    heads: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    long: dict[str, list[pd.DataFrame]] = field(default_factory=dict)

    def finished(self) -> dict[str, pd.DataFrame]:
        found = {"heads": pd.DataFrame(self.heads)}
        if self.layers:
            found["layers"] = pd.DataFrame(self.layers)
        return found | {
            name: pd.concat(frames, ignore_index=True) for name, frames in self.long.items()
        }


def layer_tables(
    spec: ProbeSpec,
    state: LayerState,
    maps: LinearMaps | None,
    places: Places,
    heads: Iterable[tuple[int, HeadState | str]] | None = None,
    moments: Moments | None = None,
) -> Tables:
    """Every table's rows of one layer. ``places``: those of the queries; ``heads`` come instead of
    the state's.
    """
    summary = LayerSummary.of(state.info, state.moments, maps, {} if moments is None else moments)
    layer = _Layer(spec, summary, places, state.keys)
    for head, known in state.heads.items() if heads is None else heads:
        try:
            if isinstance(known, str):
                raise ValueError(known)
            layer.measure(head, known)
        except ValueError as reason:
            layer.give_up(Failure(state.info, head, str(reason), state.keys, len(places)))
    layer.add_moments()
    return layer.tables


def failed_row(spec: ProbeSpec, failure: Failure) -> dict[str, Any]:
    """The row of a head that could not be measured."""
    row: dict[str, Any] = {}
    for statistic in statistics_of(spec):
        row |= {
            column.key: "" if column.kind == "word" else math.nan
            for column in statistic.columns(spec)
        }
        row |= statistic.failed(failure)
    return row


class _Layer:
    """One layer's tables while its heads come by."""

    def __init__(self, spec: ProbeSpec, layer: LayerSummary, places: Places, keys: int) -> None:
        self.spec, self.layer, self.places, self.keys = spec, layer, places, keys
        self.columns = columns(spec)
        self.notes: dict[str, dict[str, Any]] = {}
        self.tables = Tables(layers=[_layer_row(spec, layer)])

    def measure(self, head: int, known: HeadState) -> None:
        """Append the rows of one head to every table."""
        known = head_state.settle(
            known, Met(self.spec, self.layer.info, head, self.keys, {}), self.notes
        )
        places = self.places.take(known.queries.numpy())
        row, long = head_state.finish(
            known, Found(self.spec, self.layer, head, self.keys, places, {}, {}, {})
        )
        self.tables.heads.append(row)
        for table, frames in long.items():
            for frame in frames:
                self.append(table, head, frame)

    def append(self, table: str, head: int, rows: pd.DataFrame) -> None:
        """Rows of one head to a long table, their columns in the declared order."""
        whole = rows.assign(layer=self.layer.info.layer, head=head)
        keys = [column.key for column in self.columns[table]]
        if set(whole.columns) != set(keys):
            raise TypeError(
                f"table {table}: declared with the columns {sorted(keys)}, got"
                f" {sorted(whole.columns)}"
            )
        self.tables.long.setdefault(table, []).append(whole[keys])

    def give_up(self, failure: Failure) -> None:
        sampled = moment_row(self.layer.sampled, failure.head) if self.spec.moments else {}
        self.tables.heads.append(failed_row(self.spec, failure) | sampled)

    def add_moments(self) -> None:
        """Sampled curves, those of the whole layer included, after the exact ones."""
        for (head, _), sampled in self.layer.sampled.items():
            self.append("curves", head, curve_rows(sampled.curve))


# ---- layers
# ------------------------------------------------------------------------------------------

LAYERS = (
    LAYER,
    Column("tokens", "int", "tokens", "Number of tokens that entered the layer."),
    REACH,
    Column(
        "kurtosis_max",
        "float",
        "largest kurtosis",
        "Largest fourth standardised moment of a token coordinate; 3 for a Gaussian.",
    ),
    Column(
        "largest_z",
        "float",
        "largest deviation",
        "Largest token coordinate in standard deviations.",
    ),
    Column(
        "gaussian_z",
        "float",
        "Gaussian deviation",
        "Largest deviation that as many Gaussian tokens would show.",
    ),
    Column(
        "verdict",
        "word",
        "verdict",
        "Whether the tokens of the layer are sub-Gaussian, heavier-tailed or lighter-tailed.",
    ),
    Column("reason", "word", "reason", "The numbers behind the verdict."),
)


def _layer_row(spec: ProbeSpec, layer: LayerSummary) -> dict[str, Any]:
    """What is known of the tokens that enter the layer."""
    hidden, kurtosis = layer.hidden, math.nan
    if (
        hidden is not None
        and hidden.kurtosis is not None
        and not bool(hidden.kurtosis.isnan().all())
    ):
        kurtosis = float(hidden.kurtosis.nan_to_num(-math.inf).max())
    largest = math.nan if hidden is None or hidden.largest_z is None else float(hidden.largest_z)
    return {
        "layer": layer.info.layer,
        "tokens": layer.q.count,
        "reach": math.nan if hidden is None else largest_variance(hidden.cov),
        "kurtosis_max": kurtosis,
        "largest_z": largest,
        "gaussian_z": math.nan if hidden is None else hidden.gaussian_z,
        "verdict": "unknown" if hidden is None else hidden.verdict,
        "reason": "" if hidden is None else hidden.reason,
        **tail_row(layer.tails, "unknown" if hidden is None else hidden.verdict),
        **(moment_row(layer.sampled, WHOLE_LAYER) if spec.moments else {}),
    }

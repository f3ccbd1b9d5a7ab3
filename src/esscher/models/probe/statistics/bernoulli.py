"""The exact error of keys kept at random, of some of the queries: rows of curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit
from esscher.models.probe.curves import Errors, curve_rows, errors_of
from esscher.models.probe.spec import ProbeSpec, kept_ladder
from esscher.models.probe.statistics.curve_table import CURVES
from esscher.models.probe.statistics.statistic import (
    Block,
    Findings,
    Found,
    Met,
    Order,
    Start,
    Statistic,
    stacked,
)
from esscher.models.probe.wide import Held, add_keys_or_hold
from esscher.runs.columns import Column

__all__ = ["Bernoulli"]


class Bernoulli(Statistic):
    """The state is the deposits of the kept queries, on finer grids, or all keys; settled, their
    errors.
    """

    name = "bernoulli"
    together = True
    state = Deposit
    settled = Errors

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"curves": CURVES}

    def init(self, start: Start) -> Deposit:
        return deposit.init(
            len(start.kept), deposit.choose_grid(start.dtype, self.name), start.center
        )

    def update(self, state: Deposit | Held, block: Block) -> Deposit | Held:
        if not len(block.kept):
            return state
        pool = None if block.pool is None else block.pool.only(block.kept)
        if pool is not None and pool.sink is not None:
            return pool
        return add_keys_or_hold(state, block.kept_scores, block.values, pool)

    def merge(self, a: Deposit, b: Deposit) -> Deposit:
        return deposit.merge(a, b)

    def settle(self, state: Deposit | Held, met: Met) -> Errors:
        """Each key is kept with probability n / keys: one fraction of each query's own."""
        ladder = kept_ladder(met.spec, met.keys)
        if not len(state.keys):
            return Errors.none(0 if isinstance(state, Held) else len(state.center), len(ladder))
        return errors_of(state, ladder, self.name, met.keys, met.notes)

    def stack(self, states: Sequence[Errors], order: Order) -> Errors:
        found: Errors = stacked(
            [state for state in states if len(state.keys)] or states[:1], order.kept
        )
        return found

    def single(self, state: Deposit | Errors) -> tuple[str, ...]:
        return (".cells",) if isinstance(state, Deposit) and state.grid.tol > 1e-8 else ()

    def finish(self, state: Errors, found: Found) -> Findings:
        ladder = kept_ladder(found.spec, found.keys)
        if state.mean_keys != found.keys:  # masks show another number of keys than was foreseen
            ladder = np.maximum(1, np.round(ladder * (state.mean_keys / found.keys))).astype(
                np.int64
            )
        curve = state.curve(ladder, self.name)
        return Findings(tables={"curves": curve_rows(curve)}, value=curve)

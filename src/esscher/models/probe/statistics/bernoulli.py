"""The exact error of keys kept at random, of some of the queries: rows of curves."""

from __future__ import annotations

from collections.abc import Sequence

from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit
from esscher.models.probe.curves import curve_rows, exact_curve_of
from esscher.models.probe.spec import ProbeSpec, kept_ladder
from esscher.models.probe.statistics.curve_table import CURVES
from esscher.models.probe.statistics.statistic import Block, Findings, Found, Order, Start, Statistic
from esscher.models.probe.wide import Held, add_keys_or_hold
from esscher.runs.columns import Column

__all__ = ["Bernoulli"]


class Bernoulli(Statistic):
    """The state is the deposits of the kept queries, on finer grids, or all keys."""

    name = "bernoulli"
    state = Deposit

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {"curves": CURVES}

    def init(self, start: Start) -> Deposit:
        return deposit.init(len(start.kept), deposit.choose_grid(start.dtype, self.name), start.center)

    def update(self, state: Deposit | Held, block: Block) -> Deposit | Held:
        if not len(block.kept):
            return state
        pool = None if block.pool is None else block.pool.only(block.kept)
        return add_keys_or_hold(state, block.kept_scores, block.values, pool)

    def merge(self, a: Deposit, b: Deposit) -> Deposit:
        return deposit.merge(a, b)

    def stack(self, states: Sequence[Deposit], order: Order) -> Deposit:
        return deposit.take(deposit.stack([state for state in states if len(state.keys)]), order.kept)

    def single(self, state: Deposit) -> tuple[str, ...]:
        return (".cells",) if state.grid.tol > 1e-8 else ()

    def finish(self, state: Deposit | Held, found: Found) -> Findings:
        curve = exact_curve_of(state, kept_ladder(found.spec, state.mean_keys), self.name, found.notes)
        return Findings(tables={"curves": curve_rows(curve)}, value=curve)

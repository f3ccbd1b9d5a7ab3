"""What one head's queries have seen of its keys, as a streaming state: init, update, merge, stack, and bytes to store.

Three sums over keys give everything that is measured of a head: deposits on score grids for draws with replacement and, for
some of the queries, finer ones for kept keys (esscher.convergence.grid.state), and each query's largest scores
(esscher.diagnostics.tails). None of them grows with the number of keys, and states over disjoint keys
merge. Queries may also have seen different keys, each its own number of them (``stack``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import pad

from esscher.convergence.grid import state as deposit
from esscher.convergence.grid.state import Deposit, Grid
from esscher.diagnostics import tails
from esscher.diagnostics.tails import TopScores

__all__ = ["HeadState", "from_bytes", "init", "kept_rows", "merge", "stack", "to_bytes", "update"]


@dataclass(frozen=True)
class HeadState:
    """``drawn``: deposits of all m queries; ``kept``: of the ``rows`` among them; ``top``: the largest scores of these."""

    drawn: Deposit
    kept: Deposit
    top: TopScores
    rows: Tensor  # (m_kept,) int64

    @property
    def keys(self) -> int:
        """The number of keys that a query sees, on average."""
        return self.drawn.mean_keys


def kept_rows(queries: int, kept: int) -> Tensor:
    """The queries, evenly spread, whose errors are also computed for kept keys, and whose tails are fitted."""
    return torch.linspace(0, queries - 1, min(kept, queries)).round().long()


def init(queries: int, kept: int, tail: int, center: Tensor, dtype: torch.dtype) -> HeadState:
    """The state before any key; ``tail``: scores to remember of a query; ``center`` (d_v,): near the values."""
    rows = kept_rows(queries, kept)
    return HeadState(
        drawn=deposit.init(queries, deposit.choose_grid(dtype, "replacement"), center),
        kept=deposit.init(len(rows), deposit.choose_grid(dtype, "bernoulli"), center),
        top=tails.init(len(rows), tail, device=center.device),
        rows=rows,
    )


def update(state: HeadState, scores: Tensor, values: Tensor) -> HeadState:
    """The state after one more block of keys: scores (m, B), values (B, d_v). ValueError where scores are not finite.

    The old state's cells may be written to: go on with the new one.
    """
    if not bool(torch.isfinite(scores).all()) or not bool(torch.isfinite(values).all()):
        raise ValueError("scores or values are not finite: the activations of the model overflow; try --dtype float32")
    some = scores[state.rows.to(scores.device)]
    return replace(
        state,
        drawn=deposit.update(state.drawn, scores, values, owned=True),
        kept=deposit.update(state.kept, some, values, owned=True),
        top=tails.update(state.top, some),
    )


def merge(a: HeadState, b: HeadState) -> HeadState:
    """The state over the union of two disjoint sets of keys, seen by the same queries."""
    drawn, kept = deposit.merge(a.drawn, b.drawn), deposit.merge(a.kept, b.kept)
    return replace(a, drawn=drawn, kept=kept, top=tails.merge(a.top, b.top))


def stack(states: Sequence[Deposit]) -> Deposit:
    """Deposits of different queries, each over its own keys, as one."""
    first = states[0]
    aligned = [first, *[deposit.recentre(state, first.center) for state in states[1:]]]
    longest = max(state.cells.shape[2] for state in aligned)
    # The last cell of a query is number end - 1 whatever the length, so shorter ranges grow at their low end.
    cells = torch.cat([pad(state.cells, (longest - state.cells.shape[2], 0)) for state in aligned], dim=1)
    return replace(
        first,
        cells=cells,
        first=torch.cat([state.first for state in aligned]),
        end=torch.cat([state.end for state in aligned]),
        keys=torch.cat([state.keys for state in aligned]),
    )


# ---- bytes -----------------------------------------------------------------------------------------------------------


def to_bytes(state: HeadState) -> bytes:
    """The state as safetensors. Cells are rounded to float32 where the grid itself is no better."""
    top = state.top
    tensors = {"rows": state.rows, "top.scores": top.scores, "top.count": top.count, "top.keep": torch.tensor([top.keep])}
    tensors |= _pack("drawn", state.drawn) | _pack("kept", state.kept)
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def from_bytes(data: bytes) -> HeadState:
    tensors = load(data)
    return HeadState(
        drawn=_unpack("drawn", tensors),
        kept=_unpack("kept", tensors),
        top=TopScores(int(tensors["top.keep"]), tensors["top.count"], tensors["top.scores"]),
        rows=tensors["rows"],
    )


def _pack(name: str, state: Deposit) -> dict[str, Tensor]:
    single = state.grid.tol > 1e-8
    return {
        f"{name}.cells": state.cells.float() if single else state.cells,
        f"{name}.center": state.center.clone(),  # both deposits share theirs, which safetensors refuses
        f"{name}.first": state.first,
        f"{name}.end": state.end,
        f"{name}.keys": state.keys,
        f"{name}.grid": torch.tensor([state.grid.spacing, state.grid.points, state.grid.tol], dtype=torch.float64),
    }


def _unpack(name: str, tensors: dict[str, Any]) -> Deposit:
    spacing, points, tol = tensors[f"{name}.grid"].tolist()
    return Deposit(
        grid=Grid(spacing, int(points), tol),
        center=tensors[f"{name}.center"],
        cells=tensors[f"{name}.cells"].double(),
        first=tensors[f"{name}.first"],
        end=tensors[f"{name}.end"],
        keys=tensors[f"{name}.keys"],
    )

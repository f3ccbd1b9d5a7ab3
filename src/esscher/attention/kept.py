"""Softmax attention on the keys that a rule keeps, and on no others.

Where places alone decide (windows, first and last keys, strides, given positions, one order for all
queries), a block of neighbouring queries asks its rule for the keys that any of them may keep, and
attends to these under the mask of what each one keeps: time and memory follow the keys kept. Parts
that need other neighbours (a stride's queries lie a stride apart), or that move with the query
(equal blocks go to the kernel at once), have blocks of their own; states over disjoint keys merge
exactly. Where scores or chance decide, a block of queries looks at all keys, and memory stays flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esscher.attention.state import AttentionState, attend_block, merge
from esscher.keep.context import Context
from esscher.keep.rule import (
    PAIRS,
    Chance,
    Placed,
    PlacedOrder,
    Rule,
    Union,
    blocks,
    first_of,
    ranking,
)
from esscher.keep.settled import settled

# neighbouring queries with one set of keys; from here on the fused kernel takes 64 of them at once
BLOCK = 192
MOST = 4096  # queries at one place in a block
STACKED = 1 << 16  # keys of equal blocks that go to the kernel together

State = tuple[Tensor, Tensor]  # out (m, d_v), lse (m,)


def attend_kept(
    tensors: tuple[Tensor, Tensor, Tensor],
    context: Context,
    rule: Rule,
    n: int | None,
    generator: Any,
) -> Tensor:
    """(m, d_v): one head on the keys kept. ``tensors``: q, k, v with their gradients; ``context``:
    the same without.
    """
    chances = [part for part in rule.parts if isinstance(part, Chance)]
    if chances and not isinstance(generator, torch.Generator):
        names = ", ".join(part.name for part in chances)
        raise ValueError(
            f"generator: {names} keeps keys by chance; expected a torch.Generator, got"
            f" {generator!r}"
        )
    head = _Head(*tensors, context.scale)
    found, left = settled(rule, context, n)
    placed = [part for part in found.parts if isinstance(part, Placed)]
    shared = [part for part in found.parts if isinstance(part, Chance) and part.shared]
    if context.mask is None and len(placed) + len(shared) == len(found.parts):
        places = _Places(head, context.positions, left, _drawn(shared, context, generator))
        out, lse = places.attend(placed)
        rule.check_least(left, places.held / len(lse))
    else:
        out, lse = _by_score(head, context, found, left, generator)
    blind = int((lse == -torch.inf).sum())
    if blind:
        raise ValueError(
            f"keep: {blind} of {len(lse)} queries keep no key, so attention is undefined there; "
            "add a part that keeps one surely, such as recent:1"
        )
    return out


@dataclass(frozen=True)
class _Head:
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    @property
    def has_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    def attend(self, q: Tensor, keys: Tensor, mask: Tensor, weight: Tensor | None) -> State:
        """Queries on keys given by their numbers; ``weight``: what each key counts for each
        query.
        """
        if len(keys) == 0:
            return q.new_zeros(len(q), self.v.shape[1]), q.new_full((len(q),), -torch.inf)
        k, v = self.k[keys], self.v[keys]
        if weight is None:
            return attend_block(q, k, v, self.scale, mask)
        scores = self.scale * (q.double() @ k.double().mT)
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(
                "q, k, scale: scores are beyond the floating range; make scale smaller"
            )
        scores = (scores + weight.log()).masked_fill(~mask, -torch.inf)
        lse = torch.logsumexp(scores, 1)
        blind = (lse == -torch.inf)[:, None]
        return scores.masked_fill(blind, 0.0).softmax(1).masked_fill(blind, 0.0) @ v.double(), lse


def _by_score(
    head: _Head, context: Context, rule: Rule, n: int | None, generator: torch.Generator | None
) -> State:
    """Blocks of queries that look at all keys, and attend to those that any of them keeps."""
    chances = [part for part in rule.parts if isinstance(part, Chance)]
    once = (
        _uniform(context.keys, generator)
        if chances and all(part.shared for part in chances)
        else None
    )
    outs, lses = [], []
    for rows, seen in blocks(context):
        part = Union(
            tuple(one.take(rows) if isinstance(one, Chance) else one for one in rule.parts)
        )
        mask, weight = part.filled(seen, part.held(seen), n), None
        if chances:
            kept = part.decide(seen, mask, n)
            drawn = _uniform((len(rows), context.keys), generator) if once is None else once
            mask, weight = drawn.to(mask.device) < kept.probability, kept.weight
        keys = mask.any(0).nonzero()[:, 0]
        out, lse = head.attend(
            head.q[rows], keys, mask[:, keys], None if weight is None else weight[:, keys]
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@dataclass(frozen=True)
class _Drawn:
    """Keys drawn once for all queries: which of them (N,), and what they count (N,)."""

    kept: Tensor
    weight: Tensor | None


def _drawn(
    shared: Sequence[Chance], context: Context, generator: torch.Generator | None
) -> _Drawn | None:
    if not shared:
        return None
    every = torch.ones(1, context.keys, dtype=torch.bool, device=context.k.device)
    dropped = torch.ones(context.keys, dtype=torch.float64, device=every.device)
    for part in shared:
        dropped = dropped * (1 - part.probability(context, every, None)[0])
    p = 1 - dropped
    kept = _uniform(context.keys, generator).to(p.device) < p
    return _Drawn(kept, torch.where(kept, 1 / p, 1.0) if shared[0].reweight else None)


def _uniform(shape: int | tuple[int, int], generator: torch.Generator | None) -> Tensor:
    assert generator is not None
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


class _Places:
    """Queries whose keys are known by their places; ``held`` counts what numbers hold, where n is
    for the rest.
    """

    def __init__(self, head: _Head, positions: Tensor, n: int | None, drawn: _Drawn | None) -> None:
        self.head, self.positions, self.n, self.drawn = head, positions, n, drawn
        self.held = 0

    def attend(self, parts: Sequence[Placed]) -> State:
        """Groups of parts one after the other, each without what those before it keep."""
        groups = [tuple(parts)]
        if (
            all(part.is_local for part in parts)
            and self.drawn is None
            and not self.head.has_gradient
        ):
            far = [(part,) for part in parts if part.period > 1]
            moving = tuple(part for part in parts if part.period == 1 and part.back is not None)
            fixed = tuple(part for part in parts if part.period == 1 and part.back is None)
            groups = [group for group in (*far, moving, fixed) if group]
        state = self._group(groups[0], ())
        for i, group in enumerate(groups[1:], 1):
            state = _merged(
                state, self._group(group, [part for before in groups[:i] for part in before])
            )
        return state

    def _group(self, parts: Sequence[Placed], before: Sequence[Placed]) -> State:
        period = parts[0].period if len(parts) == 1 and parts[0].is_local else 1
        rows, sizes = _neighbours(self.positions, period, self._block(parts))
        in_order = bool((rows.diff() > 0).all())
        q, places = (
            (self.head.q, self.positions) if in_order else (self.head.q[rows], self.positions[rows])
        )
        backs = [part.back for part in parts if part.back is not None]
        if parts and len(backs) == len(parts) and self.drawn is None:
            back = min(max(backs), int(places.max()))
            states = self._moving(parts, before, q, places, sizes, back)
        else:
            states = self._fixed(parts, before, q, places, sizes)
        out, lse = (torch.cat(part) for part in zip(*states, strict=True))
        if in_order:
            return out, lse
        there = rows.argsort()
        return out[there], lse[there]

    def _block(self, parts: Sequence[Placed]) -> int:
        """How many positions go together: more where all queries have the same few keys to choose
        from.
        """
        if self.drawn is not None or not all(
            part.is_local and part.back is None and part.period == 1 for part in parts
        ):
            return BLOCK
        every = self._reach(parts, self.positions.max()[None])
        return max(BLOCK, min(MOST, PAIRS // max(1, len(every))))

    def _fixed(
        self,
        parts: Sequence[Placed],
        before: Sequence[Placed],
        q: Tensor,
        places: Tensor,
        sizes: list[int],
    ) -> Iterator[State]:
        for own, at in zip(torch.split(q, sizes), torch.split(places, sizes), strict=True):
            keys = self._reach(parts, at)
            yield self.head.attend(own, keys, *self._mask(parts, at, keys, before))

    def _moving(
        self,
        parts: Sequence[Placed],
        before: Sequence[Placed],
        q: Tensor,
        places: Tensor,
        sizes: list[int],
        back: int,
    ) -> Iterator[State]:
        """Keys lie alike before every query: one mask serves all blocks, and equal blocks are views
        of the keys in a row.
        """
        k, v, scale = self.head.k, self.head.v, self.head.scale
        near = torch.arange(back + BLOCK, device=places.device)
        # of a full block that begins at ``back``
        band, _ = self._mask(parts, near[back:], near, before)
        for block, times in _equal_blocks(places, sizes, back):
            first, last = int(places[block.start]), int(places[block.stop - 1])
            if times > 1:
                seen = slice(first - back, last + 1)
                some, theirs = (x[seen].unfold(0, back + BLOCK, BLOCK).mT for x in (k, v))
                out, lse = attend_block(
                    q[block].view(times, BLOCK, q.shape[1]), some, theirs, scale, band
                )
                yield out.flatten(0, 1), lse.flatten()
            else:
                seen = slice(max(0, first - back), last + 1)
                mask = band[
                    places[block] - first, seen.start - first + back : seen.stop - first + back
                ]
                yield attend_block(q[block], k[seen], v[seen], scale, mask)

    def _reach(self, parts: Sequence[Placed], at: Tensor) -> Tensor:
        found = [part.reach(at, self.n) for part in parts]
        if self.drawn is not None:
            found.append(self.drawn.kept.nonzero()[:, 0])
        keys = found[0] if len(found) == 1 else torch.unique(torch.cat(found))
        keys = keys[keys <= at[-1]]
        ranked = [part for part in parts if isinstance(part, PlacedOrder) and not part.is_local]
        # in order already, they are counted at once
        return keys[ranking(ranked[0].rank(keys))[0]] if ranked else keys

    def _mask(
        self, parts: Sequence[Placed], at: Tensor, keys: Tensor, before: Sequence[Placed]
    ) -> tuple[Tensor, Tensor | None]:
        """What each query keeps of these keys, and what they count."""
        visible = keys <= at[:, None]
        sure = torch.zeros_like(visible)
        for part in parts:
            if isinstance(part, PlacedOrder) and not part.is_local:
                if part.size is not None:
                    sure |= first_of(part.rank(keys), visible, torch.full_like(at, part.size))
            else:
                sure |= part.keeps(at[:, None], keys)
        sure &= visible
        if self.n is not None:
            count = sure.sum(1)
            self.held += int(count.sum())
            for part in parts:
                if isinstance(part, PlacedOrder) and part.is_open:
                    sure |= first_of(part.rank(keys), visible & ~sure, self.n - count)
        for part in before:
            sure &= ~part.keeps(at[:, None], keys)
        if self.drawn is None:
            return sure, None
        extra = self.drawn.kept[keys] & visible & ~sure
        weight = (
            None if self.drawn.weight is None else torch.where(extra, self.drawn.weight[keys], 1.0)
        )
        return sure | extra, weight


def _neighbours(positions: Tensor, period: int, block: int) -> tuple[Tensor, list[int]]:
    """Rows in an order in which those that share keys lie together, and the sizes of their
    blocks.
    """
    turns = int(positions.max()) // period + 1
    place = positions % period * (-(-turns // block) * block) + positions // period
    rows = torch.arange(len(place), device=place.device)
    if bool((place.diff() < 0).any()):
        place, rows = place.sort(stable=True)
    counts = torch.unique_consecutive(place // block, return_counts=True)[1].tolist()
    return rows, [min(MOST, count - start) for count in counts for start in range(0, count, MOST)]


def _equal_blocks(
    places: Tensor, sizes: Sequence[int], back: int | None
) -> Iterator[tuple[slice, int]]:
    """Blocks as slices of the rows, with how many a slice has: full ones in a row, whose keys all
    exist, go together.
    """
    jumps = torch.nn.functional.pad((places.diff() != 1).cumsum(0), (1, 0))
    ends = torch.tensor(sizes).cumsum(0)
    starts = ends - torch.tensor(sizes)
    first, before, after = (x.tolist() for x in (places[starts], jumps[starts], jumps[ends - 1]))
    most = 1 if back is None else STACKED // (back + BLOCK)
    # start, end, blocks, and the position at which the next equal block would begin
    runs: list[list[int]] = []
    for i, size in enumerate(sizes):
        start = int(starts[i])
        full = back is not None and size == BLOCK and first[i] >= back and before[i] == after[i]
        if full and runs and runs[-1][3] == first[i] and runs[-1][2] < most:
            runs[-1] = [runs[-1][0], start + size, runs[-1][2] + 1, first[i] + BLOCK]
        else:
            runs.append([start, start + size, 1, first[i] + BLOCK if full else -1])
    for start, end, times, _ in runs:
        yield slice(start, end), times


def _merged(a: State, b: State) -> State:
    both = merge(
        AttentionState(a[1].double(), a[0].double()), AttentionState(b[1].double(), b[0].double())
    )
    return both.out, both.lse

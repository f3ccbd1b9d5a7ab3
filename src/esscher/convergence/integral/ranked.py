"""Attention on the first n keys of a ranking, for every n of a ladder: no chance, no integral.

With pi the softmax weights and K, D what is kept and dropped,

    Gamma_keep - Gamma = sum_K pi_j c_j / pi_K = - sum_D pi_j c_j / pi_K,

and of the two sums that over the lighter set is taken. Keys between two n of the ladder are summed
once, by a product of a sparse matrix (its rows: a query's keys between two n) with the values; the
sums of K and D are running sums of these. A query whose kept or dropped keys weigh less than these
sums can hold has a softmax over each kept set by itself.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from esscher.convergence.integral.inclusion import InclusionErrors
from esscher.keep.context import Context
from esscher.keep.rule import first_of

__all__ = ["ranked_errors"]

# torch says once that the format is young; of it only products with dense matrices are used
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 1], [0], [1.0])


def ranked_errors(
    context: Context, held: Tensor, ranking: Tensor, counts: Tensor, sure: Tensor
) -> list[InclusionErrors]:
    """One result for each of ``counts`` (S,): keys kept in all, the ``held`` (m, N) and then the
    first of the ``ranking``. ``sure`` (m,): how many of the held count among them.

    ``ranking`` (1, N) or (m, N): indices of the keys, the first to be kept first.
    """
    order = counts.argsort()
    steps = _Steps(context, held, ranking, counts[order], sure)
    kept = steps.sums[:, :-1].cumsum(1) + steps.held[:, None]  # (m, S, channels)
    dropped = steps.sums.flip(1).cumsum(1).flip(1)[:, 1:]
    mass, light = kept[:, :, -2], dropped[:, :, -2]
    drift = context.drift[:, None]
    vector = torch.where(
        (light < mass)[:, :, None],
        light[:, :, None] * drift - dropped[:, :, :-2],
        kept[:, :, :-2] - mass[:, :, None] * drift,
    )
    some = torch.where(mass > 0, mass, 1.0)
    bias, pair = vector / some[:, :, None], kept[:, :, -1] / some.square()
    least = torch.finfo(context.dtype).tiny
    # pi^2 is summed over what is kept, pi alone over what is dropped
    faint = ((mass < 1e4 * least**0.5) | ((light < 1e8 * least) & steps.drops)).any(1).nonzero()
    rows = faint[:, 0]
    if len(rows):
        own = _one_by_one(
            context.take(rows), held[rows], ranking.expand(len(held), -1)[rows], counts[order]
        )
        bias[rows], pair[rows] = own
    accuracy = 32 * torch.finfo(context.dtype).eps
    found = [
        InclusionErrors(bias[:, i].square().sum(1), bias[:, i], pair[:, i], accuracy)
        for i in range(len(counts))
    ]
    return [found[i] for i in order.argsort().tolist()]


def _one_by_one(
    context: Context, held: Tensor, ranking: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Bias (m, S, d) and sum p^2 (m, S) from the logarithm of what each set weighs."""
    place = torch.empty_like(ranking).scatter_(
        1, ranking, -torch.arange(ranking.shape[1]).to(ranking).expand_as(ranking)
    )
    free, biases, pairs = context.visible & ~held, [], []
    for count in counts.tolist():
        kept = held | first_of(place, free, count - held.sum(1))
        inside, outside = (
            context.scores.masked_fill(~part, -torch.inf)
            for part in (kept, context.visible & ~kept)
        )
        log_mass = inside.logsumexp(1, keepdim=True)
        lighter = outside.logsumexp(1, keepdim=True) < log_mass
        weight, lost = (inside - log_mass).exp(), (outside - log_mass).exp()
        of_kept, of_dropped = (
            x @ context.near - x.sum(1, keepdim=True) * context.drift for x in (weight, lost)
        )
        biases.append(torch.where(lighter, -of_dropped, of_kept))
        pairs.append(weight.square().sum(1))
    return torch.stack(biases, dim=1), torch.stack(pairs, dim=1)


class _Steps:
    """Sums of pi (value, 1, pi) over the keys between two n, (m, S + 1, d + 2), and over those
    held, (m, d + 2).
    """

    def __init__(
        self, context: Context, held: Tensor, ranking: Tensor, counts: Tensor, sure: Tensor
    ) -> None:
        weight, near = context.attention.to(context.dtype), context.near.to(context.dtype)
        rows = torch.cat([near, torch.ones_like(near[:, :1])], dim=1)
        m, keys = weight.shape
        free = context.visible & ~held
        self.held = torch.zeros(m, rows.shape[1] + 1, dtype=torch.float64, device=weight.device)
        if bool(held.any()):
            kept = torch.where(held, weight, 0.0)
            self.held = torch.cat([kept @ rows, kept.square().sum(1, keepdim=True)], dim=1).double()
        columns = ranking.expand(m, keys)
        weights = weight.gather(1, columns)
        total = free.sum(1)
        if not bool(free.all()):
            inside = free.gather(1, columns)
            columns, weights = columns[inside], weights[inside]
        ends = torch.minimum((counts - sure[:, None]).clamp_min(0), total[:, None])  # (m, S)
        ends = torch.cat([ends, total[:, None]], dim=1)
        self.drops = ends[:, :-1] < total[:, None]  # whether a key is dropped, (m, S)
        starts = torch.cumsum(total, 0) - total
        edges = torch.cat([torch.zeros_like(ends[:1, 0]), (starts[:, None] + ends).flatten()])
        weights = weights.flatten()
        sums = _sparse(edges, columns.flatten(), weights, keys) @ rows
        pairs = torch.segment_reduce(weights.square(), "sum", offsets=edges, initial=0.0)
        self.sums = (
            torch.cat([sums, pairs[:, None]], dim=1).double().reshape(m, len(counts) + 1, -1)
        )


def _sparse(edges: Tensor, columns: Tensor, weights: Tensor, width: int) -> Any:
    """32-bit indices, which the fastest products ask for."""
    shape = (len(edges) - 1, width)
    return torch.sparse_csr_tensor(
        edges.int(), columns.int(), weights, shape, check_invariants=False
    )

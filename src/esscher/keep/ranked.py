"""Rules that rank keys by a score and keep the first: top-k, key norm, and eviction policies of a
KV cache, whose scores come from observed queries and keep one set of keys for all queries. SnapKV,
H2O and TOVA are :class:`Heavy` with other settings (``named.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from esscher.keep.context import Context
from esscher.keep.rule import Ranked, blocks

PIECE = 64


class TopK(Ranked):
    """The ``size`` keys of largest score, for each query its own: the oracle of sparse
    attention.
    """

    name = "topk"
    per_query = True

    def order(self, context: Context) -> Tensor:
        return context.scores


class KeyNorm(Ranked):
    """The ``size`` keys of smallest norm, which tend to be attended to (Devoto et al. 2024)."""

    name = "keynorm"

    def order(self, context: Context) -> Tensor:
        return -context.k.double().square().sum(1)


class Observed(Ranked):
    """Keys ranked by a score that observed queries give them: one set of keys for all queries.

    A score needs one method, ``score``: what a block of queries adds to the score of each key.
    Blocks are summed, or their maximum is taken (``largest``); ``collect`` makes the score of sums
    that are something else. ``queries``: whose queries a cache is scored by, the last ones of the
    prompt, those of a replay of the prompt, or all (a mean of the scores by both, and by the
    prompt's queries moved behind it). ``piece``: tokens of a replay that go through the model at
    once. ``needs``: fields of the context beside queries, keys and values ("metric", "norm",
    "slope").
    """

    queries: ClassVar[Literal["last", "replay", "all"]] = "last"
    needs: ClassVar[tuple[str, ...]] = ()
    largest: ClassVar[bool] = False
    piece: ClassVar[int] = PIECE
    in_nats: ClassVar[bool] = False  # scores of all heads are in one unit
    observes = True
    last: int | None = None  # only the queries at so many last positions; None: all

    @abstractmethod
    def score(self, rows: Context) -> Tensor:
        """(N,), or what ``collect`` takes: summed over the queries of this block, or the largest of
        them.
        """

    def collect(self, rows: Context, total: Tensor) -> Tensor:
        """The score (N,) from joined blocks of queries over the keys of ``rows``."""
        return total

    def join(self, total: Tensor | None, found: Tensor) -> Tensor:
        """Two sets of queries together; the first may be changed."""
        if total is None:
            return found
        return torch.maximum(total, found) if self.largest else total.add_(found)

    def finish(self, total: Tensor, count: int) -> Tensor:
        """The order (N,) from the joined scores of ``count`` queries."""
        return total if self.largest else total / count

    def order(self, context: Context) -> Tensor:
        chooser = context.choosing
        if self.last is not None:
            chooser = chooser.take(_at_last(chooser, self.last))
        return self.finish(self.add(chooser), len(chooser.q))

    def add(self, context: Context) -> Tensor:
        """The score (N,) by all queries of a context, block by block."""
        total = None
        for _, block in blocks(context):
            total = self.join(total, self.score(block))
        assert total is not None
        return self.collect(context, total)


def _at_last(context: Context, last: int) -> Tensor:
    """Rows of the queries at the last positions; where all stand at one place, the last rows."""
    places = torch.unique(context.positions)
    rows = torch.arange(len(context.positions), device=places.device)
    if len(places) == 1:
        return rows[-last:]
    return rows[context.positions >= places[-min(last, len(places))]]


def pooled(order: Tensor, pool: int | None) -> Tensor:
    """Of each key the mean over ``pool`` neighbours, itself in the middle; fewer at the ends."""
    if pool is None or pool == 1:
        return order
    before, after = (pool - 1) // 2, pool // 2
    along = torch.nn.functional.pad(order.cumsum(0), (1, 0))
    at = torch.arange(len(order), device=order.device)
    first, end = (at - before).clamp_min(0), (at + after + 1).clamp_max(len(order))
    return (along[end] - along[first]) / (end - first)


@dataclass(frozen=True)
class Heavy(Observed):
    """The ``size`` keys of largest mean softmax weight (H2O; SnapKV with ``last``, only the queries
    at so many last positions, and ``pool``, the mean over so many neighbours).
    """

    name = "heavy"
    last: int | None = None
    pool: int | None = None

    def score(self, rows: Context) -> Tensor:
        return rows.attention.sum(0)

    def finish(self, total: Tensor, count: int) -> Tensor:
        return pooled(total / count, self.pool)


class CriticalKV(Heavy):
    """The ``size`` keys that come first by mean weight, or by mean weight times |W_O v|_1 (Feng et
    al. 2025): one list, in which both orders take turns.
    """

    name = "criticalkv"

    def order(self, context: Context) -> Tensor:
        weight, values = super().order(context), context.v.double()
        if context.output is not None:
            values = torch.cat([values @ w.double() for w in context.output], 1)
        felt = (weight + 1e-4) * values.abs().sum(1)
        first, second = ((-x).argsort(stable=True).argsort() for x in (weight, felt))
        return -torch.minimum(2 * first, 2 * second + 1).double()


class Impact(Heavy):
    """The ``size`` keys whose loss changes the head's output most, behind W_O: the root mean
    square of pi/(1 - pi) |W_O (v - output)| over the queries (ReST-KV, CAOTE).

    ``pool``: the mean of so many neighbours counts where it is larger than a key's own score.
    """

    name = "impact"

    def score(self, rows: Context) -> Tensor:
        return removal_sums(replace(rows, metric=None))

    def collect(self, rows: Context, total: Tensor) -> Tensor:
        return removal_cost(replace(rows, metric=None), total)

    def finish(self, total: Tensor, count: int) -> Tensor:
        own = (total / count).sqrt()
        return torch.maximum(own, pooled(own, self.pool))


class ExpectedAttention(Ranked):
    """The ``size`` keys of largest E[e] |v|, for Gaussian queries with the mean and covariance of
    the observed ones.
    """

    name = "expected"
    observes = True

    def order(self, context: Context) -> Tensor:
        context = context.choosing
        q, k = context.q.double() * context.scale, context.k.double()
        mean = q.mean(0)
        spread = (q - mean).T @ (q - mean) / len(q)
        exponent = k @ mean + (k @ spread * k).sum(1) / 2
        return torch.log_softmax(exponent, 0) + context.v.double().square().sum(1).log() / 2


# ---- Scores by a replay of the prompt: queries of "repeat the context" and the context once more.
# They know what a later question may need; the last queries know how the text goes on.


class Fisher(Observed):
    """The ``size`` keys whose loss costs most, in nats per token: one unit for all heads.

        s_j = 1/2 sum over heads of E_p [ (pi/(1 - pi))^2 (v_j - Gamma_p)' F (v_j - Gamma_p) ]

    pi, Gamma: softmax weight and output of query p; F: the head's Fisher metric, E g g' with g the
    gradient of log p(next tokens) at the head's output. A head's error e costs 1/2 E e'F e nats.
    """

    name = "fisher"
    queries = "all"
    needs = ("metric",)
    in_nats = True
    size: int | None = None

    def score(self, rows: Context) -> Tensor:
        return removal_sums(rows)

    def collect(self, rows: Context, total: Tensor) -> Tensor:
        return removal_cost(rows, total) / 2


class KVzip(Observed):
    """The ``size`` keys of largest weight at any query of a replay (Kim et al. 2025)."""

    name = "kvzip"
    queries = "replay"
    largest = True
    piece = 2048  # the paper's

    def score(self, rows: Context) -> Tensor:
        return _of_keys(rows, rows.softmax).amax(0)


class KVzipPlus(KVzip):
    """KVzip with the weight times |W_O v| / |h|, h the hidden state of the query (kvpress); |v|
    without a model.
    """

    name = "kvzip_plus"
    needs = ("norm",)

    def score(self, rows: Context) -> Tensor:
        norm = rows.norm if rows.norm is not None else torch.ones_like(rows.q[:, 0])
        return _largest_value(rows, 1 / norm)


class KVgrad(KVzip):
    """KVzip with the weight times |W_O v| times the slope of the sum of |h|^2 at the attention
    output of the query, h the last hidden states (kvpress); it needs a model.
    """

    name = "kvgrad"
    needs = ("slope",)
    piece = 512

    def score(self, rows: Context) -> Tensor:
        slope = rows.slope if rows.slope is not None else torch.ones_like(rows.q[:, 0])
        return _largest_value(rows, slope)


def _largest_value(rows: Context, factor: Tensor) -> Tensor:
    """(N,): the largest of weight |W_O v| times a factor of each query; |v| without W_O."""
    weight = _of_keys(rows, rows.softmax)
    weight = weight * factor[:, None].to(weight.dtype)
    values, found = rows.v.to(weight.dtype), weight.new_zeros(rows.keys)
    metrics = _metrics(replace(rows, metric=None), values)
    for i, own in _by_head(rows, metrics):
        length = ((values @ metrics[i]) * values).sum(1).clamp_min(0).sqrt()
        torch.maximum(found, weight[own].amax(0) * length, out=found)
    return found


def _of_keys(rows: Context, weights: Tensor) -> Tensor:
    """Of weights (..., N') those of the keys of ``rows``; a view where these are the first."""
    inside = rows.inside
    if int(inside[-1]) + 1 == len(inside):
        return weights[..., : len(inside)]
    return weights[..., inside]


def _by_head(rows: Context, metrics: Tensor) -> Iterator[tuple[int, slice]]:
    """Each head with a metric, and which queries are the head's; one metric is for all of them."""
    heads = torch.zeros_like(rows.positions) if len(metrics) == 1 else rows.heads
    present, counts = torch.unique_consecutive(heads, return_counts=True)
    end = 0
    for i, many in zip(present.tolist(), counts.tolist(), strict=True):
        start, end = end, end + many
        yield i, slice(start, end)


MOST = 0.99  # of the weight: beyond it the differences below lose too many digits


def removal_sums(rows: Context) -> Tensor:
    """(heads, width + 3, N): sums over queries from which ``removal_cost`` finds the cost of each
    key: of w, of w Gamma, of w Gamma'F Gamma, with w = (pi/(1 - pi))^2, and the cost of keys with
    most of a query's weight.

    Without such a key the output is G, and the error pi (v - G). G is summed over the other keys:
    the difference of Gamma and pi v would lose all digits.
    """
    weight, inside, middle = rows.softmax, rows.inside, rows.v.to(rows.dtype).mean(0)
    values = rows.whole.v.to(rows.dtype) - middle
    output = rows.attended - middle
    odds = weight[:, : int(inside[-1]) + 1]
    heavy = (odds.amax(1) > MOST).nonzero()[:, 0]
    top, at = odds[heavy].max(1)
    rest = 1 - odds
    odds = torch.div(odds, rest, out=rest)
    odds[heavy, at] = 0.0
    odds.square_()
    metrics = _metrics(rows, values)
    sums = values.new_zeros(len(metrics), values.shape[1] + 3, odds.shape[1])
    for i, own in _by_head(rows, metrics):
        metric, seen = metrics[i], output[own]
        size = ((seen @ metric) * seen).sum(1, keepdim=True)
        found = torch.cat([torch.ones_like(size), seen, size], 1)
        torch.mm(found.T, odds[own], out=sums[i, :-1])
        mine = (heavy >= own.start) & (heavy < own.stop)
        if bool(mine.any()):
            others = weight[heavy[mine]].scatter_(1, at[mine, None], 0.0)
            left = others.sum(1, keepdim=True).clamp_min(torch.finfo(top.dtype).tiny)
            away = top[mine, None] * (values[at[mine]] - others @ values / left)
            sums[i, -1].index_add_(0, at[mine], ((away @ metric) * away).sum(1))
    return _of_keys(rows, sums)


def removal_cost(rows: Context, sums: Tensor) -> Tensor:
    """(N,): sum over queries of e'F e, e = pi/(1 - pi) (v - Gamma) the error when this key alone
    is dropped, F the metric of the query's head; from the sums of all queries over these keys.

    Without a metric, F is W_O W_O', or the identity.
    """
    values = rows.v.to(rows.dtype)
    values = values - values.mean(0)
    total = values.new_zeros(len(values))
    for metric, own in zip(_metrics(rows, values), sums, strict=True):
        felt = values @ metric
        total += (felt * (values * own[0, :, None] - 2 * own[1:-2].T)).sum(1) + own[-2] + own[-1]
    return total.clamp_min(0)


def _metrics(rows: Context, like: Tensor) -> Tensor:
    """F of each head (heads, width, width): one for all of them where nothing tells them apart."""
    if rows.metric is not None:
        return rows.metric.to(like.dtype)
    if rows.output is not None:
        return (rows.output @ rows.output.mT).to(like.dtype)
    return torch.eye(like.shape[1], dtype=like.dtype, device=like.device)[None]

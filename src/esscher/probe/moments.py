"""Mean and covariance of self-attention's outputs on n tokens of a pool, by Monte Carlo: the
protocol of [B].

n tokens are drawn with replacement from all pooled tokens of the corpus; they are queries and keys.
The mean (L2) and the covariance (Frobenius) of the n outputs are compared with those of attention
on the whole pool, for each head and for the layer's heads side by side. One draw of the largest n
serves every n: its prefixes are the smaller draws.

The corpus streams by. First the windows of the limit's queries go through the model: all tokens of
a small corpus, a sample of a large one. Then every window does, once: these queries meet every key,
and the tokens of the draws, whose numbers are known from the seed, are kept. A sampled limit is
steadied by a control, the outputs of every query on CONTROL keys. It is off by a delta that all
draws share: errors against it are too large by E|delta|^2, the square of its standard error, which
is taken off; what is left,

    mean_r |e_r - delta|^2 - E|delta|^2 = mean_r |e_r|^2 - 2 <mean_r e_r, delta> + ...,

has the standard error that delta's own spread gives in the direction of the mean error.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.attention.state import AttentionState, attention_state, finish, init, merge
from esscher.errors.curve import ErrorCurve
from esscher.errors.rate import fit_rate
from esscher.hf.call import AttentionCall, score
from esscher.inputs import generator_for
from esscher.probe.curves import curve_rows
from esscher.probe.session import MEMORY, Indices, Session
from esscher.probe.statistic import HEAD, LAYER, LayerInfo, Rows
from esscher.probe.statistics.errors import CURVES
from esscher.runs import Unit
from esscher.runs.columns import Column
from esscher.tails import moments as token_moments
from esscher.tails.moments import TokenMoments

Floats = npt.NDArray[np.float64]
Tensors = tuple[Tensor, Tensor, Tensor]  # q (H, N, k), k and v (H_kv, N, .)

WINDOWS = 256  # windows that sampled queries come from, at least, if there are so many
EACH = 8  # queries of a window, at most, while there are more windows
CONTROL = 1024  # keys that every query meets
WHOLE_LAYER = -1  # the "head" of a layer's heads side by side
LARGEST = 2048  # n unless told otherwise: pairs grow as its square
SMALLEST = 64
SCORES = 2**22  # capped scores computed at once
NORMAL = 1.959963984540054  # a 95 % interval's end in standard errors
DRAWN = 3.0e9  # bytes of drawn tokens that a unit may hold


def _exponents(metric: str, name: str) -> tuple[Column, ...]:
    key, label = f"beta_{metric}", f"exponent of the {name}"
    what = f"Exponent fitted to the sampled error of the outputs' {name}."
    ends = (f"{key}_low", f"{key}_high")
    return (
        Column(key, "float", label, what, short=name, ends=ends, metric=metric),
        Column(ends[0], "float", f"{label}, low", "Lower end of its interval."),
        Column(ends[1], "float", f"{label}, high", "Upper end of its interval."),
    )


EXPONENTS = (*_exponents("mean", "mean"), *_exponents("cov", "covariance"))  # of heads and layers
LIMITS = (
    LAYER,
    HEAD,
    Column("metric", "word", "moment", "Moment of the outputs: mean or cov."),
    Column("queries", "int", "sampled queries", "Queries that the limit is estimated from."),
    Column("windows", "int", "sampled windows", "Windows of text that these queries stand in."),
    Column("stderr", "float", "error of the limit", "Standard error of the limit."),
    Column("share", "float", "share of the error", "The same over the error at the largest n."),
)


def check_moments(session: Session) -> None:
    """Refuse moments of what is no pool of the whole corpus, and of more tokens than it has."""
    if session.own:
        raise ValueError(
            "moments: they are of tokens of the whole corpus; use --pool corpus, or leave"
            " --moments out"
        )
    moment_ladder(session.spec.moments_n, session.keys)


# ---- the limit


@dataclass(frozen=True)
class Limit:
    """Mean (D,) and covariance (D, D) of the outputs on the whole pool; ``spread`` is that of a
    sampled limit.
    """

    mean: Tensor
    cov: Tensor
    spread: Spread | None = None

    @classmethod
    def of(cls, outputs: Tensor) -> Limit:
        """Of all outputs (N, D)."""
        mean = outputs.mean(0)
        centred = outputs - mean
        return cls(mean, centred.T @ centred / len(outputs))


@dataclass(frozen=True)
class QuerySample:
    """Numbers of sampled tokens among the pooled ones (m,), by window; ``keys``: those of the
    control's keys.
    """

    tokens: Indices
    windows: Indices  # (g,)
    groups: Indices  # (m,): the place of each token's window in ``windows``
    sizes: Indices  # (g,): pooled tokens of each window
    of_windows: int  # G
    pool: int  # pooled tokens of all windows
    keys: Indices

    def weights(self) -> Tensor:
        """(m,) float64, of sum 1: a token stands for its window's share of those that were not
        sampled.
        """
        share = self.sizes / np.bincount(self.groups)
        return torch.from_numpy(share[self.groups] / self.sizes.sum())

    def covariance(self, features: Tensor) -> Tensor:
        """Of the weighted mean of features (m, p): (p, p)."""
        groups = torch.from_numpy(self.groups).to(features.device)
        means = torch.zeros(
            len(self.windows), features.shape[1], dtype=features.dtype, device=features.device
        )
        means = means.index_add_(0, groups, features) / torch.bincount(groups)[:, None]
        sizes = torch.from_numpy(self.sizes / self.sizes.mean()).to(features.device)[:, None]
        apart, inside = sizes * (means - (sizes * means).mean(0)), features - means[groups]
        between, within = self._factors()
        return between * apart.T @ apart + within * inside.T @ inside

    def product_variances(self, x: Tensor, c: Tensor) -> Tensor:
        """(D, D): variances of the weighted means of x_a x_b - c_a c_b, for x and c (m, D), no
        product of all held.

        Sums of squares within a window are those about 0 minus those of its mean: the squares of
        products are products of squares, and a window's mean is a matrix product.
        """
        squares = x.square().T @ x.square() - 2 * (x * c).T @ (x * c) + c.square().T @ c.square()
        sizes = self.sizes / self.sizes.mean()
        ends = np.cumsum(np.bincount(self.groups))
        weights = self.weights().to(x.device)
        center = (x.T * weights) @ x - (c.T * weights) @ c
        apart = torch.zeros_like(squares)
        for start, end, size in zip([0, *ends[:-1]], ends, sizes, strict=True):
            mean = (x[start:end].T @ x[start:end] - c[start:end].T @ c[start:end]) / int(
                end - start
            )
            squares -= int(end - start) * mean.square()
            apart += size**2 * (mean - center).square()
        between, within = self._factors()
        return between * apart + within * squares.clamp_min(0)

    def _factors(self) -> tuple[float, float]:
        """What sums of squares between windows and within them are multiplied with."""
        g, m = len(self.windows), len(self.tokens)
        f, h = g / self.of_windows, m / int(self.sizes.sum())
        return (1 - f) / (g * max(g - 1, 1)), f * (1 - h) / (m * max(m - g, 1))


@dataclass(frozen=True)
class Spread:
    """How far a sampled limit may be off, from the sampled queries' own outputs about the mean: on
    all keys, and on few.
    """

    sample: QuerySample
    outputs: Tensor  # (m, D) on all keys, minus the limit's mean
    control: Tensor  # (m, D) on the control's keys, minus the same
    mean_variance: Tensor  # (D,)
    cov_variance: Tensor  # (D, D)

    @property
    def queries(self) -> int:
        return len(self.sample.tokens)

    @property
    def doubt(self) -> float:
        """Relative standard error of the square, as if one direction made all of it."""
        return math.sqrt(2 / max(len(self.sample.windows) - 1, 1))

    def square(self, metric: str, own: slice) -> float:
        """E|delta|^2 of the mean or of the covariance of a head's columns."""
        return float(
            self.mean_variance[own].sum() if metric == "mean" else self.cov_variance[own, own].sum()
        )

    def along(self, metric: str, own: slice, errors: Tensor) -> Floats:
        """Covariance (len n, len n) of <errors_n, delta>; errors (len n, d) of the mean or (len n,
        d, d) of the covariance.
        """
        x, c = self.outputs[:, own], self.control[:, own]
        if metric == "mean":
            features = (x - c) @ errors.T
        else:
            parts = [((x @ error) * x).sum(1) - ((c @ error) * c).sum(1) for error in errors]
            features = torch.stack(parts, dim=1)
        found: Floats = self.sample.covariance(features).cpu().numpy()
        return found


def sample_queries(pooled: npt.NDArray[np.bool_], queries: int, seed: int) -> QuerySample:
    """About so many tokens, all of them if there are no more, out of the windows ``pooled`` (W, T)
    marks tokens of.
    """
    generator = np.random.default_rng([seed, queries])
    counts = pooled.sum(axis=1)
    first = np.cumsum(counts) - counts
    known = np.flatnonzero(counts)
    some = min(len(known), max(WINDOWS, -(-queries // EACH)))
    windows = np.sort(generator.choice(known, some, replace=False))
    sizes = counts[windows]
    share = min(1.0, queries / int(sizes.sum()))
    taken = [min(int(size), max(2, round(share * int(size)))) for size in sizes]
    tokens = [
        first[w] + np.sort(generator.choice(counts[w], m, replace=False))
        for w, m in zip(windows, taken, strict=True)
    ]
    every = np.concatenate([first[w] + np.arange(counts[w]) for w in windows])
    keys = np.sort(generator.choice(every, min(CONTROL, len(every)), replace=False))
    groups = np.repeat(np.arange(len(windows)), taken)
    return QuerySample(
        np.concatenate(tokens), windows, groups, sizes, len(known), int(counts.sum()), keys
    )


def estimate(sample: QuerySample, outputs: Tensor, control: Tensor, every: TokenMoments) -> Limit:
    """The limit from the sampled queries' outputs (m, D) on all keys and on the control's, and the
    control's of every query.
    """
    weights = sample.weights().to(outputs.device)
    mean = every.mean + weights @ (outputs - control)
    x, c, apart = outputs - mean, control - mean, every.mean - mean
    cov = (
        every.scatter / every.count
        + torch.outer(apart, apart)
        + (x.T * weights) @ x
        - (c.T * weights) @ c
    )
    return Limit(
        mean,
        cov,
        Spread(sample, x, c, sample.covariance(x - c).diagonal(), sample.product_variances(x, c)),
    )


# ---- draws


@dataclass(frozen=True)
class Sampled:
    """A curve, the standard error of its limit, and what that adds to the covariance of log rms
    over n.
    """

    curve: ErrorCurve
    limit_stderr: float = 0.0
    limit_cov: Floats | None = None

    def row(self) -> dict[str, float]:
        """The fitted exponent with its interval, the limit's part in it."""
        fit = fit_rate(self.curve, raise_on_failure=False)
        ends = np.array(fit.interval)
        if self.limit_cov is not None and fit.n.size > 1:
            used = np.isin(self.curve.n, fit.n)
            x = np.log(fit.n) - np.log(fit.n).mean()
            slope = x / (x**2).sum()
            added = NORMAL**2 * float(slope @ self.limit_cov[np.ix_(used, used)] @ slope)
            ends = fit.exponent + np.array([-1.0, 1.0]) * np.hypot(
                ends - fit.exponent, math.sqrt(added)
            )
        metric = self.curve.metric
        return {
            f"beta_{metric}": fit.exponent,
            f"beta_{metric}_low": float(ends[0]),
            f"beta_{metric}_high": float(ends[1]),
        }


def moment_ladder(given: tuple[int, ...] | None, keys: int) -> Indices:
    """Numbers of tokens: those given, or octaves from 64 up to 2048 and an eighth of the pool."""
    if given is not None:
        if max(given) > keys:
            raise ValueError(
                f"moments_n: the pool has {keys} keys, got n = {max(given)}; give more text or"
                " smaller n"
            )
        return np.array(given, dtype=np.int64)
    largest = min(LARGEST, max(keys // 8, 4))
    ladder = SMALLEST * 2 ** np.arange(0, 8)
    ladder = ladder[ladder <= largest]
    return (
        ladder
        if ladder.size >= 3
        else np.unique(np.geomspace(4, largest, 6).round().astype(np.int64))
    )


def drawn_tokens(layer: int, keys: int, largest: int, repeat: int, seed: int) -> Indices:
    """Numbers (largest,) of the tokens that a repeat draws, with replacement, known before any
    token is seen.
    """
    generator = generator_for(f"moments/{layer}", seed, "nested", repeat, "tokens")
    found: Indices = torch.randint(keys, (largest,), generator=generator).numpy()
    return found


def block_state(info: LayerInfo, q: Tensor, k: Tensor, v: Tensor) -> AttentionState:
    """Attention of queries (H, m, k) on keys and values (H, B, .), by the fused kernel where scores
    are not capped.
    """
    if info.softcap is None:
        return attention_state(q, k, v, info.scale)
    parts = []
    for rows in torch.split(q, max(1, SCORES // max(1, k[..., 0].numel())), dim=-2):
        scores = score(rows, k, info.scale, info.softcap).double()  # a cap keeps them small
        parts.append(AttentionState(scores.logsumexp(-1), scores.softmax(-1) @ v.double()))
    return AttentionState(
        torch.cat([part.lse for part in parts], -1), torch.cat([part.out for part in parts], -2)
    )


def of_heads(info: LayerInfo, tensors: Tensors, heads: tuple[int, ...]) -> Tensors:
    """The tokens of some heads, each with the keys and values that it reads; all alike are not
    copied.
    """
    q, k, v = tensors
    own = [info.kv_head(head) for head in heads]
    alike = len(heads) == len(q) == len(k)
    return (q, k, v) if alike else (q[list(heads)], k[own], v[own])


class Errors:
    """Squared errors of the moments of draws, as they come, against one limit."""

    def __init__(self, limit: Limit, heads: tuple[int, ...], n: Indices) -> None:
        self.limit, self.heads, self.n = limit, heads, n
        self.width = len(limit.mean) // len(heads)
        self.squared: dict[tuple[int, str], list[list[float]]] = {}
        self.mean = torch.zeros(
            len(n), *limit.mean.shape, dtype=torch.float64, device=limit.mean.device
        )
        self.cov = torch.zeros(
            len(n), *limit.cov.shape, dtype=torch.float64, device=limit.mean.device
        )

    def add(self, info: LayerInfo, tensors: Tensors) -> None:
        """One more draw: q, k and v (H, n, .) of its tokens for these heads."""
        q, k, v = tensors
        state = init(q, v.shape[-1])
        errors: dict[tuple[int, str], list[float]] = {}
        for place, (old, new) in enumerate(itertools.pairwise([0, *self.n.tolist()])):
            state = merge(state, block_state(info, q, k[:, old:new], v[:, old:new]))
            here = Limit.of(torch.cat(list(state.out[:, :new]), dim=1))
            mean, cov = here.mean - self.limit.mean, here.cov - self.limit.cov
            self.mean[place] += mean
            self.cov[place] += cov
            for head in (*self.heads, WHOLE_LAYER):
                own = self.columns(head)
                errors.setdefault((head, "mean"), []).append(float(mean[own].square().sum()))
                errors.setdefault((head, "cov"), []).append(float(cov[own, own].square().sum()))
        for key, values in errors.items():
            self.squared.setdefault(key, []).append(values)

    def columns(self, head: int) -> slice:
        """Those of a head among the outputs side by side."""
        place = 0 if head == WHOLE_LAYER else self.heads.index(head) * self.width
        return slice(None) if head == WHOLE_LAYER else slice(place, place + self.width)

    def curves(self, origin: str) -> dict[tuple[int, str], Sampled]:
        return {
            key: self._curve(*key, np.array(values), origin) for key, values in self.squared.items()
        }

    def _curve(self, head: int, metric: str, samples: Floats, origin: str) -> Sampled:
        own, limit = self.columns(head), self.limit
        cov = limit.cov[own, own]
        # The mean itself may be 0, so its error is compared with the size of an output.
        size = (
            float(limit.mean[own].square().sum() + cov.trace())
            if metric == "mean"
            else float(cov.square().sum())
        )
        origin = f"Monte Carlo, {len(samples)} repeats; {origin}"
        plain = functools.partial(
            ErrorCurve.from_repeats, self.n, metric=metric, scale=math.sqrt(size)
        )
        if limit.spread is None:
            return Sampled(plain(samples, origin=origin))
        error = (self.mean[:, own] if metric == "mean" else self.cov[:, own, own]) / len(samples)
        square, crossed = limit.spread.square(metric, own), limit.spread.along(metric, own, error)
        raw = samples.mean(axis=0)
        drowned = raw < 2 * square  # what is left after the correction is less than the correction
        left = np.where(drowned, raw, raw - square)
        # d log rms = - <mean error, delta> / left, and the square itself is known from some windows
        # only
        doubt = crossed / np.outer(left, left) + np.diag(
            (limit.spread.doubt * square / left / 2) ** 2
        )
        rms = np.sqrt(left)
        origin += (
            f"; against a limit of {limit.spread.queries} sampled queries, its standard error"
            f" {math.sqrt(square):.3g} taken off"
        )
        curve = plain(np.where(drowned, samples, samples - square), origin=origin)
        stderr = np.where(drowned, rms, np.hypot(curve.stderr, rms * np.sqrt(doubt.diagonal())))
        curve = replace(curve, stderr=stderr)
        return Sampled(curve, math.sqrt(square), doubt)


def moment_row(curves: Mapping[tuple[int, str], Sampled], head: int) -> dict[str, Any]:
    """Fitted exponents of a head's moments with their intervals: beta_mean, beta_mean_low, ...,
    beta_cov_high.
    """
    row: dict[str, Any] = {}
    for metric in ("mean", "cov"):
        missing = {f"beta_{metric}{end}": math.nan for end in ("", "_low", "_high")}
        row |= curves[head, metric].row() if (head, metric) in curves else missing
    return row


# ---- units of work


def moment_units(session: Session) -> list[Unit]:
    """Layers whose drawn tokens fit into memory together; each unit is a pass over the corpus."""
    blocks: list[list[int]] = [[]]
    held = 0.0
    for layer in session.layers:
        size = _bytes(session, layer)
        if blocks[-1] and held + size > DRAWN:
            blocks.append([])
            held = 0.0
        blocks[-1].append(layer)
        held += size
    return [{"layers": block, "moments": True} for block in blocks]


def _bytes(session: Session, layer: int) -> float:
    """Of the tokens that all repeats draw in a layer."""
    spec, shape = session.spec, session.loaded.shapes[layer]
    tokens = min(spec.moments * int(_ladder(session)[-1]), session.keys)
    numbers = shape.heads * shape.width + shape.kv_heads * (shape.width + shape.value_width)
    held = tokens * numbers * (8.0 if spec.dtype == "float64" else 4.0)
    return held + (12.0 * session.keys * shape.heads * shape.width if _exact(session) else 0.0)


def _exact(session: Session) -> bool:
    """Whether the limit is that of every query: where all tokens of all layers fit into memory."""
    numbers = 0
    for shape in (session.loaded.shapes[layer] for layer in session.layers):
        numbers += shape.heads * shape.width + shape.kv_heads * (shape.width + shape.value_width)
    return 4 * numbers * session.keys <= MEMORY


def stream_moments(session: Session, unit: Unit) -> dict[str, pd.DataFrame]:
    """Curves, exponents and the limit's own error of some layers, as tables."""
    spec, layers = session.spec, unit["layers"]
    limits, errors = _asked(session, layers), dict[int, Errors]()
    passes = math.ceil(max(_bytes(session, layer) for layer in layers) / DRAWN)
    for repeats in np.array_split(np.arange(spec.moments), min(passes, spec.moments)):
        draws = _draw(session, layers, repeats.tolist(), {} if errors else limits)
        for layer in layers:
            if layer not in errors:
                errors[layer] = Errors(
                    limits[layer].finish(), session.heads(layer), _ladder(session)
                )
            info, (tokens, chosen) = limits[layer].info, draws.pop(layer)
            for numbers in chosen:
                errors[layer].add(info, of_heads(info, tokens.of(numbers), session.heads(layer)))
    found: dict[str, list[pd.DataFrame]] = {}
    for layer in layers:
        for name, frame in _tables(layer, errors.pop(layer), limits.pop(layer).sample).items():
            found.setdefault(name, []).append(frame)
    return {name: pd.concat(frames, ignore_index=True) for name, frames in found.items()}


class _Tokens:
    """Tokens of a layer by their numbers among the pooled ones, taken out of the blocks they come
    in.
    """

    def __init__(self, numbers: Indices) -> None:
        self.numbers = numbers  # increasing
        self.held: tuple[Tensor, ...] = ()

    def add(self, rows: Rows, numbers: Indices) -> None:
        """``numbers``: of the rows, increasing."""
        low, high = np.searchsorted(self.numbers, [numbers[0], numbers[-1] + 1])
        found = torch.from_numpy(np.searchsorted(numbers, self.numbers[low:high])).to(rows.k.device)
        if not self.held:
            sizes = ((x.shape[0], len(self.numbers), x.shape[2]) for x in (rows.q, rows.k, rows.v))
            self.held = tuple(
                torch.empty(size, dtype=rows.k.dtype, device=rows.k.device) for size in sizes
            )
        for held, x in zip(self.held, (rows.q, rows.k, rows.v), strict=True):
            held[:, low:high] = x[:, found]

    def of(self, numbers: Indices) -> Tensors:
        at = torch.from_numpy(np.searchsorted(self.numbers, numbers)).to(self.held[0].device)
        q, k, v = (held[:, at] for held in self.held)
        return q, k, v


class _Limit:
    """The limit of a layer while its tokens come by."""

    def __init__(
        self, info: LayerInfo, sample: QuerySample, tokens: _Tokens, heads: tuple[int, ...]
    ) -> None:
        self.info, self.sample, self.heads = info, sample, heads
        self.exact = len(sample.tokens) == sample.pool
        self.q = of_heads(info, tokens.of(sample.tokens), heads)[0]
        _, self.k, self.v = of_heads(info, tokens.of(sample.keys), heads)
        self.state = init(self.q, self.v.shape[-1])
        self.every = token_moments.init(
            len(heads) * self.v.shape[-1], higher=False, device=self.q.device
        )

    def add(self, rows: Rows) -> None:
        """Tokens as keys of the sampled queries, and as queries of the control's keys."""
        q, k, v = of_heads(self.info, (rows.q, rows.k, rows.v), self.heads)
        self.state = merge(self.state, block_state(self.info, self.q, k, v))
        if not self.exact:
            self.every = token_moments.update(self.every, self._control(q))

    def finish(self) -> Limit:
        outputs = torch.cat(list(finish(self.state)), dim=1)
        if self.exact:
            return Limit.of(outputs)
        return estimate(self.sample, outputs, self._control(self.q), self.every)

    def _control(self, q: Tensor) -> Tensor:
        """Outputs (m, D) of queries on the control's keys, heads side by side."""
        return torch.cat(list(block_state(self.info, q, self.k, self.v).out), dim=1)


def _asked(session: Session, layers: list[int]) -> dict[int, _Limit]:
    """The limits of some layers before any key: their sampled queries and the control's keys, by
    passes over those windows.
    """
    queries = EACH * session.keys if _exact(session) else session.spec.moments_queries
    sample = sample_queries(session.pooled, queries, session.spec.seed)
    tokens = {layer: _Tokens(np.union1d(sample.tokens, sample.keys)) for layer in layers}
    info: dict[int, LayerInfo] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        info.setdefault(captured.layer, LayerInfo.of(captured))
        tokens[captured.layer].add(*_numbered(session, captured, batch))

    session.run(sample.windows, layers, sink)
    return {
        layer: _Limit(info[layer], sample, tokens.pop(layer), session.heads(layer))
        for layer in layers
    }


def _draw(
    session: Session, layers: list[int], repeats: list[int], limits: Mapping[int, _Limit]
) -> dict[int, tuple[_Tokens, list[Indices]]]:
    """The tokens that some repeats draw, and their numbers, by one pass over the corpus in which
    ``limits`` see every token.
    """
    largest = int(_ladder(session)[-1])
    chosen = {
        layer: [
            drawn_tokens(layer, session.keys, largest, each, session.spec.seed) for each in repeats
        ]
        for layer in layers
    }
    tokens = {layer: _Tokens(np.unique(np.concatenate(chosen[layer]))) for layer in layers}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        rows, numbers = _numbered(session, captured, batch)
        if len(numbers):
            tokens[captured.layer].add(rows, numbers)
            if captured.layer in limits:
                limits[captured.layer].add(rows)

    session.run(np.concatenate(session.parts), layers, sink)
    return {layer: (tokens[layer], chosen[layer]) for layer in layers}


def _ladder(session: Session) -> Indices:
    return moment_ladder(session.spec.moments_n, session.keys)


def _numbered(session: Session, captured: AttentionCall, batch: Indices) -> tuple[Rows, Indices]:
    """The pooled tokens of a batch and their numbers among all pooled ones."""
    counts = session.pooled.sum(axis=1)
    first = np.cumsum(counts) - counts
    numbers = np.concatenate([first[window] + np.arange(counts[window]) for window in batch])
    return Rows.of(captured, *session.masks(batch)), numbers


def _tables(layer: int, errors: Errors, sample: QuerySample) -> dict[str, pd.DataFrame]:
    """What is found of a layer: curves, exponents, and the limit's own error."""
    curves = errors.curves(
        f"tokens drawn with replacement from a pool of {sample.pool}, nested prefixes"
    )
    place = [{"layer": layer, "head": head} for head in (*errors.heads, WHOLE_LAYER)]
    frames = [
        curve_rows(known.curve).assign(layer=layer, head=head)
        for (head, _), known in curves.items()
    ]
    found = {
        "curves": pd.concat(frames, ignore_index=True)[[column.key for column in CURVES]],
        "moments": pd.DataFrame([row | moment_row(curves, row["head"]) for row in place]),
    }
    if errors.limit.spread is None:
        return found
    size = {"queries": len(sample.tokens), "windows": len(sample.windows)}
    limits = [
        {"layer": layer, "head": head, "metric": metric, **size, "stderr": known.limit_stderr}
        | {"share": known.limit_stderr / float(known.curve.rms[-1])}
        for (head, metric), known in curves.items()
    ]
    return found | {"limits": pd.DataFrame(limits)}


def with_moments(
    tables: dict[str, pd.DataFrame], sampled: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """The tables of a probe with the exponents, curves and limits that units of moments found; what
    failed stays empty.
    """
    exponents = [column.key for column in EXPONENTS]
    known = sampled.get("moments", pd.DataFrame(columns=["layer", "head", *exponents], dtype=float))
    layers = known[known["head"] == WHOLE_LAYER].drop(columns="head")
    found = dict(tables)
    for name, rows, on in (("heads", known, ["layer", "head"]), ("layers", layers, ["layer"])):
        if len(tables.get(name, ())):
            frame = tables[name].drop(columns=exponents, errors="ignore")
            found[name] = frame.merge(rows, how="left", on=on)
    curves = [each["curves"] for each in (tables, sampled) if "curves" in each]
    if curves:
        found["curves"] = pd.concat(curves, ignore_index=True)
    return found | ({"limits": sampled["limits"]} if "limits" in sampled else {})

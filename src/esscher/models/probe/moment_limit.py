"""The limit of the outputs' moments: exact where all queries are there, else from sampled queries,
with its own error.

With Gamma(q) attention of a query on all N keys and C(q) attention on a fixed few of them, over all
queries of the pool

    E Gamma = E C + E(Gamma - C),      Cov Gamma = Cov C + what (Gamma - C) changes.

E C and Cov C are those of every query, at the price of a few keys each; Gamma - C varies little
from query to query, so a sample of queries is enough for it (a control variate). Whichever keys C
has, nothing is biased; a sample of all queries gives the limit itself.

Queries are sampled in two stages without replacement: windows, then tokens of each in the same
share. The variance of a mean from g of G windows and m of the M tokens in these, with f = g/G, h =
m/M (Cochran, Sampling Techniques, 3rd ed., eq. 10.15, the windows weighted by their sizes):

    (1 - f)/g s_between^2 + f (1 - h)/m s_within^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esscher.tails.moments import TokenMoments

__all__ = ["Limit", "QuerySample", "Spread", "estimate", "sample_queries"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WINDOWS = 256  # windows that sampled queries come from, at least, if there are so many
EACH = 8  # queries of a window, at most, while there are more windows
CONTROL = 1024  # keys that every query meets


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

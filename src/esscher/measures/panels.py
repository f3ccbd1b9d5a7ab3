"""Composite Gauss-Legendre rules: nodes for functions that are smooth on either side of a point but
not across it.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

__all__ = ["graded", "panels"]

# a panel: of half-length L, with the nearest singularity L a away, it errs by (a + sqrt(a^2 -
# 1))^-24
NODES = 12
LENGTH = 6.0  # of a panel, in the steps of a trapezoid rule that would resolve the function
X, W = np.polynomial.legendre.leggauss(NODES)


def panels(
    first: float, last: float, cut: float | None = None
) -> tuple[Float64[Tensor, " N"], Float64[Tensor, " N"]]:
    """Nodes and weights on [first, last], whose unit is a step that resolves the function; no panel
    straddles ``cut``.
    """
    ends = [first, last] if cut is None or not first < cut < last else [first, cut, last]
    edges = [
        np.linspace(a, b, max(1, math.ceil((b - a) / LENGTH)) + 1)[(i > 0) :]
        for i, (a, b) in enumerate(itertools.pairwise(ends))
    ]
    return _between(np.concatenate(edges))


def graded(
    first: float, last: float, unit: float, halvings: int
) -> tuple[Float64[Tensor, " N"], Float64[Tensor, " N"]]:
    """Nodes and weights on [first, last], first >= 0: panels of length ``unit`` at most, and ever
    shorter towards 0.
    """
    edges = np.append(0.0, unit * 2.0 ** np.arange(-halvings, 1.0))
    edges = edges[edges > first]
    start = first if edges.size == 0 else float(edges[-1])
    far = np.linspace(start, last, max(1, math.ceil((last - start) / unit)) + 1)
    return _between(np.concatenate([np.append(first, edges[:-1]) if edges.size else edges, far]))


def _between(edges: np.ndarray) -> tuple[Tensor, Tensor]:
    half, middle = 0.5 * np.diff(edges)[:, None], 0.5 * (edges[1:] + edges[:-1])[:, None]
    return torch.from_numpy((middle + half * X).ravel()), torch.from_numpy((half * W).ravel())

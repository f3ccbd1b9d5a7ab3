"""B-spline coefficients of kernels on a score grid. They depend on the grid and on the nodes, not
on the keys that lie there.

So they are remembered: the integrals of other heads and windows ask for the same kernels at the
same nodes of a lattice. Grids are anchored at their end, where a shorter one has the coefficients
of a longer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from esscher.convergence.grid.bspline import prefilter
from esscher.convergence.integral.formulas import TINY, Family

__all__ = ["Cells", "Kernel", "kernels"]

BLOCK = 256  # cells filtered by one product
NODES = 32  # remembered together
LENGTHS = 128  # remembered grids have a multiple of so many cells
LONGEST = 512  # and at most so many


@dataclass(frozen=True)
class Cells:
    """A uniform grid of scores; a key is spread over ``points`` cells. ``single``: values on it are
    known to float32 only.
    """

    points: int
    spacing: float
    single: bool
    device: torch.device

    def centres(self, length: int, reach: int = 0) -> Tensor:
        """Of the last cells, and ``reach`` more on either side, measured from the end of the
        grid.
        """
        index = torch.arange(-reach, length + reach, dtype=torch.float64, device=self.device)
        return (index - length + self.points / 2) * self.spacing


@dataclass(frozen=True)
class Kernel:
    """Which channel it weighs, and its coefficients (cells, nodes) divided by ``peak`` (nodes)."""

    channel: str
    weights: Tensor
    peak: Tensor | float = 1.0


def kernels(family: Family, cells: Cells, length: int, tau: Tensor) -> dict[str, Kernel]:
    """Those of a family on the last ``length`` cells of a grid, at nodes tau: a lattice, or one
    node.
    """
    start, padded = float(tau[0]), -(-length // LENGTHS) * LENGTHS
    if len(tau) == 1 and length <= LONGEST:
        alone = _at_node(family, cells, padded, start)
        return {
            name: Kernel(one.channel, one.weights[-length:], one.peak)
            for name, one in alone.items()
        }
    step = round(float(tau[1] - tau[0]), 6) if len(tau) > 1 else 0.0
    first = round(start / step) if step > 0 else 0
    if step == 0 or length > LONGEST or start != step * first:
        return _computed(family, cells, length, tau)
    end = first + len(tau)
    blocks = range(first // NODES, (end - 1) // NODES + 1)
    parts = [_remembered(family, cells, padded, step, number) for number in blocks]
    cuts = [
        slice(max(0, first - number * NODES), min(NODES, end - number * NODES)) for number in blocks
    ]
    found = {}
    for name, kernel in parts[0].items():
        same = [part[name] for part in parts]
        weights = torch.cat(
            [one.weights[-length:, cut] for one, cut in zip(same, cuts, strict=True)], dim=1
        )
        peaks = [
            one.peak[cut]
            for one, cut in zip(same, cuts, strict=True)
            if isinstance(one.peak, Tensor)
        ]
        found[name] = Kernel(kernel.channel, weights, torch.cat(peaks) if peaks else 1.0)
    return found


@lru_cache(maxsize=256)  # a third of a megabyte each
def _remembered(
    family: Family, cells: Cells, length: int, step: float, number: int
) -> dict[str, Kernel]:
    tau = step * torch.arange(
        number * NODES, (number + 1) * NODES, dtype=torch.float64, device=cells.device
    )
    return _computed(family, cells, length, tau)


@lru_cache(maxsize=1024)
def _at_node(family: Family, cells: Cells, length: int, tau: float) -> dict[str, Kernel]:
    return _computed(
        family, cells, length, torch.full((1,), tau, dtype=torch.float64, device=cells.device)
    )


def _computed(family: Family, cells: Cells, length: int, tau: Tensor) -> dict[str, Kernel]:
    smooth = _smoother(cells.points, cells.spacing).to(cells.device)
    reach = (smooth.shape[0] - BLOCK) // 2
    u = tau[:, None] + cells.centres(length, reach)
    found = {}
    for name, (channel, samples) in family(u, tau[:, None]).items():
        weights = _filtered(samples, smooth, length, reach).T  # (cells, nodes)
        if channel == "value" and cells.single:
            peak = weights.abs().amax(0).clamp_min(TINY)  # float32 has few small numbers
            found[name] = Kernel(channel, (weights / peak).float(), peak)
        else:
            found[name] = Kernel(channel, weights)
    return found


def _filtered(samples: Tensor, smooth: Tensor, length: int, reach: int) -> Tensor:
    """Coefficients (nodes, length) of kernels sampled on the grid and ``reach`` further on either
    side.
    """
    parts = []
    for start in range(0, length, BLOCK):
        width = min(BLOCK, length - start)
        window = samples[:, start : start + width + 2 * reach]
        parts.append(window @ smooth[: window.shape[1], :width])
    return torch.cat(parts, dim=1)


@lru_cache(maxsize=16)
def _smoother(points: int, spacing: float) -> Tensor:
    """The prefilter as a matrix: samples on BLOCK grid points, and some on either side ->
    coefficients on the BLOCK.
    """
    taps = torch.as_tensor(prefilter(points, spacing))
    matrix = torch.zeros(BLOCK + taps.shape[0] - 1, BLOCK, dtype=torch.float64)
    for shift, tap in enumerate(taps):
        matrix.diagonal(-shift).fill_(tap)
    return matrix

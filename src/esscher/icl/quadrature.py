"""Averages over Gaussian vectors, and tables of the error functions that are averaged.

``gaussian_cubature`` and ``product_rule``: any function of tasks and queries. ``score_law``:
functions of the deviation s of a query's scores. ``error_functions``: f1, f2 of ``gaussian_error``
at one prompt length with their slopes, fast enough for a gradient flow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from numpy.polynomial import chebyshev
from scipy.interpolate import PPoly
from scipy.special import roots_genlaguerre
from torch import Tensor

from esscher.errors.gaussian import S_MAX, gaussian_error_slopes
from esscher.inputs import as_count

Floats = npt.NDArray[np.float64]

NEGLIGIBLE = 1e-15  # radial weight below which a shell is left out


@dataclass(frozen=True, eq=False)
class Cubature:
    """Points g (rotations x points x dim) and the weights of the points, which sum to 1."""

    points: Float64[Tensor, "rotations points dim"]
    weights: Float64[Tensor, " points"]


@lru_cache(maxsize=32)
def gaussian_cubature(
    dim: int, rotations: int = 8, shells: int = 16, seed: int = 0, even: bool = False
) -> Cubature:
    """A rule for N(0, I) in ``dim`` dimensions; the same arguments give the same points.

    Radius: generalised Gauss-Laguerre in |g|^2 / 2. Direction: Mysovskikh's rule on the sphere,
    exact to degree 5, on the vertices of a regular simplex, the midpoints of its edges and their
    opposites. Each random rotation of the rule is an unbiased estimate (Genz and Monahan, SIAM J.
    Sci. Comput. 19, 1998), so a few of them give the error. ``even``: for even functions, with one
    of each pair of opposite points.
    """
    dim, rotations = as_count(dim, "dim"), as_count(rotations, "rotations")
    half_square, radial = roots_genlaguerre(as_count(shells, "shells"), dim / 2 - 1)
    radial = radial / radial.sum()
    kept = radial > NEGLIGIBLE
    directions, angular = _directions(dim)
    if not even:
        directions = np.concatenate([directions, -directions])
        angular = np.concatenate([angular, angular])
    shell = np.sqrt(2.0 * half_square[kept])[:, None, None] * directions
    rng = np.random.default_rng(seed)
    q, r = np.linalg.qr(rng.standard_normal((rotations, dim, dim)))
    uniform = q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]
    points = shell.reshape(-1, dim) @ uniform
    weights = np.outer(radial[kept], angular).ravel()
    return Cubature(torch.from_numpy(points), torch.from_numpy(weights / weights.sum()))


def _directions(dim: int) -> tuple[Floats, Floats]:
    if dim == 1:
        return np.ones((1, 1)), np.ones(1)
    centred = np.eye(dim + 1) - 1.0 / (dim + 1)
    basis = np.linalg.svd(centred)[2][:dim]  # the hyperplane in which the simplex lies
    vertices = centred @ basis.T
    first, second = np.triu_indices(dim + 1, 1)
    middles = vertices[first] + vertices[second]
    points = np.concatenate([vertices, middles])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    at_vertex = (7 - dim) * dim / ((dim + 1) ** 2 * (dim + 2))
    at_middle = 4 * (dim - 1) ** 2 / (dim * (dim + 1) ** 2 * (dim + 2))
    return points, np.concatenate([np.full(dim + 1, at_vertex), np.full(first.size, at_middle)])


class Rule(NamedTuple):
    """A cubature over tasks and one over queries, rotated together."""

    tasks: Cubature
    queries: Cubature


def product_rule(
    dim: int, rotations: int = 8, seed: int = 0, shells: tuple[int, int] = (6, 16)
) -> Rule:
    """A cubature of tasks times one of queries, with so many ``shells``.

    On 6 shells of tasks the excess risk of softmax attention is nearly a polynomial.
    """
    tasks = gaussian_cubature(dim, rotations, shells[0], seed)
    return Rule(tasks, gaussian_cubature(dim, rotations, shells[1], seed + 1, True))


# step in log s, for d up to 5: the rule's error is about exp(-39); the law narrows like 1/sqrt(d)
STEP = 0.125
# log s begins at LEFT, s ends RIGHT beyond sqrt(d), in units of the largest deviation
LEFT, RIGHT = -9.0, 9.5


@dataclass(frozen=True)
class ScoreLaw:
    """Nodes s and their weights: ``sum(one * phi(s))`` = E phi(s), and likewise with powers of g
    in the basis ``basis``.

    one (m,); square (m, d) for E[phi g_i^2]; pair (m, d, d) for E[phi g_i^2 g_j^2], a third of it
    on the diagonal.
    """

    s: Floats
    one: Floats
    square: Floats
    pair: Floats
    basis: Floats

    def second_moment(self, phi: Floats) -> Floats:
        """E[phi(s) g g^T]."""
        return np.asarray((self.basis * (phi @ self.square)) @ self.basis.T)

    def fourth_moment(self, psi: Floats, N: Floats) -> Floats:
        """E[psi(s) (g^T N g) g g^T] for symmetric N; odd moments vanish in the eigenbasis."""
        pairs = np.einsum("t,tij->ij", psi, self.pair)
        turned = self.basis.T @ N @ self.basis
        inner = 2.0 * pairs * turned + np.diag(pairs @ np.diag(turned))
        return np.asarray(self.basis @ inner @ self.basis.T)


def score_law(C: Floats) -> ScoreLaw:
    """The law of s = sqrt(g^T C g), g ~ N(0, I), for a positive semi-definite C, as weighted nodes.

    The law of s^2 has the Laplace transform det(I + 2p C)^{-1/2}, and weighting it by products of
    coordinates of g (in the eigenbasis of C) multiplies by r_i = 1/(1 + 2p lambda_i):

        E[phi(s)]             <-  D(p) = prod_k r_k^{1/2}
        E[phi(s) g_i^2]       <-  D(p) r_i
        E[phi(s) g_i^2 g_j^2] <-  D(p) r_i r_j      (three times that for i = j)

    The transforms are inverted on Talbot's contour with the parameters of Weideman (SIAM J. Numer.
    Anal. 44, 2006), moved to the rightmost singularity -1/(2 max lambda), which keeps relative
    accuracy in the tail. The integral over s is a trapezoid rule in log s. For smooth even phi the
    sums are right to about 1e-10 up to d = 20, whatever C is, and 1e-8 at d = 50. The missing mass
    near s = 0, where phi is constant to the accuracy claimed, is put on the smallest node.
    """
    d = C.shape[0]
    values, basis = np.linalg.eigh(0.5 * (C + C.T))
    values = np.clip(values, 0.0, None)
    top = float(values[-1])
    if top == 0.0:
        return ScoreLaw(np.zeros(1), np.ones(1), np.ones((1, d)), np.ones((1, d, d)), basis)
    scaled = values / top
    step = STEP / max(1.0, np.sqrt(d / 5.0))
    s = np.exp(np.arange(LEFT, np.log(np.sqrt(d) + RIGHT) + step, step))
    one, square, pair = _invert(s * s, scaled)
    jacobian = step * 2.0 * s * s
    one, square, pair = jacobian * one, jacobian[:, None] * square, jacobian[:, None, None] * pair
    one[0] += 1.0 - one.sum()
    square[0] += 1.0 - square.sum(axis=0)
    pair[0] += 1.0 - pair.sum(axis=0)
    return ScoreLaw(s * np.sqrt(top), one, square, pair, basis)


def _invert(t: Floats, scaled: Floats) -> tuple[Floats, Floats, Floats]:
    """Densities at t = s^2, for eigenvalues at most 1."""
    half = min(16 + scaled.size // 2, 44)  # more of them would lose digits to e^z
    angle = np.pi * (np.arange(half) + 0.5) / half  # the upper half; the lower is its conjugate
    count = 2 * half
    cot = 1.0 / np.tan(0.6407 * angle)
    contour = count * (-0.6122 + 0.5017 * angle * cot + 0.2645j * angle)
    speed = count * (0.5017 * cot - 0.5017 * 0.6407 * angle / np.sin(0.6407 * angle) ** 2 + 0.2645j)
    # (1/(2 pi i)) int e^{pt} F dp with p = z/t: weights e^z z' / (i count), real part doubled for
    # the conjugate half.
    weight = np.exp(contour) * speed / (1j * count) * 2.0
    z = contour[None, :] / t[:, None]
    p = z - 0.5
    r = 1.0 / (1.0 + 2.0 * p[:, :, None] * scaled)
    base = np.exp(-0.5 * t)[:, None] / t[:, None] * weight * np.sqrt(r).prod(axis=2)
    one = base.sum(axis=1).real
    square = np.einsum("tp,tpi->ti", base, r).real
    pair = np.einsum("tpi,tpj->tij", base[:, :, None] * r, r).real
    return one, square, pair


WIDTH, DEGREE = 0.5, 12  # of a panel in s, and of its polynomial: relative error below 1e-9


@lru_cache(maxsize=64)
def _table(length: int, panels: int) -> PPoly:
    """log f1 and log f2 as polynomials on panels of s."""
    x = 0.5 * WIDTH * (chebyshev.chebpts1(DEGREE + 1) + 1.0)
    edges = WIDTH * np.arange(panels + 1)
    found = gaussian_error_slopes(length, edges[:-1, None] + x)
    logs = np.stack([np.log(found.f1), np.log(found.f2)], axis=-1)
    return PPoly(np.linalg.solve(np.vander(x), logs).transpose(1, 0, 2), edges)


def error_functions(length: int, s: Floats) -> Floats:
    """f1, f2 and their slopes in s, from a table; stacked in front of the shape of ``s``."""
    largest = float(s.max(initial=0.0))
    if not largest <= S_MAX:
        raise ValueError(
            f"scores: expected standard deviations up to {S_MAX:g}, got {largest:g}; the score"
            " matrix U is too large for this law of tokens"
        )
    if length == 1:
        return np.stack([1.0 + s * s, np.ones_like(s), 2.0 * s, np.zeros_like(s)])
    needed = int(largest / WIDTH).bit_length()  # a power of 2, so that few tables are made
    table = _table(length, min(2**needed, round(S_MAX / WIDTH)))
    logs, slopes = (np.moveaxis(table(s, order), -1, 0) for order in (0, 1))
    return np.concatenate([np.exp(logs), np.exp(logs) * slopes])

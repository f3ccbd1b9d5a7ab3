"""exact_curve over Gaussian laws of queries with means, unequal variances and tilt biases, against
a product rule over the queries and a second f1, f2.

The score's vector a = L^T (A x + bias) is Gaussian; the error of a query is f1(n, s) a^T G a / s^2
+ f2(n, s) (tr G - a^T G a / s^2), s = |a|, G = L^T V^T V L.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.polynomial import chebyshev

import esscher as es
from tests.fuzz.draw import Draw
from tests.fuzz.error_reference import by_quadrature
from tests.fuzz.exact import finite_curve
from tests.fuzz.law_reference import GaussianSpec
from tests.fuzz.line_reference import atoms_along
from tests.fuzz.outcome import Finding, numbers

__all__ = ["COVERS", "one"]

COVERS = ("exact_curve",)
Array = np.ndarray
STEEP = 5.0  # largest s at which errors beyond n = 2 are tabulated
NODES = 25  # of that table
EVEN = np.linspace(-9.0, 9.0, 181)  # the rule over a standard normal


def one(draw: Draw) -> None:
    """The error at n = 1 has a closed form in every dimension; others on one or two dimensions."""
    width = draw.pick([1, 2, 3, 6], p=[0.2, 0.5, 0.15, 0.15])
    dim, rng = draw.whole(1, 4), draw.rng
    root = rng.standard_normal((dim, dim)) * 0.7 / np.sqrt(dim)
    A, V = rng.standard_normal((dim, width)), rng.standard_normal((draw.whole(1, 3), dim))
    bias = rng.standard_normal(dim) * 0.5 if draw.chance(0.5) else None
    mean = rng.standard_normal(width) * draw.pick([0.0, 0.5, 2.0], p=[0.2, 0.5, 0.3])
    # variances from equal ones to many orders apart, and none
    deviation = 0.5 * 10.0 ** (-rng.uniform(0, draw.pick([0.01, 1.0, 7.0]), width))
    deviation[1:] *= draw.pick([0.0, 1.0], p=[0.1, 0.9])
    turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
    spread = turn * deviation
    tensor = torch.from_numpy
    head = es.Head(tensor(A), tensor(V), None if bias is None else tensor(bias))
    law = es.Gaussian(tensor(root @ root.T))
    queries = es.Gaussian(tensor(spread @ spread.T), tensor(mean))
    n = sorted({1, 2, draw.whole(3, 2000)})
    curve = draw.public("exact_curve", head, law, queries, n)
    if curve.q95 is None:
        curve = _with_a_quantile(curve)
    finite_curve(curve)
    slack = 2 * float(curve.accuracy) + 1e-7 + 8 * numbers(curve.query_stderr) / curve.rms
    # a = offset + factor z, z standard normal; G between them
    offset = root.T @ (A @ mean + (0.0 if bias is None else bias))
    factor, values = root.T @ A @ spread, V @ root
    first = (values**2).sum() + ((values @ offset) ** 2).sum() + ((values @ factor) ** 2).sum()
    draw.agree("rms at 1", curve.rms[0], np.sqrt(first), slack[0] * np.sqrt(first))
    if width > 2:
        return
    z = np.stack(np.meshgrid(*[EVEN] * width, indexing="ij"), axis=-1).reshape(-1, width)
    weight = np.exp(-0.5 * (z**2).sum(1))
    z, weight = z[weight > 1e-18], weight[weight > 1e-18]
    a = offset + z @ factor.T
    s = np.sqrt((a**2).sum(1))
    along = ((a @ values.T) ** 2).sum(1) / np.where(s > 0, s, 1.0) ** 2
    for i, count in enumerate(n[1:], start=1):
        if count > 2 and s.max() > STEEP:
            continue
        f1, f2 = _two(s) if count == 2 else _tabled(s, count)
        mse = weight @ (along * f1 + ((values**2).sum() - along) * f2) / weight.sum()
        off = slack[i] + (0.0 if count == 2 else 2e-6)
        draw.agree(f"rms at {count}", curve.rms[i], np.sqrt(mse), off * np.sqrt(mse))


def _with_a_quantile(curve: es.ErrorCurve) -> es.ErrorCurve:
    """None by rule where variances differ and there is a mean; nothing to look at."""
    if not isinstance(curve, es.ErrorCurve):
        raise Finding("wrong", f"no curve: {curve!r}")
    object.__setattr__(curve, "q95", np.zeros_like(curve.rms))
    return curve


def _two(s: Array) -> tuple[Array, Array]:
    """n = 2: with g_1 - g_2 = sqrt(2) x, sum p g = (m + x tanh(s x / sqrt 2)) / sqrt 2."""
    x = np.linspace(0.0, 9.0, 1501)[1:]
    weight = np.exp(-0.5 * x**2)
    total = weight.sum() + 0.5  # even: half the node at 0, where tanh is 0
    f1, f2 = np.empty_like(s), np.empty_like(s)
    for block in np.array_split(np.arange(len(s)), max(1, len(s) // 2000)):
        own = s[block][:, None]
        rise = np.tanh(own * x / np.sqrt(2.0))
        apart = (x * rise / np.sqrt(2.0) - own) ** 2
        f1[block] = 0.5 + (apart @ weight + 0.5 * own[:, 0] ** 2) / total
        f2[block] = 0.5 + 0.5 * (rise**2 @ weight) / total
    return f1, f2


def _tabled(s: Array, count: int) -> tuple[Array, Array]:
    """log f1 and log f2 at Chebyshev points of s, interpolated."""
    low, high = float(s.min()), max(float(s.max()), float(s.min()) + 1e-3)
    points = chebyshev.chebpts1(NODES)
    line, one, none = GaussianSpec(np.eye(1), np.zeros(1)), np.eye(1), np.zeros(1)
    found = [
        by_quadrature(atoms_along(line, np.array([x]), one, none), [count])
        for x in low + 0.5 * (high - low) * (points + 1)
    ]
    table = np.array([[float(at.mse[0]), float(at.sum_p2[0])] for at in found])
    fit = chebyshev.chebfit(points, np.log(table), NODES - 1)
    f1, f2 = np.exp(chebyshev.chebval(2 * (s - low) / (high - low) - 1, fit))
    return f1, f2

"""How far two models are from each other: as weights, up to the scale that linear attention does
not see, and as maps.

Linear attention is the same for (o, V, K, Q) and (l o, l V, K/l, Q/l) with any l > 0: score times
value does not change. So is softmax attention on infinitely many tokens, and nearly so on many: the
flat valley v U11 = Sigma^{-1} of [S] is this orbit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esscher.icl.training.white import Weights

__all__ = ["Apart", "apart", "balance"]

Floats = npt.NDArray[np.float64]


class Apart(NamedTuple):
    """Squared distances: of the weights, the least over the scale l of one of them, and of the
    products r (x) U.
    """

    plain: float
    modulo: float
    product: float


def apart(one: Weights, two: Weights) -> Apart:
    """The distances of two models with weights of the same shapes.

    modulo = min over l > 0 of |(o, V) - l (o', V')|^2 + |(K, Q) - (K', Q')/l|^2, at a root of a
    polynomial of degree 4. product = |r (x) U - r' (x) U'|_F^2, r = V^T o, U = K^T Q without its
    last column, which never acts.
    """
    values, scores = (
        (_joined(one.o, one.V), _joined(two.o, two.V)),
        (_joined(one.K, one.Q), _joined(two.K, two.Q)),
    )
    (a, b), (k, m) = values, scores

    def squared(scale: float) -> float:
        return float(np.sum((a - scale * b) ** 2) + np.sum((k - m / scale) ** 2))

    roots = np.roots(np.array([b @ b, -(a @ b), 0.0, k @ m, -(m @ m)]))
    scales = [
        float(root.real) for root in roots if abs(root.imag) < 1e-9 * abs(root) and root.real > 0
    ]
    (r, U), (r2, U2) = _acting(one), _acting(two)
    product = (
        (r @ r) * np.sum(U * U) + (r2 @ r2) * np.sum(U2 * U2) - 2.0 * (r @ r2) * np.sum(U * U2)
    )
    return Apart(squared(1.0), min(map(squared, [1.0, *scales])), max(float(product), 0.0))


def balance(weights: Weights) -> float:
    """|K|^2 + |Q|^2 - |o|^2 - |V|^2, which moves along the orbit alone: the flow of linear
    attention keeps it.
    """
    o, V, K, Q = (float(np.sum(part**2)) for part in weights)
    return K + Q - o - V


def _joined(one: Floats, two: Floats) -> Floats:
    return np.concatenate([one.ravel(), two.ravel()])


def _acting(weights: Weights) -> tuple[Floats, Floats]:
    return weights.V.T @ weights.o, (weights.K.T @ weights.Q)[:, :-1]

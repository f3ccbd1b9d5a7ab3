"""The risk of softmax attention on L tokens in the block form, exact: what a prompt of L tokens
adds to R_infinity.

Given w and x_q, with f1, f2 of ``gaussian_error`` at (L, s), s^2 = theta^T Gamma_w theta, kappa =
r^T Gamma_w theta, theta = U z_q, the output has mean (1 - f2) kappa and mean square error f1
kappa^2/s^2 + f2 (r^T Gamma_w r - kappa^2/s^2) about kappa, so that

    R_L - R_infinity = 1/2 E[ f2 r^T Gamma_w r + (f1 - f2) kappa^2 / s^2 - 2 f2 kappa (kappa - <w,
    x_q>) ] .

In the block form s does not depend on w, the average over w is a trace, and the average over x_q is
a sum over ``score_law``: no sampling. In general (``softmax_general``) it is a cubature over (w,
x_q).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float64
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esscher.icl.layer import Block
from esscher.icl.risk.error_table import table
from esscher.icl.risk.score_law import ScoreLaw, score_law
from esscher.icl.tasks import LinearTask

__all__ = ["block_excess", "block_excess_gradient", "block_shrinkage"]

Floats = npt.NDArray[np.float64]

SMALL = 0.05  # score deviation below which profiles are continued


def block_excess(block: Block, task: LinearTask, length: int) -> Float64[Tensor, ""]:
    """R_L - R_infinity in the block form, differentiable once in U11 and v; relative error about
    1e-10.
    """
    excess: Tensor = _BlockExcess.apply(block.U11.double(), block.v.double(), task, length)  # type: ignore[no-untyped-call]
    return excess


def block_shrinkage(block: Block, task: LinearTask, length: int) -> float:
    """What finitely many tokens change in the squared bias: 1/2 E[f2^2 kappa^2 - 2 f2 kappa (kappa
    - <w, x_q>)].
    """
    M, cov, mixed, law = _setting(block.U11.detach().double().numpy(), task)
    f2, v = table(length).evaluate(law.s)[1], float(block.v)
    squares = np.sum((M.T @ cov @ M) * _second_moment(law, f2 * f2 - 2.0 * f2))
    return 0.5 * v * v * float(squares) + v * float(np.sum((M.T @ mixed) * _second_moment(law, f2)))


class _BlockExcess(torch.autograd.Function):
    """Value and gradient together: with M = R^T U11 R_q, Sigma = R R^T, x_q = R_q g, everything is
    E[phi(|M g|) g g^T].
    """

    @staticmethod
    def forward(ctx: FunctionCtx, U: Tensor, v: Tensor, task: LinearTask, length: int) -> Tensor:
        value, grad_U, grad_v = block_excess_gradient(U.detach().numpy(), float(v), task, length)
        ctx.save_for_backward(torch.from_numpy(grad_U), torch.tensor(grad_v, dtype=torch.float64))
        return torch.tensor(value, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the softmax risk is differentiable once; create_graph=True asks for second"
                " derivatives"
            )
        grad_U, grad_v = ctx.saved_tensors
        return grad * grad_U, grad * grad_v, None, None


def _setting(U: Floats, task: LinearTask) -> tuple[Floats, Floats, Floats, ScoreLaw]:
    """M, the task covariance between the roots of Sigma and of Sigma and Sigma_q, and the law of s
    = |M g|.
    """
    root, query, W = task.root.numpy(), task.query_root.numpy(), task.task_cov.numpy()
    M = root.T @ U @ query
    return M, root.T @ W @ root, root.T @ W @ query, score_law(M.T @ M)


def block_excess_gradient(
    U: Floats, v: float, task: LinearTask, length: int
) -> tuple[float, Floats, float]:
    """R_L - R_infinity in the block form and its gradient in U11 and v, without a graph.

        1/2 (v^2 (tr(Sigma W) + tau^2) E f2 + v^2 E[phi k^2] + 2 v E[f2 k <w, x>]),     phi = (f1 -
        f2)/s^2 - 2 f2,

    k = kappa / v. Gradients of E[phi(|M g|) g^T N g] in M^T M are fourth moments with phi'/(2s).
    """
    M, cov, mixed, law = _setting(U, task)
    f2 = table(length).evaluate(law.s)[1]
    phi, psi, psi_f2 = _profiles(law.s, length)
    spread = float(np.trace(cov)) + task.noise
    own, crossed = M.T @ cov @ M, M.T @ mixed
    crossed = 0.5 * (crossed + crossed.T)
    Z_phi, Z_f2 = _second_moment(law, phi), _second_moment(law, f2)
    mean, squares, products = (
        float(law.one @ f2),
        float(np.sum(own * Z_phi)),
        float(np.sum(crossed * Z_f2)),
    )
    value = 0.5 * (v * v * (spread * mean + squares) + 2.0 * v * products)
    grad_C = v * v * (spread * _second_moment(law, psi_f2) + _fourth_moment(law, psi, own))
    grad_C += 2.0 * v * _fourth_moment(law, psi_f2, crossed)
    grad_M = M @ grad_C + v * v * (cov @ M @ Z_phi) + v * (mixed @ Z_f2)
    return (
        value,
        task.root.numpy() @ grad_M @ task.query_root.numpy().T,
        v * (spread * mean + squares) + products,
    )


def _profiles(s: Floats, length: int) -> tuple[Floats, Floats, Floats]:
    """phi = (f1 - f2)/s^2 - 2 f2, phi'/(2s) and f2'/(2s).

    All are smooth in s^2 but lose their digits at small s: below ``SMALL`` they are continued as
    straight lines in s^2.
    """

    def direct(s: Floats) -> Floats:
        f1, f2, df1, df2 = table(length).evaluate(s)
        ratio = (f1 - f2) / s**2
        slope = (df1 - df2) / s**2 - 2.0 * ratio / s
        return np.array([ratio - 2.0 * f2, (slope - 2.0 * df2) / (2.0 * s), df2 / (2.0 * s)])

    near, far = direct(np.array([SMALL, 2.0 * SMALL])).T
    line = near[:, None] + ((far - near) / (3.0 * SMALL**2))[:, None] * (s**2 - SMALL**2)
    phi, psi, psi_f2 = np.where(s < SMALL, line, direct(np.maximum(s, SMALL)))
    return phi, psi, psi_f2


def _second_moment(law: ScoreLaw, phi: Floats) -> Floats:
    """E[phi(s) g g^T]."""
    return np.asarray((law.basis * (phi @ law.square)) @ law.basis.T)


def _fourth_moment(law: ScoreLaw, psi: Floats, N: Floats) -> Floats:
    """E[psi(s) (g^T N g) g g^T] for symmetric N; odd moments vanish in the eigenbasis."""
    pairs = np.einsum("t,tij->ij", psi, law.pair)
    turned = law.basis.T @ N @ law.basis
    inner = 2.0 * pairs * turned + np.diag(pairs @ np.diag(turned))
    return np.asarray(law.basis @ inner @ law.basis.T)

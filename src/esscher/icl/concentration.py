"""Distance between softmax attention on L tokens and linear attention, measured and as [S] bounds
it: Propositions 3.1 and 3.4.

Measured on the same prompts, in mean square: softmax attention on L tokens minus (1/L) linear
attention on the same tokens ("linear"), or minus the limit of both, attention on infinitely many
tokens of the same task ("limit"). [S], Figures 1 and 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.icl.exact import risk_gradient
from esscher.icl.layer import OVKQ, Floats, flatten, tensors
from esscher.icl.quadrature import product_rule
from esscher.icl.tasks import LinearTask
from esscher.icl.training import batches, respond
from esscher.measures.gaussian import Gaussian
from esscher.measures.matrices import spectral_norm
from esscher.theory.boursier import averaged, gradients
from esscher.theory.prediction import Setting

METRICS = ("output", "gradient_U", "gradient_V", "gradient", "gradient_K", "gradient_Q")
AGAINST = ("linear", "limit")
BOUNDS = {
    "output": ("s-16-mended", "s-16-sharpened"),
    "gradient_U": ("s-gradient-u",),
    "gradient_V": ("s-gradient-v",),
    "gradient_K": ("s-gradient-u",),  # times ||Q||: df/dK = Q (df/dU)^T
    "gradient_Q": ("s-gradient-u",),  # times ||K||: df/dQ = K df/dU
}
TASKS = 16  # drawn to average the bounds, which hold task by task


def prompt_errors(task: LinearTask, weights: OVKQ, length: int, prompts: int, seed: int) -> Floats:
    """Squared differences on each of some random prompts, (prompts, against, metrics).

    Metrics: output f; df/dU and df/dV (its last row), Frobenius; gradient of the loss (f - y)^2 in
    (O, V, K, Q); df/dK = Q (df/dU)^T and df/dQ = K df/dU [S, after Proposition 3.4].
    """

    def square(x: Tensor) -> Tensor:
        return (x**2).sum(dim=-1)

    uv, (O, V, K, Q) = weights.uv(), tensors(weights)
    U, c, rows = uv.U[:, :-1], uv.V[-1], []
    generator = torch.Generator().manual_seed(seed % 2**63)
    for drawn in next(batches(task, length, prompts, 1, generator)):
        assert drawn.w is not None
        theta = drawn.query @ U.mT
        output, by_c, by_theta = respond(drawn, torch.stack([theta, theta], 1), torch.stack([c, c]))
        law = task.token_covariance(drawn.w)
        limit_c, limit_theta = (law @ theta[..., None])[..., 0], law @ c
        output = torch.cat([output, (limit_c @ c)[:, None]], dim=1)
        by_c = torch.cat([by_c, limit_c[:, None]], dim=1)
        by_theta = torch.cat([by_theta, limit_theta[:, None]], dim=1)
        slope = 2.0 * (output - drawn.target[:, None])[..., None]
        of_output, of_V, of_U, loss_V, loss_U = (
            x[:, :1] - x[:, 1:] for x in (output, by_c, by_theta, slope * by_c, slope * by_theta)
        )
        size, key = (square(x)[:, None] for x in (drawn.query, drawn.query @ Q[:, :-1].mT))
        loss = square(O[-1]) * square(loss_V) + square(loss_V @ V.mT)
        loss = loss + key * square(loss_U) + square(loss_U @ K.mT) * size
        by_K, by_Q = key * square(of_U), square(of_U @ K.mT) * size
        parts = of_output**2, square(of_U) * size, square(of_V), loss, by_K, by_Q
        rows.append(torch.stack(parts, dim=-1))
    return torch.cat(rows).numpy()


def risk_gradient_errors(task: LinearTask, weights: OVKQ, length: int) -> Floats:
    """Norm of the difference of the exact gradients of the mean squared error in (O, V, K, Q): to
    linear, to the limit.
    """
    rule = product_rule(task.dim)
    at = [(length, "softmax"), (length, "linear"), (float("inf"), "softmax")]
    own, *others = (flatten(risk_gradient(task, weights, n, kind, rule)[1]) for n, kind in at)
    # the risk is half of the mean squared error
    return np.array([2.0 * np.linalg.norm(own - other) for other in others])


def bounds(task: LinearTask, weights: OVKQ, lengths: Any, seed: int = 0) -> pd.DataFrame:
    """[S] Propositions 3.1 and 3.4 for these weights: root mean square over tasks of the proved
    bounds on the distance to the limit. Columns metric, name, n, rms, exponent; infinite where the
    proof says nothing.
    """
    uv, n = weights.uv(), np.asarray(lengths, np.int64)
    head = Head(uv.U[:, :-1], uv.V[-1:])
    factor = {"gradient_K": spectral_norm(weights.Q), "gradient_Q": spectral_norm(weights.K)}
    known = []
    for cov in token_laws(task, TASKS, seed):
        setting = Setting(head, Gaussian(cov), Gaussian(task.query_sigma))
        known.append({each.name: each for each in [*averaged(setting), *gradients(setting)]})
    rows = []
    for metric, names in BOUNDS.items():
        for name in names:
            mean = np.mean([by_name[name].rms(n) ** 2 for by_name in known], axis=0)
            exponent = min(by_name[name].exponent or 0.0 for by_name in known)
            rms = factor.get(metric, 1.0) * np.sqrt(mean)
            one = {"metric": metric, "name": name, "n": n, "rms": rms, "exponent": exponent}
            rows.append(pd.DataFrame(one))
    return pd.concat(rows, ignore_index=True)


def token_laws(task: LinearTask, tasks: int, seed: int) -> list[Tensor]:
    """Covariances Gamma_w of the tokens (x, y) of drawn tasks."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(tasks, task.dim, dtype=torch.float64, generator=generator)
    return list(task.token_covariance(w @ task.task_root.T))

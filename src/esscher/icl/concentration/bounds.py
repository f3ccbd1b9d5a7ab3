"""What [S] proves of the distance between softmax attention and its limit: Propositions 3.1 and 3.4
at given weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from esscher.attention.head import Head
from esscher.icl.layer import OVKQ
from esscher.icl.tasks import LinearTask
from esscher.measures.gaussian import Gaussian
from esscher.measures.matrices import spectral_norm
from esscher.theory.boursier import averaged, gradients
from esscher.theory.prediction import setting_of

__all__ = ["bounds", "token_laws"]

Floats = npt.NDArray[np.float64]
BOUNDS = {
    "output": ("s-16-mended", "s-16-sharpened"),
    "gradient_U": ("s-gradient-u",),
    "gradient_V": ("s-gradient-v",),
    "gradient_K": ("s-gradient-u",),  # times ||Q||: df/dK = Q (df/dU)^T
    "gradient_Q": ("s-gradient-u",),  # times ||K||: df/dQ = K df/dU
}
TASKS = 16  # drawn to average the bounds, which hold task by task


def bounds(task: LinearTask, weights: OVKQ, lengths: Any, seed: int = 0) -> pd.DataFrame:
    """[S] Propositions 3.1 and 3.4 for these weights: root mean square over tasks of the proved
    bounds on the distance to the limit. Columns metric, name, n, rms, exponent; infinite where the
    proof says nothing.
    """
    uv = weights.uv()
    n = np.asarray(lengths, np.int64)
    head = Head(uv.U[:, :-1], uv.V[-1:])
    factor = {"gradient_K": spectral_norm(weights.Q), "gradient_Q": spectral_norm(weights.K)}
    found: dict[tuple[str, str], list[tuple[Floats, float]]] = {}
    for cov in token_laws(task, TASKS, seed):
        setting = setting_of(head, Gaussian(cov), Gaussian(task.query_sigma))
        predictions = [*averaged(setting), *gradients(setting)]
        by_name = {prediction.name: prediction for prediction in predictions}
        for metric, names in BOUNDS.items():
            for name in names:
                prediction = by_name[name]
                found.setdefault((metric, name), []).append(
                    (prediction.rms(n) ** 2, prediction.exponent or 0.0)
                )
    rows = []
    for (metric, name), values in found.items():
        rms = factor.get(metric, 1.0) * np.sqrt(np.mean([value for value, _ in values], axis=0))
        exponent = min(exponent for _, exponent in values)
        rows += [
            {
                "metric": metric,
                "name": name,
                "n": int(m),
                "rms": float(height),
                "exponent": exponent,
            }
            for m, height in zip(n, rms, strict=True)
        ]
    return pd.DataFrame(rows)


def token_laws(task: LinearTask, tasks: int, seed: int) -> list[Tensor]:
    """Covariances Gamma_w of the tokens (x, y) of drawn tasks."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(tasks, task.dim, dtype=torch.float64, generator=generator) @ task.task_root.T
    laws = []
    for row in w:
        gram = torch.cat([torch.eye(task.dim, dtype=torch.float64), row[None]])
        cov = gram @ task.sigma @ gram.T
        cov[-1, -1] += task.noise
        laws.append(cov)
    return laws

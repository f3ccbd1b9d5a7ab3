"""What training leaves behind, collected while a pair trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from esscher.icl.layer import KINDS, OVKQ, UV
from esscher.icl.training.pair import ALIVE, Pair

__all__ = ["Recorder", "Training", "TrainingDiverged"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Training:
    """What training left behind, as tidy tables; models are "softmax" and "linear".

    ``curve``: step, model, loss (mean over the batches since the last record), mse and its stderr
    on fresh prompts. ``distance``: step, squared distance between the parameters of the two models.
    ``path``: step, model, values: [U without its last column, last row of O V] row by row, heads
    one after the other. ``final``: a row per model: mse and stderr, status ("ok" or "diverged"),
    step, loss, advice; O, V, K, Q flattened.
    """

    curve: pd.DataFrame
    distance: pd.DataFrame
    path: pd.DataFrame
    final: pd.DataFrame
    parameters: dict[str, list[OVKQ]]

    @property
    def diverged(self) -> pd.DataFrame:
        """The rows of ``final`` of models that diverged."""
        return self.final[self.final["status"] != "ok"]


class TrainingDiverged(ValueError):
    """A model left the bound; ``training`` holds what there is, the other model's included."""

    def __init__(self, training: Training) -> None:
        self.training = training
        super().__init__("; ".join(training.diverged["advice"]))


class Recorder:
    """Collects tables while a pair trains."""

    def __init__(self, pair: Pair, evaluation: int) -> None:
        self.pair, self.evaluation = pair, evaluation
        self.losses: list[Floats] = []
        self.last = np.full(2, np.nan)  # loss of the last batch each model saw
        self.curve: list[dict[str, Any]] = []
        self.distance: list[dict[str, Any]] = []
        self.path: list[dict[str, Any]] = []

    def record(self) -> None:
        pair, step = self.pair, self.pair.begun
        losses = np.concatenate(self.losses, axis=1) if self.losses else np.full((2, 1), np.nan)
        self.losses = []
        mse, stderr = pair.evaluate(self.evaluation)
        for model, kind in enumerate(KINDS):
            seen = (
                losses[model][~np.isnan(losses[model])]
                if pair.diverged[model] == ALIVE
                else losses[model]
            )
            known = np.flatnonzero(~np.isnan(losses[model]))
            if known.size:
                self.last[model] = losses[model, known[-1]]
            alive = pair.diverged[model] == ALIVE
            self.curve.append(
                {
                    "step": step,
                    "model": kind,
                    "loss": float(seen.mean()) if seen.size else np.nan,
                    "mse": float(mse[model]) if alive else np.nan,
                    "stderr": float(stderr[model]) if alive else np.nan,
                }
            )
            self.path.append({"step": step, "model": kind, "values": _values(pair.uv(model))})
        both = (pair.diverged == ALIVE).all()
        self.distance.append({"step": step, "distance2": pair.distance() if both else np.nan})

    def end(self, prompts: int, rate: float) -> Training:
        mse, stderr = self.pair.evaluate(prompts)
        rows = []
        for model, kind in enumerate(KINDS):
            at = int(self.pair.diverged[model])
            alive = at == ALIVE
            heads = self.pair.parameters(model)
            rows.append(
                {
                    "model": kind,
                    "mse": float(mse[model]) if alive else np.nan,
                    "stderr": float(stderr[model]) if alive else np.nan,
                    "status": "ok" if alive else "diverged",
                    "step": self.pair.begun if alive else at,
                    "loss": float(self.last[model]),
                    "advice": (
                        ""
                        if alive
                        else advice(kind, at, float(self.last[model]), self.pair.step.bound, rate)
                    ),
                }
                | {
                    name: _flat([getattr(head, name) for head in heads])
                    for name in ("O", "V", "K", "Q")
                }
            )
        curve, distance, path, final = (
            pd.DataFrame(table) for table in (self.curve, self.distance, self.path, rows)
        )
        return Training(
            curve,
            distance,
            path,
            final,
            {kind: self.pair.parameters(i) for i, kind in enumerate(KINDS)},
        )


def advice(kind: str, step: int, loss: float, bound: float, rate: float) -> str:
    """What happened to a model that diverged, and what helps."""
    return (
        f"{kind} attention diverged: loss {loss:.3g} at step {step}, above the bound {bound:g}; try"
        f" a rate below {rate:g} (such as {rate / 4:.2g}), another seed, longer prompts or larger"
        " batches"
    )


def _values(uvs: list[UV]) -> list[float]:
    return _flat([torch.cat([uv.U[:, :-1], uv.V[-1][:, None]], dim=1) for uv in uvs])


def _flat(parts: list[torch.Tensor]) -> list[float]:
    return [float(value) for part in parts for value in part.flatten()]

"""Risks on drawn prompts, and SGD on fresh prompts: softmax and linear attention from the same
weights on the same prompts, as in [S] appendix A.

The loss of training is the mean squared error E(f - y)^2 of the query's noisy label, so its floor
is the variance of the noise. [S] writes one half of it as the loss of its theory; for SGD that is
the same as half the rate. After t steps of rate r the flow of the risk R has run for a time 2 r t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from esscher.icl.exact import SIMULATION, Risk
from esscher.icl.layer import KINDS, OVKQ, Floats, Parameters, default_weights, predict, tensors
from esscher.icl.specs import TrainSpec
from esscher.icl.tasks import Prompts
from esscher.inputs import as_count
from esscher.runs.progress import advance

AT_ONCE = 2**19  # numbers in the tokens of prompts drawn at once
CPU = torch.device("cpu")
BOUND = 1e4  # a batch whose loss is not below this stops its model


def sampled_risk(
    task: Any,
    params: Parameters,
    length: Any,
    kind: str = "softmax",
    prompts: Any = 20_000,
    generator: torch.Generator | None = None,
) -> Risk:
    """The risk on drawn prompts, with its standard error, for every task."""
    length, count = as_count(length, "length"), as_count(prompts, "prompts")
    place = tensors(params)[0].device
    with torch.no_grad():
        losses = [
            0.5 * (predict(params, part, kind) - part.target) ** 2
            for part in next(batches(task, length, count, 1, generator, place))
        ]
    each = torch.cat(losses).double()
    return Risk(float(each.mean()), float(each.std() / math.sqrt(each.numel())), SIMULATION)


def batches(
    task: Any,
    length: int,
    batch: int,
    count: int,
    generator: torch.Generator | None,
    device: torch.device = CPU,
) -> Iterator[Iterable[Prompts]]:
    """``count`` batches of ``batch`` prompts, each in parts that fit in memory: drawn on the CPU,
    so that all devices have the same.
    """
    fit = max(1, AT_ONCE // (length * (task.dim + 1)))
    if fit < batch:
        sizes = [min(fit, batch - first) for first in range(0, batch, fit)]
        for _ in range(count):
            yield (task.sample(size, length, generator).to(device) for size in sizes)
        return
    together = fit // batch
    for first in range(0, count, together):
        steps = min(together, count - first)
        drawn = task.sample(steps * batch, length, generator).to(device)
        for step in range(steps):
            yield [drawn.part(step * batch, (step + 1) * batch)]


def respond(
    prompts: Prompts, theta: Float[Tensor, "B 2 e"], value: Float[Tensor, "2 e"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs f of softmax and linear attention on the same prompts, (B, 2), and df/dc, df/dtheta,
    (B, 2, e), at the value direction c and theta = U z_q.

    softmax: f = sum_j p_j c^T z_j,  df/dc = sum_j p_j z_j,
             df/dtheta = sum_j p_j (c^T z_j) z_j - f df/dc
    linear:  f = c^T S theta,  df/dc = S theta,  df/dtheta = S c,  S = (1/L) sum_j z_j z_j^T
    """
    z, value = prompts.tokens, value.expand_as(theta)
    length = z.shape[1]
    scores, values = (torch.cat([theta, value], dim=1) @ z.mT).chunk(2, dim=1)
    p = scores[:, :1].softmax(dim=-1)
    weighted = p * values[:, :1]
    centred = weighted - weighted.sum(dim=-1, keepdim=True) * p
    parts = [p, scores[:, 1:] / length, centred, values[:, 1:] / length]
    by_value, by_theta = (torch.cat(parts, dim=1) @ z).chunk(2, dim=1)
    return (value * by_value).sum(dim=-1), by_value, by_theta


def train(
    task: Any,
    length: Any,
    spec: TrainSpec | None = None,
    *,
    prompt_seed: int | None = None,
    **changes: Any,
) -> dict[str, pd.DataFrame]:
    """Train softmax and (1/L) linear attention on the same prompts of ``length`` tokens from the
    same weights.

    ``changes`` are fields of ``TrainSpec``, the paper's unless given: ``train(task, 20, steps=4000,
    rate=0.02)``. The task and the length are those given here. The seed decides the weights and,
    unless ``prompt_seed`` is given, the prompts. A model that diverges stops, the other goes on.

    Tables: ``curve``: step, model, loss (mean over the batches since the last record), mse and its
    stderr on fresh prompts. ``distance``: step, squared distance between the parameters of the two
    models. ``final``: a row per model: mse and stderr, status ("ok" or "diverged"), step, loss,
    advice; O, V, K, Q flattened.
    """
    spec = TrainSpec(**changes) if spec is None else spec
    pair = Pair(task, as_count(length, "length"), spec, prompt_seed)
    curve: list[dict[str, Any]] = []
    distance: list[dict[str, Any]] = []
    done = 0
    for stop in record_steps(spec.steps, spec.records):
        losses = pair.advance(stop - done)
        done = stop
        mse, stderr = pair.evaluate(spec.evaluation)
        loss = losses.mean(axis=0) if len(losses) else [np.nan, np.nan]
        for model, kind in enumerate(KINDS):
            row = {"step": done, "model": kind, "loss": float(loss[model])}
            curve.append(row | {"mse": mse[model], "stderr": stderr[model]})
        distance.append({"step": done, "distance2": pair.distance()})
        if None not in pair.diverged:
            break
    mse, stderr = pair.evaluate(spec.final_evaluation)
    final = []
    for model, kind in enumerate(KINDS):
        at, last, weights = pair.diverged[model], pair.last[model], pair.parameters(model)
        advice = ""
        if at is not None:
            advice = (
                f"{kind} attention diverged: loss {last:.3g} at step {at}, above the bound"
                f" {BOUND:g}; try a rate below {spec.rate:g} (such as {spec.rate / 4:.2g}),"
                " another seed, longer prompts or larger batches"
            )
        row = {"model": kind, "mse": mse[model], "stderr": stderr[model]}
        row |= {"status": "ok" if at is None else "diverged", "step": done if at is None else at}
        row |= {"loss": last, "advice": advice}
        final.append(row | {name: getattr(weights, name).flatten().tolist() for name in "OVKQ"})
    tables = {"curve": curve, "distance": distance, "final": final}
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


class Pair:
    """Softmax (model 0) and linear attention (model 1) from the same weights on the same prompts,
    by SGD.

    A model whose loss leaves the bound stays as it is. ``diverged``: the step at which each model
    did, None before. Prompts for evaluation come from a generator of their own.
    """

    def __init__(self, task: Any, length: int, spec: TrainSpec, seed: int | None = None) -> None:
        self.task, self.length, self.spec = task, length, spec
        start = default_weights(task.dim, torch.Generator().manual_seed(spec.seed))
        self.output = start.O  # only its last row acts and is trained
        self.device = torch.device(spec.device)
        parts = (start.O[-1], start.V, start.K, start.Q)
        self.weights = [torch.stack([part, part]).to(self.device) for part in parts]
        seed = spec.seed if seed is None else seed  # of the prompts
        generator = torch.Generator().manual_seed(seed % 2**63)
        self.drawn = batches(task, length, spec.batch, spec.steps, generator, self.device)
        self.fresh = torch.Generator().manual_seed((seed + 1) % 2**63)
        self.begun, self.last = 0, [np.nan, np.nan]
        self.diverged: list[int | None] = [None, None]

    @torch.no_grad()
    def advance(self, steps: int) -> Floats:
        """Train for some steps; the losses (steps, 2), NaN for a model that has stopped."""
        losses = np.full((steps, 2), np.nan)
        for step in range(steps):
            if None not in self.diverged:
                break
            loss, slopes = self._slopes(next(self.drawn))
            self.begun += 1
            for model in range(2):
                if self.diverged[model] is None:
                    losses[step, model] = self.last[model] = float(loss[model])
                    if not loss[model] <= BOUND:
                        self.diverged[model] = self.begun
                if self.diverged[model] is not None:
                    for slope in slopes:
                        slope[model] = 0.0
            for part, slope in zip(self.weights, slopes, strict=True):
                part.add_(slope, alpha=-self.spec.rate)
            if self.begun % 1000 == 0:
                advance(self.begun / self.spec.steps)
        return losses

    def _respond(self, prompts: Prompts) -> tuple[Tensor, Tensor, Tensor]:
        o, V, K, Q = self.weights
        theta = prompts.query @ (K.mT @ Q[..., :-1]).mT  # (2, B, e)
        return respond(prompts, theta.transpose(0, 1), (o[:, None] @ V)[:, 0])

    def _slopes(self, batch: Iterable[Prompts]) -> tuple[Floats, list[Tensor]]:
        """The two losses on a batch, and their gradients in the weights.

        With c = V^T o and U = K^T Q: do = V dc, dV = o dc^T, dK = Q dU^T, dQ = K dU.
        """
        o, V, K, Q = self.weights
        loss, by_c, by_U = np.zeros(2), torch.zeros_like(o), torch.zeros_like(Q[..., :-1])
        for prompts in batch:
            output, by_value, by_theta = self._respond(prompts)
            error = output - prompts.target[:, None]
            loss += (error**2).sum(dim=0).cpu().numpy() / self.spec.batch
            slope = (2.0 / self.spec.batch * error)[..., None]
            by_c += (slope * by_value).sum(dim=0)
            by_U += (slope * by_theta).permute(1, 2, 0) @ prompts.query
        by_o, by_V = (V @ by_c[..., None])[..., 0], o[..., None] * by_c[:, None]
        by_Q = torch.nn.functional.pad(K @ by_U, (0, 1))
        return loss, [by_o, by_V, Q[..., :-1] @ by_U.mT, by_Q]

    @torch.no_grad()
    def evaluate(self, prompts: int) -> tuple[Floats, Floats]:
        """Mean squared error of both models on the same fresh prompts, and its standard error; NaN
        for a model that has stopped.
        """
        squares = [
            (self._respond(part)[0] - part.target[:, None]) ** 2
            for part in next(batches(self.task, self.length, prompts, 1, self.fresh, self.device))
        ]
        values = torch.cat(squares).cpu().numpy()
        values[:, [at is not None for at in self.diverged]] = np.nan
        return values.mean(axis=0), values.std(axis=0) / np.sqrt(prompts)

    def distance(self) -> float:
        """Squared distance between the parameters of the two models, NaN when one has stopped."""
        if self.diverged != [None, None]:
            return float("nan")
        return float(sum(((part[0] - part[1]) ** 2).sum() for part in self.weights))

    def parameters(self, model: int) -> OVKQ:
        """The weights of a model, on the CPU."""
        o, V, K, Q = (part[model].cpu() for part in self.weights)
        return OVKQ(torch.cat([self.output[:-1], o[None]]), V, K, Q)


def record_steps(steps: int, records: int) -> list[int]:
    """0, the last step, and about ``records`` between: half evenly spaced, half in geometric
    progression.
    """
    even = np.linspace(0, steps, max(2, records // 2 + 1))
    geometric = np.geomspace(1, steps, max(2, records // 2))
    return [int(step) for step in np.unique(np.concatenate([even, geometric]).round())]

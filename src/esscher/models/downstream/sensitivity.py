"""One head at a time: what a predicted error of its attention says of the measured change of the
model's next tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from esscher.models.downstream.cache import Cell, Choice
from esscher.models.downstream.readings.divergence import Divergence
from esscher.models.downstream.text import Text
from esscher.models.huggingface.capture import AttentionCall
from esscher.models.huggingface.gradients import DRAWS, drawn_gradients, gradient_size
from esscher.models.huggingface.interventions import Kept

__all__ = ["PREDICTORS", "head_rows", "rank_correlation"]

RESAMPLES = 2000
PREDICTORS = {
    "relative": (
        "Error of the head's output relative to the output, root mean square over the continuation."
    ),
    "plain": "Error of the head's output, root mean square over the continuation.",
    "output": "The same behind W_O: length of what it changes in the residual stream.",
    "sensitive": (
        "The plain error times the root mean square gradient of log p of drawn next tokens at the"
        " head's output."
    ),
    "first_order": (
        "Root mean square of the change of log p of drawn next tokens, to first order; KL is half"
        " its square."
    ),
}


def head_rows(text: Text, cell: Cell, layers: Iterable[int], seed: int) -> Iterator[dict[str, Any]]:
    """A row for each head of some layers: predictors at the full model's inputs, and the divergence
    when it alone drops.
    """
    choice, measure = text.plan.choose(cell), Divergence()
    gradients = drawn_gradients(
        text.held, text.ids[:, text.tokens :], DRAWS, torch.Generator().manual_seed(seed)
    )
    calls = {call.layer: call for call in text.calls}
    for layer in layers:
        call, outputs = calls[layer], text.limits[layer]
        errors = text.head_errors(choice, call)
        # (draws, heads, D, width)
        own = torch.stack([draw[layer] for draw in gradients]).to(errors.dtype)
        predicted = {
            "relative": _rms(errors) / _rms(outputs).clamp_min(torch.finfo(errors.dtype).tiny),
            "plain": _rms(errors),
            "output": _rms(text.behind(layer, errors)),
            "sensitive": _rms(errors) * gradient_size(list(own)),
            "first_order": (own * errors).sum((2, 3)).square().mean(0).div(errors.shape[1]).sqrt(),
        }
        for head in range(call.heads):
            result, _ = text.decode(_alone(choice, layer, head))
            divergence = measure.value(text.full, text.outcome(result))
            row = {
                "layer": layer,
                "head": head,
                "kv_head": head // (call.heads // call.kv_heads),
                "kl": divergence,
            }
            yield row | {name: float(values[head]) for name, values in predicted.items()}


def _rms(rows: Tensor) -> Tensor:
    """(heads,): root mean square length over the positions."""
    return rows.square().sum(-1).mean(1).sqrt()


def _alone(choice: Choice, layer: int, head: int) -> Any:
    def decide(captured: AttentionCall) -> Kept | None:
        if captured.layer != layer:
            return None
        return choice.left(captured, torch.arange(captured.heads) == head)

    return decide


def rank_correlation(
    predicted: npt.NDArray[np.float64], measured: npt.NDArray[np.float64], seed: int
) -> tuple[float, float, float]:
    """Spearman's rank correlation over heads, and its 95 % interval by resampling them."""
    if len(predicted) < 3 or np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return float("nan"), float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    rows = generator.integers(len(predicted), size=(RESAMPLES, len(predicted)))
    ranks = [stats.rankdata(values[rows], axis=1) for values in (predicted, measured)]
    a, b = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    with np.errstate(invalid="ignore", divide="ignore"):
        again = (a * b).sum(1) / np.sqrt(np.square(a).sum(1) * np.square(b).sum(1))
    low, high = np.nanquantile(again, [0.025, 0.975])
    return float(stats.spearmanr(predicted, measured).statistic), float(low), float(high)

"""What a choice of keys costs, in nats per token, before anything is decoded.

The error e of every head's output on the kept keys is exact. With the head's Fisher metric F it
costs 1/2 e'F e, and costs of heads add (second order; errors of heads are taken as uncorrelated
through the model). Averaged over the queries of the text that is decoded, this predicts the
measured divergence. A prompt whose future is unknown has three kinds of queries at hand
(esscher.compress.prompt): its last ones, for which the keys that stand among them stay as those of
decoded tokens will, those of a replay, and moved ones. The first are the prediction, all are given
as a range (a heuristic: a rule may have chosen its keys by the same queries).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from esscher.compress.choose import Choice
from esscher.compress.prompt import Prompt
from esscher.compress.refit import chosen
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import SECOND_ORDER, FisherMetric, Gradients
from esscher.hf.interventions import with_kept
from esscher.keep.rule import Rule

SHARES = tuple(np.geomspace(0.01, 1.0, 25)[:-1].round(4).tolist())  # tried for a wanted loss


@dataclass(frozen=True)
class Price:
    """Predicted loss in nats per token: ``kl``, by the last queries of the prompt; ``low`` and
    ``high``: the range of the predictions by all kinds of queries that there are.
    """

    kl: float
    low: float
    high: float

    @property
    def second_order(self) -> bool:
        """Whether the prediction is in the range where the second order holds."""
        return self.kl <= SECOND_ORDER


def head_errors(call: AttentionCall, choice: Choice, full: Tensor | None = None) -> Tensor:
    """(heads, m, width): output on the kept keys minus the output on all keys, ``full``."""
    full = call.output()[0] if full is None else full
    return with_kept(call, choice.left(call)).output()[0] - full


def nats(metric: FisherMetric, errors: Iterable[tuple[int, Tensor]]) -> dict[int, Tensor]:
    """By layer the predicted loss of each head, (heads,), mean over the queries; several pieces of
    a layer are averaged.
    """
    found: dict[int, list[Tensor]] = {}
    for layer, error in errors:
        found.setdefault(layer, []).append(metric.nats(layer, error).mean(1))
    return {layer: torch.stack(pieces).mean(0) for layer, pieces in found.items()}


def predicted(metric: FisherMetric, calls: Iterable[AttentionCall], choice: Choice) -> float:
    """The predicted loss of a choice at the queries of these calls, all heads together."""
    found = nats(metric, ((call.layer, head_errors(call, choice)) for call in calls))
    return float(sum(x.sum() for x in found.values()))


def with_cross_terms(gradients: Sequence[Gradients], errors: Mapping[int, Tensor]) -> float:
    """1/2 E_p (sum over heads of g . e)^2: errors of heads may cancel or add up. ``gradients``: at
    the same queries as the errors, one for each draw of next tokens.
    """
    total = 0.0
    for draw in gradients:
        along = sum((draw[layer] * error).sum((0, 2)) for layer, error in errors.items())
        assert isinstance(along, Tensor)
        total += float(along.double().square().mean()) / 2
    return total / len(gradients)


def price(prompt: Prompt, choice: Choice) -> Price:
    """The price of a choice for a prompt whose future is unknown; of refitted values, by queries
    that they were not fitted to.
    """
    assert prompt.metric is not None
    found = choice.losses or {
        kind: predicted(prompt.metric, prompt.calls(kind), choice.sparing(prompt.spared[kind]))
        for kind, calls in prompt.references.items()
        if calls
    }
    return Price(found["last"], min(found.values()), max(found.values()))


def smallest_share(
    prompt: Prompt, rule: Rule, split: str, kl: float, end: str = ""
) -> tuple[Choice, Price]:
    """The keys of the smallest cache whose predicted loss is at most ``kl``, and their price.

    Bisection on a ladder of shares: the predicted loss falls with the share, up to noise.
    """
    shares = [*SHARES, 1.0]
    tried: dict[int, tuple[Choice, Price]] = {}

    def at(i: int) -> tuple[Choice, Price]:
        if i not in tried:
            generator = torch.Generator().manual_seed(0)
            choice = chosen(prompt, rule, shares[i], split, generator, end)
            tried[i] = choice, price(prompt, choice)
        return tried[i]

    low, high = -1, len(shares) - 1  # the share at ``high`` is enough
    while high - low > 1:
        middle = (low + high) // 2
        if at(middle)[1].kl <= kl:
            high = middle
        else:
            low = middle
    return at(high)

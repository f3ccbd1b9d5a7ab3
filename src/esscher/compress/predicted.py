"""Heads of a layer together: behind W_O their errors add, and heads that lose the same keys err
together.

Keys of a prefill are kept at random, one set for all heads of the layer or one for each. What the
layer adds to the stream is off by sum_h W_h e_h; its mean square is the sum over pairs of heads of
E <W_h e_h, W_g e_g>, exact by the integrals of one head and of two, beside the first order and
beside draws at the same inputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from esscher.compress.choose import Cell, Choice
from esscher.compress.metrics import Divergence, Error
from esscher.compress.text import EveryText, Text
from esscher.errors.nodes import first_order_pair, inclusion_error, pair_error
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import DRAWS, drawn_gradients, gradient_size
from esscher.hf.interventions import Kept
from esscher.intervals import Interval, mean_interval
from esscher.keep import parse
from esscher.keep.chance import Random
from esscher.keep.rule import Chance

QUERIES = 2  # of a continuation, evenly spread
PAIR_DRAWS = 400
SHARED, ALONE = "one for all heads", "one for each head"


@dataclass(frozen=True)
class _Query:
    """One query of all heads: scores (H, N) of the N keys that it sees, values (H, N, v), W_O (H,
    v, d), chances (N,).
    """

    scores: Tensor
    values: Tensor
    output: Tensor
    chance: Tensor

    @cached_property
    def attention(self) -> Tensor:
        return self.scores.softmax(1)

    @cached_property
    def limit(self) -> Tensor:
        """(H, v)"""
        return torch.einsum("hn,hnv->hv", self.attention, self.values)

    @cached_property
    def centred(self) -> Tensor:
        return self.values - self.limit[:, None]

    def pair(self, g: int, h: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Scores and centred values of two heads, in a space where products are those behind
        W_O.
        """
        between = self.output[g] @ self.output[h].T  # (v, v)
        return (self.scores[g], self.scores[h]), (self.centred[g] @ between, self.centred[h])

    def alone(self) -> tuple[float, Tensor]:
        """Summed mean square of the heads, and their mean errors behind W_O, (H, d)."""
        total, bias = 0.0, []
        for h in range(len(self.scores)):
            found = inclusion_error(self.scores[h][None], self.values[h], self.chance[None], None)
            bias.append(torch.as_tensor(found.bias)[0, 0] @ self.output[h])
            total += pair_error(*self.pair(h, h), self.chance)
        return total, torch.stack(bias)

    def exact(self) -> dict[str, float]:
        """Mean square of the layer's error, for one set of keys and for one set a head; and if
        heads were independent.
        """
        heads = range(len(self.scores))
        alone, bias = self.alone()
        across = sum(
            2 * pair_error(*self.pair(g, h), self.chance) for g in heads for h in heads if g < h
        )
        mean = float(bias.sum(0).square().sum() - bias.square().sum())
        return {SHARED: alone + across, ALONE: alone + mean, "independent": alone}

    def first_order(self) -> dict[str, float]:
        """The same to first order, by which heads with sets of their own are independent."""
        heads = range(len(self.scores))
        pairs = {
            (g, h): first_order_pair(
                (self.attention[g], self.attention[h]), self.pair(g, h)[1], self.chance
            )
            for g in heads
            for h in heads
        }
        return {SHARED: sum(pairs.values()), ALONE: sum(pairs[h, h] for h in heads)}

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """(PAIR_DRAWS,): squared error of the layer, of each draw."""
        return {
            SHARED: self._squares(generator, shared=True),
            ALONE: self._squares(generator, shared=False),
        }

    def _squares(self, generator: torch.Generator, *, shared: bool) -> Tensor:
        heads, keys = self.scores.shape
        e = torch.exp(self.scores - self.scores.max(1, keepdim=True).values)
        error = self.output.new_zeros(PAIR_DRAWS, self.output.shape[2])
        drawn = torch.rand(PAIR_DRAWS, keys, generator=generator, dtype=torch.float64)
        for h in range(heads):
            if not shared:
                drawn = torch.rand(PAIR_DRAWS, keys, generator=generator, dtype=torch.float64)
            kept = (drawn < self.chance).double() * e[h]
            out = kept @ self.values[h] / kept.sum(1, keepdim=True) - self.limit[h]
            error += out @ self.output[h]
        return error.square().sum(1)


def together_rows(text: Text, layers: Iterable[int], seed: int) -> Iterator[dict[str, Any]]:
    """Rows of some layers: one set of keys for all heads, and one for each; relative to what
    attention adds to the stream.
    """
    cell = _random_cell(text)
    calls = {call.layer: call for call in text.calls}
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        queries = list(_queries(text, cell, calls[layer]))
        size = sum(
            float((one.limit[:, None] @ one.output).sum((0, 1)).square().sum()) for one in queries
        )
        yield from _rows(cell, layer, queries, size, generator)


def _rows(
    cell: Cell, layer: int, queries: list[_Query], size: float, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    exact, first = [one.exact() for one in queries], [one.first_order() for one in queries]
    drawn = [one.drawn(generator) for one in queries]
    for subset in (SHARED, ALONE):
        squares = torch.stack([one[subset] for one in drawn]).sum(0)
        mean, low, high = mean_interval(squares.numpy(), least=0.0)
        numbers = {
            "exact": sum(one[subset] for one in exact),
            "first_order": sum(one[subset] for one in first),
            "independent": sum(one["independent"] for one in exact),
            "measured": mean,
            "low": low,
            "high": high,
        }
        place = {"rule": cell.rule, "size": cell.size, "layer": layer, "subset": subset}
        yield place | {name: math.sqrt(value / size) for name, value in numbers.items()}


def random_rule(rules: Iterable[str]) -> str | None:
    """The first rule of random keys that count once."""
    parts = ((text, parse(text).free) for text in rules)
    return next(
        (text for text, free in parts if isinstance(free, Random) and not free.reweight), None
    )


def _random_cell(text: Text) -> Cell:
    wanted = random_rule(text.plan.rules)
    found = next((cell for cell in text.plan.cells() if cell.rule == wanted), None)
    if found is None:
        raise ValueError(f"sizes: no size leaves {wanted} a key to choose; give larger sizes")
    return found


def _queries(text: Text, cell: Cell, call: AttentionCall) -> Iterator[_Query]:
    chance = text.plan.inclusion(cell, (call.layer, 0)).probability[0]
    rows = torch.linspace(0, call.query.shape[2] - 1, QUERIES + 2).round().long()[1:-1]
    contexts = [call.context(kv, rows).whole for kv in range(call.kv_heads)]
    keys, shared = contexts[0].keys, call.shared
    # later keys and a sink logit are always kept
    chance = torch.nn.functional.pad(chance, (0, keys - len(chance)), value=1.0)
    for i in range(len(rows)):
        scores = torch.cat(
            [context.scores.view(shared, len(rows), keys)[:, i] for context in contexts]
        )
        seen = torch.isfinite(scores).all(0)
        values = torch.stack([contexts[h // shared].v.double()[seen] for h in range(call.heads)])
        yield _Query(
            scores[:, seen], values, text.source.outputs[call.layer].double(), chance[seen]
        )


# ---- Inputs held fixed: the error of every layer under a keep rule, predicted from its queries,
# keys and values, and measured.

FIXED_QUERIES = 2  # of each layer, evenly spread
FIXED_DRAWS = 60
ROUNDING = 1e-3  # relative, of errors in float32 without chance


@dataclass(frozen=True)
class _Layer:
    """Some queries of one layer: of each (m of them) the heads' scores (H, N), values (H, N, v),
    chances and weights (H, N).

    ``groups``: heads of one number have their keys drawn together. ``output``: W_O, (H, v, d).
    """

    rows: Tensor
    scores: Tensor
    values: Tensor
    chance: Tensor
    weight: Tensor
    groups: Sequence[int]
    output: Tensor
    limit: Tensor  # (H, m, v)

    def squares(self) -> tuple[float, float]:
        """E |sum_h W_h e_h|^2 over the queries, and the sum over heads of E |W_h e_h|^2."""
        found = [self._query(i) for i in range(len(self.rows))]
        return sum(total for total, _ in found), sum(alone for _, alone in found)

    def _query(self, i: int) -> tuple[float, float]:
        heads = range(len(self.groups))
        bias = torch.stack([self._bias(h, i) for h in heads])
        among = {
            (h, h): self._pair(h, h, i) if self._drawn(h, i) else float(bias[h].square().sum())
            for h in heads
        }
        for h in heads:
            for g in range(h):
                together = self.groups[g] == self.groups[h] and self._drawn(h, i)
                among[g, h] = 2 * (
                    self._pair(g, h, i) if together else float((bias[g] * bias[h]).sum())
                )
        return sum(among.values()), sum(among[h, h] for h in heads)

    def _drawn(self, h: int, i: int) -> bool:
        """Whether chance has a say."""
        p = self.chance[h, i]
        return bool(((p > 0) & (p < 1)).any())

    def _bias(self, h: int, i: int) -> Tensor:
        chance, weight = self.chance[h, i][None], self.weight[h, i][None]
        found = inclusion_error(self.scores[h, i][None], self.values[h], chance, weight)
        return torch.as_tensor(found.bias)[0, 0] @ self.output[h]

    def _pair(self, g: int, h: int, i: int) -> float:
        between = self.output[g] @ self.output[h].T
        centred = (self.values[g] - self.limit[g, i]) @ between, self.values[h] - self.limit[h, i]
        return pair_error(
            (self.scores[g, i], self.scores[h, i]), centred, self.chance[h, i], self.weight[h, i]
        )

    @property
    def size(self) -> float:
        """|sum_h W_h limit|^2 over the queries."""
        return float(torch.bmm(self.limit, self.output).sum(0).square().sum())


def fixed_rows(text: Text | EveryText, rule: str) -> Iterator[dict[str, Any]]:
    """A row for each layer that drops keys: its error predicted and measured, and what of it heads
    have in common.

    A draw that keeps no key of a query counts as no error in the prediction, and the run keeps the
    nearest key then: the two differ where queries see so few keys that this is likely.
    """
    cell = next((cell for cell in text.cells() if cell.rule == rule), None)
    if cell is None:
        return
    layers = dict(_layers(text, cell))
    chance = any(isinstance(part, Chance) for part in parse(rule).parts)
    measured = np.stack(
        [
            _measured(text, replace(cell, draw=draw), layers)
            for draw in range(FIXED_DRAWS if chance else 1)
        ]
    )
    for i, (number, layer) in enumerate(layers.items()):
        total, alone = (value / layer.size for value in layer.squares())
        draws = measured[:, i] / layer.size  # (draws, 2)
        mean, low, high = _interval(draws[:, 0], least=0.0)
        row = {
            "rule": rule,
            "size": cell.size,
            "layer": number,
            "draws": len(draws),
            "predicted": math.sqrt(max(total, 0.0)),
        }
        row |= {"measured": math.sqrt(mean), "low": math.sqrt(low), "high": math.sqrt(high)}
        common = _interval(draws[:, 0] - draws[:, 1])
        yield row | {"common": total - alone} | dict(zip(COMMON, common, strict=True))


COMMON = ("common_measured", "common_low", "common_high")


def _interval(values: npt.NDArray[np.float64], least: float = -math.inf) -> Interval:
    """Mean over draws with its interval; of a rule without chance, which is drawn once, no
    width.
    """
    if len(values) == 1:
        return Interval(*(float(values[0]),) * 3)
    return mean_interval(values, least=least)


def agreement_of(fixed: pd.DataFrame) -> pd.DataFrame:
    """By rule: of how many layers the prediction lies in the interval, or differs by rounding; the
    same of what is common.
    """
    rows = []
    for (rule, size), own in fixed.groupby(["rule", "size"], sort=False):
        slack = ROUNDING * own["measured"]
        inside = (own["predicted"] >= own["low"] - slack) & (
            own["predicted"] <= own["high"] + slack
        )
        slack = 2 * slack * own["measured"]
        common = (own["common"] >= own["common_low"] - slack) & (
            own["common"] <= own["common_high"] + slack
        )
        apart = float(
            ((own["predicted"] - own["measured"]).abs() / own["measured"].clip(lower=1e-12)).max()
        )
        row = {
            "rule": rule,
            "size": size,
            "layers": len(own),
            "inside": int(inside.sum()),
            "common": int(common.sum()),
        }
        rows.append(row | {"apart": apart, "draws": int(own["draws"].iloc[0])})
    return pd.DataFrame(rows)


def _measured(
    text: Text | EveryText, cell: Cell, layers: Mapping[int, _Layer]
) -> npt.NDArray[np.float64]:
    """(layers, 2): the two sums of squares of one draw, of every layer at the full model's
    inputs.
    """
    found = {}

    def hand_on(captured: AttentionCall, out: Tensor) -> Tensor:
        layer = layers.get(captured.layer)
        full = text.limits[captured.layer]
        if layer is not None:
            error = torch.bmm((out[0] - full)[:, layer.rows].double(), layer.output)
            found[captured.layer] = float(error.sum(0).square().sum()), float(error.square().sum())
        return full[None].to(out.dtype)

    text.under(cell, after=hand_on)
    return np.array([found[number] for number in layers])


def _layers(text: Text | EveryText, cell: Cell) -> Iterator[tuple[int, _Layer]]:
    for call in text.calls:
        if call.layer not in text.source.layers:
            continue
        shared = call.shared
        rows = (
            torch.linspace(0, call.query.shape[2] - 1, FIXED_QUERIES + 2)
            .round()
            .long()[1:-1]
            .to(call.query.device)
        )
        parts, drops = [], text.source.drops(call.layer)
        for kv in range(call.kv_heads):
            context = call.context(kv, rows).whole
            decided, keys = text.inclusion(cell, call, kv), context.keys
            chance, weight = (
                _of_rows(one, shared, rows, keys) for one in (decided.probability, decided.weight)
            )
            seen = context.visible.view(shared, len(rows), keys)
            chance = chance.expand(shared, len(rows), keys) * seen
            weight = (
                torch.ones_like(chance)
                if weight is None
                else weight.expand(shared, len(rows), keys)
            )
            if drops is not None:
                own = drops[kv * shared : (kv + 1) * shared, None, None].to(chance.device)
                chance, weight = (
                    torch.where(own, chance, seen.double()),
                    torch.where(own, weight, 1.0),
                )
            scores, values = context.scores.view(shared, len(rows), keys), context.v.double()
            parts.append((scores, values.expand(shared, -1, -1), chance, weight))
        scores, values, chance, weight = (torch.cat(part) for part in zip(*parts, strict=True))
        groups = [h // shared if text.once else h for h in range(call.heads)]
        limit = torch.einsum("hmn,hnv->hmv", scores.softmax(2), values)
        output = text.source.outputs[call.layer].double()
        yield call.layer, _Layer(rows, scores, values, chance, weight, groups, output, limit)


def _of_rows(found: Tensor | None, shared: int, rows: Tensor, keys: int) -> Any:
    """(shared, m, N) of what was decided for all queries of the heads that share keys; of one
    decision for all (1, 1, N). A sink logit is always kept.
    """
    if found is None:
        return None
    found = torch.nn.functional.pad(found, (0, keys - found.shape[1]), value=1.0)
    return found[None] if len(found) == 1 else found.view(shared, -1, found.shape[1])[:, rows]


# ---- How a small error of heads moves the model's last word: pushed forward by Jacobian-vector
# products.

make_dual: Any = forward_ad.make_dual
unpack_dual: Any = forward_ad.unpack_dual


def pushed(text: Text, errors: Mapping[int, Tensor]) -> Tensor:
    """J e, (D, words): the change of the logits, to first order, when heads' outputs move by errors
    (heads, D, width).
    """

    def move(captured: AttentionCall, out: Tensor) -> Tensor:
        error = errors.get(captured.layer)
        if error is None:
            return out
        tangent = error[None].to(out.dtype)
        primal, before = unpack_dual(out)
        moved: Tensor = make_dual(primal, tangent if before is None else tangent + before)
        return moved

    # fused kernels have no derivatives
    with warnings.catch_warnings(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings(
            "ignore", category=DeprecationWarning, module=r"torch\."
        )  # of its own, when it first needs them
        result, _ = text.decode(lambda captured: None, after=move)
        change: Tensor = unpack_dual(result.logits).tangent
        return change[0].clone()


# ---- Keys dropped in one layer, and in all: what reaches the last word, measured and to first
# order.

ALL = -1  # in place of a layer: keys are dropped in all of them


def layer_rows(text: Text, cell: Cell, layers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """A row for each layer that alone drops keys, and one for all layers at once: change of the
    logits, measured and pushed forward from the errors that the layers' heads make at the full
    model's inputs; and the divergence.
    """
    choice, error, divergence = text.plan.choose(cell), Error(), Divergence()
    made = {call.layer: text.head_errors(choice, call) for call in text.calls}
    size = text.full.rows.double()
    size = size - size.mean(-1, keepdim=True)
    for layer in layers:
        some = made if layer == ALL else {layer: made[layer]}
        result, _ = text.decode(_only(text, choice, layer))
        kept = text.outcome(result)
        tangent: Tensor = pushed(text, some).double()
        tangent = tangent - tangent.mean(-1, keepdim=True)
        yield {
            "layer": layer,
            "error": error.value(text.full, kept),
            "first_order": float(tangent.square().sum() / size.square().sum()) ** 0.5,
            "kl": divergence.value(text.full, kept),
        }


def _only(text: Text, choice: Any, layer: int) -> Any:
    def decide(captured: AttentionCall) -> Any:
        return text.left(choice, captured) if layer in (ALL, captured.layer) else None

    return decide


# ---- One head at a time: what a predicted error of its attention says of the measured change of
# the model's next tokens.

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

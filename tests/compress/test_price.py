"""Predicted losses against brute force: the model itself, moved by small errors."""

from __future__ import annotations

import pytest
import torch

from esscher.compress.choose import choose
from esscher.compress.heads import head_rows
from esscher.compress.price import head_errors, predicted, price, with_cross_terms
from esscher.compress.text import Cell, Text
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import drawn_gradients, fisher_metric
from tests.compress.runs import source

MODELS = ("llama", "gpt2", "gemma", "gpt_oss")


@pytest.fixture(scope="module", params=MODELS)
def text(request: pytest.FixtureRequest) -> Text:
    dtype = "float32" if request.param == "gpt_oss" else "float64"  # its experts know no float64
    found = source(request.param, rules=["fisher"], sinks=1, recent=2, dtype=dtype)
    return Text(found, found.ids(int(found.texts[0])), found.prefill)


def divergence(text: Text, errors: dict[int, torch.Tensor], step: float) -> float:
    """KL per token when the outputs of heads are moved by step * errors."""

    def attend(call: AttentionCall) -> torch.Tensor:
        out = call.output()
        return out + step * errors[call.layer][None].to(out) if call.layer in errors else out

    moved = text.decode(lambda call: None, attend=attend).logits[0]
    p, q = (torch.log_softmax(rows.double(), -1) for rows in (text.full.rows, moved))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_small_errors_cost_what_the_gradients_say(text: Text) -> None:
    """KL / step^2 -> 1/2 E_y (sum over heads and positions of g . e)^2: 400 draws of next tokens,
    4 standard errors (false alarm 1 in 16,000), and 2 % for the step.
    """
    choice = choose(text.prompt, text.source.rules["fisher"], 0.5, "cut")
    errors = {call.layer: head_errors(call, choice) for call in text.calls}
    ids = text.ids[:, text.tokens :]
    drawn = drawn_gradients(text.prompt.held, ids, 400, torch.Generator().manual_seed(3))
    along = torch.tensor(
        [sum(float((one[k] * errors[k]).sum()) for k in errors) for one in drawn]
    ).double()
    costs = along.square() / 2 / ids.shape[1]
    step = 3e-3 if text.full.rows.dtype == torch.float64 else 0.1
    by_hand = divergence(text, errors, step) / step**2
    noise = 4 * float(costs.std()) / len(costs) ** 0.5
    assert abs(float(costs.mean()) - by_hand) < noise + 0.02 * by_hand
    assert with_cross_terms(drawn, errors) > 0


def test_one_head_at_one_place_costs_its_metric(text: Text) -> None:
    """Normal errors of one head at one random position cost trace F / 2 on average: 60 of them, 4
    standard errors.
    """
    ids, layer = text.ids[:, text.tokens :], text.calls[-1].layer
    drawn = drawn_gradients(text.prompt.held, ids, 300, torch.Generator().manual_seed(5))
    metric = fisher_metric(drawn)
    heads, places, width = drawn[0][layer].shape
    wanted = metric.of_layer[layer].diagonal(dim1=1, dim2=2).sum(1) / 2
    generator = torch.Generator().manual_seed(0)
    step, found = 1e-2 if text.full.rows.dtype == torch.float64 else 0.1, []
    for _ in range(60):
        error = torch.zeros(heads, places, width, dtype=torch.float64)
        place = int(torch.randint(places, (1,), generator=generator))
        error[1, place] = torch.randn(width, generator=generator, dtype=torch.float64)
        found.append(divergence(text, {layer: error}, step) / step**2 * places)
    values = torch.tensor(found)
    noise = 4 * float(values.std()) / len(found) ** 0.5
    spread = 4 * float(metric.stderr[layer][1] * wanted[1])
    assert abs(float(values.mean()) - float(wanted[1])) < noise + spread + 0.03 * float(wanted[1])


def test_more_keys_cost_less_and_the_whole_cache_nothing(text: Text) -> None:
    rule, metric = text.source.rules["fisher"], text.prompt.metric
    assert metric is not None
    choices = [choose(text.prompt, rule, keep, "cut") for keep in (0.45, 0.7, 0.85, 1.0)]
    costs = [predicted(metric, text.calls, choice) for choice in choices]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(0, abs=1e-12)
    found = price(text.prompt, choices[0])
    assert found.low <= found.kl <= found.high
    assert found.second_order == (found.kl <= 0.2)


def test_heads_one_at_a_time(text: Text) -> None:
    cell = Cell("fisher", "cut", 0.4, 0)
    layer = text.calls[1].layer
    rows = list(head_rows(text, cell, [layer], seed=0))
    assert [row["head"] for row in rows] == list(range(text.calls[1].heads))
    error = text.errors(text.choice(cell))[layer]
    for row in rows:
        assert row["plain"] == pytest.approx(
            float(error[row["head"]].square().sum(-1).mean().sqrt())
        )
        if row["plain"] > 0:
            assert row["kl"] > 0
            assert row["nats"] > 0

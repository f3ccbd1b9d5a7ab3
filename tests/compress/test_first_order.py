"""Errors of heads pushed to the logits, and pulled back from them, against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from esscher.compress.choose import Cell
from esscher.compress.predicted import (
    ALL,
    PREDICTORS,
    head_rows,
    layer_rows,
    pushed,
    rank_correlation,
)
from esscher.compress.text import Text
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import drawn_gradients
from tests.compress.runs import source

RULE = "sinks:2+recent:4+impact"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def text(request: pytest.FixtureRequest) -> Text:
    found = source(request.param, rules=[RULE], dtype="float64")
    return Text(found, found.ids(int(found.texts[0])), found.prefill, {})


def moved(text: Text, errors: dict[int, torch.Tensor], step: float) -> torch.Tensor:
    def after(captured: AttentionCall, out: torch.Tensor) -> torch.Tensor:
        return out + step * errors[captured.layer][None] if captured.layer in errors else out

    found: torch.Tensor = text.decode(lambda captured: None, after=after)[0].logits[0]
    return found


def test_pushed_forward_is_the_derivative(text: Text) -> None:
    """Central differences; llama's norms are of float32 whatever the model is."""
    g = torch.Generator().manual_seed(1)
    errors = {
        call.layer: torch.randn(call.output()[0].shape, generator=g, dtype=torch.float64)
        for call in text.calls
    }
    for some in (errors, {1: errors[1]}):
        by_steps = (moved(text, some, 1e-3) - moved(text, some, -1e-3)) / 2e-3
        assert float((pushed(text, some) - by_steps).abs().max()) < 1e-3 * float(
            by_steps.abs().max()
        )


def test_gradients_of_drawn_tokens_measure_the_same(text: Text) -> None:
    """E_y (g . e)^2 = sum over positions of Var_p(J e): 600 draws, 4 standard errors (false alarm 1
    in 16,000).
    """
    choice = text.plan.choose(Cell(RULE, "uniform", 0.4, 0))
    errors = {call.layer: text.head_errors(choice, call) for call in text.calls}
    tangent, p = pushed(text, errors), torch.softmax(text.full.rows, -1)
    wanted = float(((p * tangent.square()).sum(-1) - (p * tangent).sum(-1).square()).sum())
    drawn = drawn_gradients(
        text.held, text.ids[:, text.tokens :], 600, torch.Generator().manual_seed(3)
    )
    squares = np.array(
        [sum(float((one[layer] * errors[layer]).sum()) for layer in one) ** 2 for one in drawn]
    )
    assert abs(squares.mean() - wanted) < 4 * squares.std() / len(squares) ** 0.5


def test_small_errors_cost_half_their_variance(text: Text) -> None:
    """KL = Var_p(J e) / 2 as the step goes to 0."""
    choice = text.plan.choose(Cell(RULE, "uniform", 0.4, 0))
    errors = {call.layer: text.head_errors(choice, call) for call in text.calls}
    tangent, logp = pushed(text, errors), torch.log_softmax(text.full.rows, -1)
    p, step = logp.exp(), 1e-3
    variance = (p * tangent.square()).sum(-1) - (p * tangent).sum(-1).square()
    divergence = (p * (logp - torch.log_softmax(moved(text, errors, step), -1))).sum(-1)
    assert divergence.sum() / step**2 == pytest.approx(float(variance.sum()) / 2, rel=0.02)


def test_a_layer_alone_and_all_of_them(text: Text) -> None:
    """First order of all layers is not the sum of lengths; in the last layer alone it is nearly all
    there is.
    """
    rows = {
        row["layer"]: row for row in layer_rows(text, Cell(RULE, "uniform", 0.7, 0), [ALL, 0, 1])
    }
    assert rows[1]["first_order"] == pytest.approx(rows[1]["error"], rel=0.5)
    assert rows[ALL]["first_order"] <= rows[0]["first_order"] + rows[1]["first_order"]
    assert min(row["kl"] for row in rows.values()) > 0


def test_heads_one_at_a_time(text: Text) -> None:
    cell = Cell(RULE, "uniform", 0.4, 0)
    rows = list(head_rows(text, cell, [1], seed=0))
    assert [(row["layer"], row["head"]) for row in rows] == [(1, head) for head in range(4)]
    assert all(row[name] > 0 for row in rows for name in ("kl", *PREDICTORS))
    choice, call = text.plan.choose(cell), text.calls[1]
    error = text.head_errors(choice, call)[2]
    into = text.source.outputs[1][2].double()
    assert rows[2]["plain"] == pytest.approx(float(error.square().sum(-1).mean().sqrt()))
    assert rows[2]["output"] == pytest.approx(
        float((error @ into).square().sum(-1).mean().sqrt()), rel=1e-5
    )


def test_rank_correlation_is_scipys_and_its_interval_covers() -> None:
    """60 samples of 40 heads from a bivariate normal: the 95 % interval misses at most 11 times (p
    < .001).
    """
    g, missed = np.random.default_rng(0), 0
    truth = 6 / np.pi * np.arcsin(0.7 / 2)
    for seed in range(60):
        x, z = g.standard_normal((2, 40))
        y = 0.7 * x + np.sqrt(1 - 0.49) * z
        rho, low, high = rank_correlation(x, y, seed)
        assert rho == pytest.approx(float(stats.spearmanr(x, y).statistic))
        missed += not low <= truth <= high
    assert missed <= 11

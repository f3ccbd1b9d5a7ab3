"""Refitted values: against least squares by numpy, and what they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import esscher as es
from esscher.compress.choose import choose
from esscher.compress.price import head_errors, predicted, price
from esscher.compress.refit import _ridge, refit
from esscher.compress.text import Cell, Text
from esscher.hf.interventions import with_kept
from tests.compress.runs import source

MODELS = ("llama", "gpt2", "gemma", "gpt_oss")
RIDGE = 0.3


@pytest.fixture(scope="module", params=MODELS)
def text(request: pytest.FixtureRequest) -> Text:
    dtype = "float32" if request.param == "gpt_oss" else "float64"
    rules = ["fisher", "fisher+refit"]
    found = source(request.param, rules=rules, sinks=1, recent=2, dtype=dtype)
    return Text(found, found.ids(int(found.texts[0])), found.prefill)


def test_values_are_those_of_a_ridge_regression(text: Text) -> None:
    """By numpy's least squares on the stacked system [W; sqrt(ridge s) I] D = [T; 0]."""
    prompt, layer, kv = text.prompt, text.calls[0].layer, 0
    choice = choose(prompt, text.source.rules["fisher"], 0.5, "cut")
    found = refit(prompt, choice, ridge=RIDGE)
    assert prompt.metric is not None
    rows, missing = [], []
    at = choice.kept[layer][kv].nonzero()[:, 0]
    for kind in filter(prompt.references.get, prompt.references):
        (call,) = prompt.calls(kind, layer)
        left = with_kept(call, choice.sparing(prompt.spared[kind]).left(call))
        for head in range(call.shared):
            size = float(prompt.metric.of_layer[layer][head].trace())
            factor = (size / call.query.shape[2]) ** 0.5
            rows.append(factor * left.weights()[0, head][:, at].double())
            missing.append(factor * (call.output() - left.output())[0, head].double())
    w, t = torch.cat(rows).numpy(), torch.cat(missing).numpy()
    size = (w**2).sum(1).mean() * RIDGE
    stacked = np.vstack([w, size**0.5 * np.eye(len(at))])
    wanted, *_ = np.linalg.lstsq(stacked, np.vstack([t, np.zeros((len(at), t.shape[1]))]))
    before = prompt.references["last"][layer].value[0, kv, : prompt.keys].double()
    moved = found.values[layer][kv].double() - before
    exact = text.full.rows.dtype == torch.float64
    tolerance = 1e-8 if exact else 1e-4
    np.testing.assert_allclose(moved[at].numpy(), wanted, rtol=tolerance, atol=tolerance)
    assert bool((moved[~choice.kept[layer][kv]] == 0).all())


def test_errors_fall_at_the_queries_that_values_are_fitted_to(text: Text) -> None:
    prompt = text.prompt
    choice = choose(prompt, text.source.rules["fisher"], 0.4, "cut")
    found = refit(prompt, choice)
    assert prompt.metric is not None
    for kind in filter(prompt.references.get, prompt.references):
        before, after = (
            predicted(prompt.metric, prompt.calls(kind), x.sparing(prompt.spared[kind]))
            for x in (choice, found)
        )
        assert after < before
    inside = predicted(prompt.metric, prompt.calls("last"), found.sparing(prompt.spared["last"]))
    assert price(prompt, found).kl > inside


@pytest.mark.parametrize("shape", [(23, 11), (11, 23)])
def test_a_left_out_query_is_judged_by_a_fit_to_the_others(shape: tuple[int, int]) -> None:
    """Each row in turn is taken out, and the rest solved by numpy."""
    state = np.random.default_rng(4)
    w, t, shift = state.random(shape), state.normal(size=(shape[0], 3)), 0.7
    moved, left_out = _ridge(torch.from_numpy(w), torch.from_numpy(t), shift)
    eye = shift * np.eye(shape[1])
    wanted = np.linalg.solve(w.T @ w + eye, w.T @ t)
    np.testing.assert_allclose(moved.numpy(), wanted, rtol=1e-9)
    for i in range(shape[0]):
        rest = np.delete(w, i, 0)
        fitted = np.linalg.solve(rest.T @ rest + eye, rest.T @ np.delete(t, i, 0))
        np.testing.assert_allclose(left_out[i].numpy(), t[i] - w[i] @ fitted, rtol=1e-9)


def test_the_price_of_refitted_values_is_that_of_left_out_queries(text: Text) -> None:
    """Of the last queries, by the ridge of the head; for one head spelled out."""
    prompt = text.prompt
    choice = choose(prompt, text.source.rules["fisher"], 0.4, "cut")
    found = refit(prompt, choice)
    assert price(prompt, found).kl == found.losses["last"]
    assert found.losses.keys() == {kind for kind, calls in prompt.references.items() if calls}


def test_a_run_decodes_from_refitted_values(text: Text) -> None:
    """The same as a model whose cache holds these values; the whole cache needs no refit."""
    cell = Cell("fisher+refit", "cut", 0.5, 0)
    choice, outcome, _ = text.run(cell)
    layers = text.prompt.held.cache.layers
    before = [layer.values for layer in layers]
    for number, layer in enumerate(layers):
        layer.values = choice.values[number][None].to(layer.values)
    plain = text.decode(lambda call: replace(choice, values={}).left(call))
    for layer, values in zip(layers, before, strict=True):
        layer.values = values
    torch.testing.assert_close(outcome.rows, plain.logits[0], rtol=1e-4, atol=1e-5)
    whole = refit(text.prompt, choose(text.prompt, text.source.rules["fisher"], 1.0, "cut"))
    for call in text.calls:
        assert float(head_errors(call, whole).abs().max()) < 1e-4


def test_compress_holds_refitted_values_in_the_same_bytes(text: Text) -> None:
    model, ids = text.source.loaded.model, text.ids[:, : text.tokens]
    before = model.config._attn_implementation
    try:
        plain, fitted = (
            es.compress(model, ids, keep=0.5, rule=rule, sinks=1, recent=2)
            for rule in ("fisher", "fisher+refit")
        )
    finally:
        model.set_attn_implementation(before)
    assert fitted.compression.bytes == plain.compression.bytes
    assert fitted.compression.rule.endswith("+refit")
    pairs = zip(plain.layers, fitted.layers, strict=True)
    moved = [
        (a[1] != b[1]).any() for x, y in pairs for a, b in zip(x.held(), y.held(), strict=True)
    ]
    assert any(map(bool, moved))

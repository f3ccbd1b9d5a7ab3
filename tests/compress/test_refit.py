"""Weights and refitted values: against numpy and brute force, and what they are for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import esscher as es
from esscher.compress.choose import Choice, choose
from esscher.compress.price import head_errors, predicted, price
from esscher.compress.refit import FIRM, MOST, RANGE, _ridge, refit
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


def refitted(text: Text, share: float, **settings: float) -> tuple[Choice, Choice]:
    """The choice of ``fisher``, and the same refitted."""
    prompt, rule = text.prompt, text.source.rules["fisher"]
    choice = choose(prompt, rule, share, "cut")
    return choice, refit(prompt, choice, prompt.sure(rule), **settings)


def test_weights_make_up_for_the_mass_of_dropped_keys(text: Text) -> None:
    """By numpy's least squares on the model's own softmax: what chosen keys should have is their
    mass and that of dropped keys.
    """
    prompt, kv = text.prompt, 0
    choice, found = refitted(text, 0.4)
    sure = prompt.sure(text.source.rules["fisher"])
    layer = max(found.weight, key=lambda n: float(found.weight[n][kv].max()))
    chosen = choice.kept[layer][kv] & ~sure[layer][kv]
    dropped = ~choice.kept[layer][kv] & prompt.held_by((layer, kv))
    mass, wanted = [], []
    for kind in filter(prompt.references.get, prompt.references):
        (call,) = prompt.calls(kind, layer)
        earlier = torch.arange(prompt.keys) < prompt.keys - prompt.spared[kind]
        full = call.weights()[0, : call.shared, :, : prompt.keys].double().flatten(0, 1)
        mass.append((full * earlier)[:, chosen] / len(full) ** 0.5)
        wanted.append((full * earlier)[:, chosen | dropped].sum(1) / len(full) ** 0.5)
    a, t = torch.cat(mass).numpy(), torch.cat(wanted).numpy()
    common = a.sum(1) @ t / (a.sum(1) @ a.sum(1))
    assert 1 < common < MOST
    pull = (FIRM * (a**2).sum(1).mean()) ** 0.5 * np.eye(a.shape[1])
    best, *_ = np.linalg.lstsq(
        np.vstack([a, pull]), np.concatenate([t, pull.sum(1) * common]), rcond=None
    )
    tolerance = 1e-6 if text.full.rows.dtype == torch.float64 else 1e-2
    weight = found.weight[layer][kv]
    np.testing.assert_allclose(
        weight[chosen].numpy(), best.clip(common / RANGE, common * RANGE), rtol=tolerance
    )
    assert bool((weight[~chosen] == 1).all())


def test_values_are_those_of_a_ridge_regression(text: Text) -> None:
    """By numpy's least squares on the stacked system [W; sqrt(ridge s) I] D = [T; 0]."""
    prompt, layer, kv = text.prompt, text.calls[0].layer, 0
    choice, found = refitted(text, 0.5, ridge=RIDGE)
    weighted = replace(found, values={})
    assert prompt.metric is not None
    rows, missing = [], []
    at = choice.kept[layer][kv].nonzero()[:, 0]
    for kind in filter(prompt.references.get, prompt.references):
        (call,) = prompt.calls(kind, layer)
        left = with_kept(call, weighted.sparing(prompt.spared[kind]).left(call))
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
    choice, found = refitted(text, 0.4)
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
    prompt, (_, found) = text.prompt, refitted(text, 0.4)
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
    _, whole = refitted(text, 1.0)
    assert all(bool((rows == 1).all()) for rows in whole.weight.values())
    for call in text.calls:
        assert float(head_errors(call, whole).abs().max()) == 0


def test_compress_holds_refitted_values_and_a_weight_for_each_key(text: Text) -> None:
    model, ids = text.source.loaded.model, text.ids[:, : text.tokens]
    before = model.config._attn_implementation
    try:
        plain, fitted = (
            es.compress(model, ids, keep=0.5, rule=rule, sinks=1, recent=2)
            for rule in ("fisher", "fisher+refit")
        )
    finally:
        model.set_attn_implementation(before)
    size = text.calls[0].key.element_size()
    weighted = [
        layer.positions
        for layer in fitted.layers
        if any(bool((bias != 0).any()) for bias in layer.biases)
    ]
    keys = sum(len(at) for positions in weighted for at in positions)
    assert keys > 0
    assert fitted.compression.bytes == plain.compression.bytes + keys * size
    assert fitted.compression.rule.endswith("+refit")
    pairs = zip(plain.layers, fitted.layers, strict=True)
    moved = [
        (a[1] != b[1]).any() for x, y in pairs for a, b in zip(x.held(), y.held(), strict=True)
    ]
    assert any(map(bool, moved))

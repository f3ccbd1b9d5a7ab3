"""Probes of tiny models: shared keys, rotary positions, capped scores, position biases, sink
logits, biases of the maps.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.runs import Run
from tests.models.probe_runs import (
    captured_layers,
    few_texts,
    head_row,
    pooled_tensors,
    rows_of,
    source,
    tiny_model,
)

SMALL: dict[str, Any] = {
    "max_tokens": 400,
    "window": 64,
    "queries": 8,
    "kept_queries": 3,
    "n": "16,50,140,400",
    "layers": (1,),
    "heads": (1, 2),
    "pool": "corpus",
}


def probe(model: Any, words: Any, out: Path, **more: Any) -> Run:
    return es.probe(model, few_texts(), tokenizer=words, out=out, **{**SMALL, **more})


def truth_of(run: Run, layer: int, head: int) -> es.ErrorCurve:
    """Exact curve of one head from tensors captured window by window; scores are capped by
    hand.
    """
    found = source(run)
    q, k, v = (x.double() for x in pooled_tensors(found, layer))
    own = head * k.shape[0] // q.shape[0]
    config = found.loaded.model.config
    scale = getattr(config, "query_pre_attn_scalar", q.shape[-1]) ** -0.5
    scores = scale * q[head] @ k[own].T
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    # the key of a token is its own axis, so scores are the queries
    one = torch.eye(scores.shape[1], dtype=torch.float64)
    counts = rows_of(run, layer, head)["n"].to_numpy()
    return es.exact_pool_curve(scores, one, v[own], counts, scale=1.0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_curves_of_tiny_models(name: str, tmp_path: Path) -> None:
    run = probe(*tiny_model(name), tmp_path)
    heads = run.table("heads")
    assert list(heads["status"]) == ["ok"] * 2
    assert list(heads["kv_head"]) == ([1, 2] if name == "bert" else [0, 1])
    assert set(heads["token_space"]) == {"hidden" if name == "bert" else "query-key"}
    assert set(heads["reason"]) == {""}
    for head in (1, 2):
        truth = truth_of(run, 1, head).rms
        np.testing.assert_allclose(rows_of(run, 1, head)["rms"], truth, rtol=1e-4, atol=1e-12)


def test_horizons_where_positions_rotate(tmp_path: Path) -> None:
    """H2 = scale ||Sigma_k^{1/2} Sigma_q^{1/2}||, H = scale ||Sigma_k||^{1/2} with the pair (q, k)
    as the token.

    Its reach is the norm of its covariance, q and k together.
    """
    run = probe(*tiny_model("llama"), tmp_path)
    found = source(run)
    seen = captured_layers(found)[1]
    pooled = [torch.from_numpy(found.pooled[window]) for window in range(len(seen))]
    q, k = (
        torch.cat(
            [getattr(c, name)[0][:, p] for c, p in zip(seen, pooled, strict=True)], dim=1
        ).double()
        for name in ("query", "key")
    )
    for head in (1, 2):
        cov_q, cov_k = (torch.cov(x.T, correction=0) for x in (q[head], k[head // 2]))
        row = head_row(run, 1, head)
        both = math.sqrt(float(torch.linalg.eigvals(cov_k @ cov_q).real.max())) / math.sqrt(8)
        assert row["horizon2"] == pytest.approx(both, rel=1e-5)
        assert row["horizon"] == pytest.approx(
            math.sqrt(float(torch.linalg.matrix_norm(cov_k, 2)) / 8), rel=1e-5
        )
        joint = torch.cov(torch.cat([q[head], k[head // 2]], dim=1).T, correction=0)
        assert row["reach"] == pytest.approx(float(torch.linalg.matrix_norm(joint, 2)), rel=1e-5)
        assert row["coupling"] == pytest.approx(row["reach"] * row["horizon"] ** 2, rel=1e-9)


def test_capped_scores_stay_under_the_cap(tmp_path: Path) -> None:
    """At most 0.5 in size: every weight is within e of every other, so nearly all tokens are
    effective.
    """
    run = probe(*tiny_model("gemma2"), tmp_path)
    heads = run.table("heads")
    assert (heads["score_sd"] <= 0.5).all()
    assert (heads["effective_tokens"] >= 400 / math.cosh(0.5) ** 2).all()


SINK_LOGIT = "a sink logit is in the softmax: keep rules never drop it, draws may take it"


@pytest.mark.parametrize(
    ("name", "kind", "pool", "reason"),
    [
        ("t5", "t5", "corpus", "left out of the pool: position bias of the scores"),
        ("t5", "t5", "sequence", ""),
        ("gpt_oss", "llama", "corpus", "left out of the pool: sink logit"),
        (
            "gpt_oss",
            "llama",
            "sequence",
            SINK_LOGIT,
        ),
    ],
)
def test_reason_says_what_the_pool_leaves_out(
    name: str, kind: str, pool: str, reason: str, tmp_path: Path
) -> None:
    model, words = tiny_model(name, kind, **({"sliding_window": 40} if name == "gpt_oss" else {}))
    run = probe(model, words, tmp_path, pool=pool, n=None, heads=(1,), rules="none")
    (row,) = run.table("heads").to_dict("records")
    assert row["status"] == "ok"
    assert (
        row["reason"]
        .replace("1 of 10 queries see fewer than 16 keys and are left out", "")
        .strip("; ")
        == reason
    )
    assert 0 < row["sink_mass"] < 1


# ---- biases
# ------------------------------------------------------------------------------------------


def biased(part: str, size: float) -> tuple[Any, Any]:
    """A tiny BERT whose last layer has this bias in its query or key map; what enters the layer is
    the same for all.
    """
    model, words = tiny_model("bert")
    attention = model.encoder.layer[1].attention.self
    with torch.no_grad():
        for name in ("query", "key"):
            getattr(attention, name).bias.zero_()
        direction = torch.linspace(-1, 1, 32) + 0.3
        getattr(attention, part).bias.copy_(size * direction)
    return model, words


def test_a_query_bias_is_in_and_a_key_bias_cancels(tmp_path: Path) -> None:
    """<b_q, k> tilts every score of a head; <q, b_k> is the same for all keys of a query and leaves
    the softmax alone.
    """
    runs = {
        name: probe(*biased(part, size), tmp_path / name, queries=16, kept_queries=1)
        for name, part, size in (
            ("none", "query", 0.0),
            ("key", "key", 8.0),
            ("query", "query", 8.0),
        )
    }
    plain = runs["none"].table("heads")
    with_query, with_key = runs["query"].table("heads"), runs["key"].table("heads")
    for name in ("rms_at_n", "effective_tokens", "beta_fit", "tokens_needed_10pct", "score_sd"):
        np.testing.assert_allclose(
            with_key[name], plain[name], rtol=2e-3 if name == "tokens_needed_10pct" else 1e-4
        )
    ignoring = np.abs(with_query["rms_at_n"] / plain["rms_at_n"] - 1)
    assert (ignoring > 0.2).any()
    assert (
        np.abs(with_query["tokens_needed_10pct"] / plain["tokens_needed_10pct"] - 1) > 0.4
    ).any()
    assert (np.abs(with_query["beta_fit"] - plain["beta_fit"]) > 0.005).any()
    # covariances do not see a bias, so neither do horizon and coupling
    for name in ("horizon", "horizon2", "coupling", "reach"):
        np.testing.assert_allclose(with_query[name], plain[name], rtol=1e-5)
    for head in (1, 2):
        truth = truth_of(runs["query"], 1, head)
        np.testing.assert_allclose(rows_of(runs["query"], 1, head)["rms"], truth.rms, rtol=1e-4)
        # a token's own tensors with the bias taken off give another curve: that of the run without
        # it
        found = source(runs["query"])
        q, k, v = (x.double() for x in pooled_tensors(found, 1))
        bias = (
            found.loaded.model.encoder.layer[1]
            .attention.self.query.bias.detach()
            .double()
            .reshape(4, 1, 8)
        )
        off = es.exact_pool_curve(
            (q - bias)[head], k[head], v[head], rows_of(runs["none"], 1, head)["n"].to_numpy()
        )
        np.testing.assert_allclose(rows_of(runs["none"], 1, head)["rms"], off.rms, rtol=1e-4)

"""The critical scale and the growth of effective tokens: the scores that a model gives, read back
from its tables; parts and wide scores.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors.integral import error_from_nodes
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.weights import GAPS, Tail
from tests.models.probe_runs import captured_layers, few_texts, head_row, source, tiny_model
from tests.probe.views import view

SMALL: dict[str, Any] = {
    "max_tokens": 400,
    "window": 64,
    "queries": 12,
    "kept_queries": 4,
    "layers": (1,),
    "heads": (1, 2),
}


def probe(name: str, out: Path, **more: Any) -> Any:
    model, words = tiny_model(name)
    return es.probe(
        model, few_texts(), tokenizer=words, out=out, **{**SMALL, "rules": "none", **more}
    )


def some_scores(queries: int, keys: int, spread: float) -> torch.Tensor:
    return spread * torch.randn(queries, keys, generator=torch.Generator().manual_seed(5))


def test_the_tables_of_a_causal_model(tmp_path: Path) -> None:
    """Against sums key by key over the scores that its own queries and keys make, every key that
    they see.
    """
    run = probe("llama", tmp_path, pool="sequence", queries=6, kept_queries=6, heads=(2,))
    found, table, head = source(run), run.table("curves"), 2
    seen = captured_layers(found)[1]
    rows = table[(table["layer"] == 1) & (table["head"] == head) & (table["metric"] == "l2")]
    n, p2, critical, within = rows["n"].to_numpy(), [], [], []
    for window, position in zip(
        found.queries.windows.tolist(), found.queries.positions.tolist(), strict=True
    ):
        captured = seen[window]
        key = captured.key[0, head * captured.kv_heads // captured.heads, : position + 1].double()
        scores = captured.scale * captured.query[0, head, position].double() @ key.T
        if len(scores) >= 16:
            gap = scores.max() - scores.sort(descending=True).values[1:]
            critical.append(float((torch.arange(2, len(scores) + 1).log() / gap).max()))
            within.append([1 + int((gap <= t).sum()) for t in 2.0 ** np.arange(-4, 7)])
            p2.append(error_from_nodes(scores[None], None, scores[:, None], None, n).sum_p2[0])
    np.testing.assert_allclose(rows["effective_tokens"], 1 / np.mean(p2, axis=0), rtol=1e-4)
    row = head_row(run, 1, head)
    assert row["critical_scale"] == pytest.approx(np.median(critical), rel=0.02)
    gaps = run.table("gaps")
    keys = gaps[(gaps["layer"] == 1) & (gaps["head"] == head)]["keys"]
    np.testing.assert_allclose(keys, np.exp(np.log(within).mean(0)), rtol=0.1)


def test_a_corpus_in_parts_is_the_corpus(tmp_path: Path) -> None:
    """States of parts merge."""
    whole = probe("bert", tmp_path / "whole", pool="corpus")
    parts = probe("bert", tmp_path / "parts", pool="corpus", part=130)
    one, other = (run.table("gaps").sort_values(["head", "gap"]) for run in (whole, parts))
    np.testing.assert_allclose(one["keys"], other["keys"], rtol=1e-5)
    one, other = (
        run.table("heads").sort_values("head")["critical_scale"] for run in (whole, parts)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_scores_wider_than_a_grid_are_summed_key_by_key() -> None:
    q, k = torch.tensor([[1.0], [2.0]]), some_scores(40, 1, 400.0)
    seen = torch.ones(2, 40, dtype=torch.bool)
    seen[0, 5:20] = False
    scores = (q @ k.T).masked_fill(~seen, -torch.inf)
    whole = view(ProbeSpec(), scores)
    found = Tail().measure(replace(whole, whole=whole))
    for i in range(2):
        own = seen[i].nonzero()[:, 0]
        gap = scores[i].max().double() - scores[i, own].double().sort(descending=True).values[1:]
        critical = (torch.arange(2, len(own) + 1).log() / gap).max()
        assert float(found["critical"][i]) == pytest.approx(float(critical))
        assert found["within"][i].tolist() == [1 + int((gap <= t).sum()) for t in GAPS]


def test_windows_without_a_kept_query_leave_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    found = Tail().measure(view(ProbeSpec(), some_scores(2, 50, 1.0), kept=none))
    assert all(len(numbers) == 0 for numbers in found.values())

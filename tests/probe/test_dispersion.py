"""The statistic of dispersion: the scores that a model gives, read back from its tables; parts,
wide scores and refusals.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors.dispersion import factors, from_scores
from esscher.probe.curves import AllKeys
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.weights import Dispersion
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
TEMPERATURE = (0.3, 0.4)


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
    run = probe(
        "llama",
        tmp_path,
        pool="sequence",
        temperature=TEMPERATURE,
        planted=3,
        queries=6,
        kept_queries=6,
        heads=(2,),
    )
    found, table = source(run), run.table("dispersion")
    assert not table.isna().any().any()
    seen = captured_layers(found)[1]
    for head in (2,):
        rows = table[(table["layer"] == 1) & (table["head"] == head)]
        plain, warm = (
            rows[rows["origin"] == origin] for origin in ("random keys", "random keys, tempered")
        )
        n = plain["n"].to_numpy()
        curves = []
        for window, position in zip(
            found.queries.windows.tolist(), found.queries.positions.tolist(), strict=True
        ):
            captured = seen[window]
            key = captured.key[
                0, head * captured.kv_heads // captured.heads, : position + 1
            ].double()
            scores = captured.scale * captured.query[0, head, position].double() @ key.T
            if len(scores) >= 16:
                heats = (np.ones(n.size), factors(TEMPERATURE, n))
                curves.append(
                    [from_scores(scores[None], n, heat, torch.tensor([3])) for heat in heats]
                )
        for frame, k in ((plain, 0), (warm, 1)):
            all_p2 = np.mean([curve[k].sum_p2[0] for curve in curves], axis=0)
            np.testing.assert_allclose(frame["effective_tokens"], 1 / all_p2, rtol=1e-4)
            for name, part in (("entropy", "entropies"), ("planted_weight", "planted")):
                truth = np.mean([getattr(curve[k], part)[0] for curve in curves], axis=0)
                np.testing.assert_allclose(frame[name], truth, rtol=1e-4)
            largest = np.mean([curve[k].largest[0] for curve in curves], axis=0)
            np.testing.assert_allclose(frame["largest_weight"], largest, rtol=1.5e-2)
        np.testing.assert_allclose(warm["temperature"], factors(TEMPERATURE, n))
        row = head_row(run, 1, head)
        chosen = plain[plain["n"] >= 16]
        slope = np.polyfit(np.log(chosen["n"]), np.log(chosen["effective_tokens"]), 1)[0]
        assert row["tokens_exponent"] == pytest.approx(slope, rel=1e-6)
        assert row["tokens_exponent_low"] <= row["tokens_exponent"] <= row["tokens_exponent_high"]
        assert 2 <= row["half_weight_at"] <= 8
        assert np.interp(
            row["half_weight_at"], plain["n"], plain["largest_weight"]
        ) == pytest.approx(0.5, abs=0.03)


def test_a_corpus_in_parts_is_the_corpus(tmp_path: Path) -> None:
    """States of parts merge; no query stands in the pool, so that no key is planted."""
    whole = probe("bert", tmp_path / "whole", pool="corpus", temperature=TEMPERATURE)
    parts = probe("bert", tmp_path / "parts", pool="corpus", temperature=TEMPERATURE, part=130)
    one, other = (
        run.table("dispersion").sort_values(["head", "origin", "n"]) for run in (whole, parts)
    )
    assert set(one["origin"]) == {"random keys", "random keys, tempered"}
    assert one["planted_weight"].isna().all()
    for name in ("n", "effective_tokens", "entropy", "largest_weight"):
        np.testing.assert_allclose(
            one[name], other[name], rtol=2e-3 if name == "largest_weight" else 1e-5
        )


def test_high_temperatures_have_finer_grids() -> None:
    """Scores times up to 8, where cells of 1/8 would be one nat wide."""
    scores, warm = some_scores(3, 300, 1.0), (0.0, 8 / math.log(300))
    head = view(ProbeSpec(temperature=warm, planted=7), scores)
    statistic = Dispersion()
    assert statistic.init(head).masses.grid.spacing == 1 / 32
    found = statistic.measure(head)
    n = np.array([2, 4, 8, 16, 32, 64, 128, 256, 300])
    truth = from_scores(scores.double(), n, factors(warm, n), torch.full((3,), 7))
    np.testing.assert_allclose(found["sum_p2_tempered"], truth.sum_p2, rtol=1e-3)
    np.testing.assert_allclose(found["entropy_tempered"], truth.entropies, atol=1e-4)
    np.testing.assert_allclose(found["largest_tempered"], truth.largest, rtol=1e-2)
    np.testing.assert_allclose(found["planted_tempered"], truth.planted, rtol=1e-3)


def test_scores_wider_than_a_grid_are_summed_key_by_key() -> None:
    q, k = torch.tensor([[1.0], [2.0]]), some_scores(40, 1, 400.0)
    seen = torch.ones(2, 40, dtype=torch.bool)
    seen[0, 5:20] = False
    scores = (q @ k.T).masked_fill(~seen, -torch.inf)
    pool = AllKeys(q, k, torch.zeros(40, 1), 1.0, None, seen)
    found = Dispersion().measure(view(ProbeSpec(planted=30), scores, all_keys=pool))
    for i in range(2):
        own = seen[i].nonzero()[:, 0]
        place = torch.tensor([own.tolist().index(30)])
        truth = from_scores(
            scores[i, own].double()[None], np.array([2, 4, 8, 16, 32, 40]), np.ones(6), place
        )
        np.testing.assert_allclose(found["largest"][i], truth.largest[0], rtol=1e-9)
        np.testing.assert_allclose(found["planted"][i], truth.planted[0], rtol=1e-9)


def test_windows_without_a_kept_query_leave_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert Dispersion().measure(view(ProbeSpec(), some_scores(2, 50, 1.0), kept=none)) == {}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"pool": "corpus", "planted": 0}, "use --pool sequence"),
        (
            {"pool": "sequence", "planted": 40, "positions": (30, 63)},
            "position that every query sees, got 40; use 0 to 30",
        ),
        (
            {"pool": "sequence", "planted": 64},
            "planted: expected a position that every query sees, got 64",
        ),
        (
            {"pool": "sequence", "temperature": (1.0, -0.5)},
            "temperature: expected a [+] b log n above 0 for every n, got",
        ),
    ],
)
def test_refused_before_the_run_starts(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        probe("llama", tmp_path / "run", **fields)
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize("given", ["1", "1,x", "1,2,3", (1.0, math.inf), (1.0,)])
def test_a_temperature_is_two_numbers(given: Any) -> None:
    with pytest.raises(ValueError, match="temperature"):
        ProbeSpec(temperature=given)
    assert ProbeSpec(temperature="0.5, 1e-1").temperature == (0.5, 0.1)

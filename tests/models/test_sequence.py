"""A query's own context as its pool: exactly the keys that the mask allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.convergence import deposit
from esscher.models import sequence
from esscher.models.sequence import sequence_state
from tests.models.probe_runs import captured_layers, few_texts, rows_of, source, tiny_model

SMALL: dict[str, Any] = {
    "max_tokens": 400,
    "window": 64,
    "queries": 12,
    "kept_queries": 4,
    "pool": "sequence",
    "n": "16,32,48",
    "layers": (1,),
    "heads": (1, 2),
}
COUNTS = np.array([2, 9, 30])


def probe(name: str, out: Path, **more: Any) -> Any:
    options = more.pop("options", {})
    model, words = tiny_model(name, **options)
    return es.probe(model, few_texts(), tokenizer=words, out=out, **{**SMALL, **more})


def allowed_keys(name: str, text: np.ndarray[Any, Any], position: int, window: int) -> list[int]:
    """By hand: text tokens; of a causal model those up to the query; of a sliding layer the last so many of these."""
    keys = [key for key in range(len(text)) if text[key]]
    if name != "bert":
        keys = [key for key in keys if key <= position]
    if window:
        keys = [key for key in keys if key > position - window]
    return keys


@pytest.mark.parametrize(("name", "sliding"), [("llama", 0), ("bert", 0), ("mistral", 50)])
def test_the_pool_of_each_query_is_what_its_mask_allows(name: str, sliding: int, tmp_path: Path) -> None:
    run = probe(name, tmp_path, options={"sliding_window": sliding} if sliding else {})
    found = source(run)
    state = sequence_state(found, 1)
    seen = dict(zip(*(lambda w: (w.tolist(), captured_layers(found, w)[1]))(np.unique(found.places.windows)), strict=True))
    sizes = []
    for head in (1, 2):
        known = state.heads[head]
        assert not isinstance(known, str)
        errors = deposit.finish(known.drawn, COUNTS, "replacement").mse
        for i in range(len(found.places)):
            window, position = int(found.places.windows[i]), int(found.places.positions[i])
            captured = seen[window]
            own = head * captured.kv_heads // captured.heads
            keys = allowed_keys(name, found.windows.text[window], position, sliding)
            sizes.append(len(keys))
            q, k, v = captured.query[0, head, position], captured.key[0, own, keys], captured.value[0, own, keys]
            truth = es.exact_pool_curve(q[None].double(), k.double(), v.double(), COUNTS, scale=captured.scale)
            np.testing.assert_allclose(errors[i], truth.queries.mse[0], rtol=3e-4)
    assert state.keys == max(set(sizes), key=lambda size: (sizes.count(size), size))
    assert (run.table("heads")["n_keys"] == state.keys).all()
    assert (run.table("heads")["status"] == "ok").all()


def test_curves_of_the_run_are_the_mean_over_the_queries_contexts(tmp_path: Path) -> None:
    run = probe("llama", tmp_path)
    found = source(run)
    seen = dict(zip(*(lambda w: (w.tolist(), captured_layers(found, w)[1]))(np.unique(found.places.windows)), strict=True))
    rows = rows_of(run, 1, 2)
    squares = []
    for window, position in zip(found.places.windows.tolist(), found.places.positions.tolist(), strict=True):
        captured = seen[window]
        keys = allowed_keys("llama", found.windows.text[window], position, 0)
        q, k, v = captured.query[0, 2, position], captured.key[0, 1, keys], captured.value[0, 1, keys]
        squares.append(es.exact_pool_curve(q[None].double(), k.double(), v.double(), rows["n"].to_numpy()).rms ** 2)
    np.testing.assert_allclose(rows["rms"], np.sqrt(np.mean(squares, axis=0)), rtol=1e-4)


def test_kept_keys_are_those_of_queries_with_the_usual_number(tmp_path: Path) -> None:
    """A bidirectional model: all queries of a full window see all of its text."""
    run = probe("bert", tmp_path)
    rows = rows_of(run, 1, 2, "l2_kept")
    usual = int(run.table("heads")["n_keys"].iloc[0])
    assert usual == 63
    assert rows["n"].iloc[-1] == usual
    assert rows["rms"].iloc[-1] == 0
    found = source(run)
    known = sequence_state(found, 1).heads[2]
    assert not isinstance(known, str)
    assert known.kept is not None
    assert len(known.rows) == known.kept.cells.shape[1] > 0
    seen = dict(zip(*(lambda w: (w.tolist(), captured_layers(found, w)[1]))(np.unique(found.places.windows)), strict=True))
    squares = []
    for i in known.rows.tolist():
        captured = seen[int(found.places.windows[i])]
        q, k, v = captured.query[0, 2, int(found.places.positions[i])], captured.key[0, 2, 1:], captured.value[0, 2, 1:]
        curve = es.exact_pool_curve(q[None].double(), k.double(), v.double(), rows["n"].to_numpy(), "bernoulli")
        squares.append(curve.rms**2)
    np.testing.assert_allclose(rows["rms"], np.sqrt(np.mean(squares, axis=0)), rtol=1e-4, atol=1e-9)


def test_queries_of_a_causal_model_stand_at_the_end_of_their_windows(tmp_path: Path) -> None:
    found = source(probe("llama", tmp_path))
    for window in np.unique(found.places.windows).tolist():
        text = np.flatnonzero(found.windows.text[window])
        own = found.places.positions[found.places.inside(window)]
        assert own.tolist() == text[-len(own) :].tolist()


def test_special_tokens_are_in_the_pool_when_asked_for(tmp_path: Path) -> None:
    run = probe("bert", tmp_path, special=True)
    assert int(run.table("heads")["n_keys"].iloc[0]) == 64


def test_a_context_that_is_too_short_is_a_failed_head_that_says_so(tmp_path: Path) -> None:
    run = probe("mistral", tmp_path, n=None)  # a window of 5 keys
    heads = run.table("heads")
    assert set(heads["status"]) == {"failed"}
    assert heads["reason"].str.contains("a query sees 5 keys only, at least 16 are needed; use longer windows").all()
    assert set(heads["regime"]) == {"unknown"}
    assert list(heads["kv_head"]) == [0, 1]
    assert "budget" not in run.tables


def test_groups_are_queries_with_the_same_keys() -> None:
    allowed = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    context = sequence.Context(np.array([4, 5, 6]), torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), allowed)
    groups = {tuple(members.tolist()): keys.tolist() for members, keys in sequence._groups(context)}
    assert groups == {(0, 2): [0, 1], (1,): [0, 1, 2]}

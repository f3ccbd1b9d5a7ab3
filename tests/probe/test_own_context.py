"""A query's own context as its pool: exactly the keys that the mask allows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es
from esscher.probe import session as context
from esscher.probe.spec import drawn_ladder
from tests.models.probe_runs import (
    captured_layers,
    few_texts,
    own_state,
    rows_of,
    source,
    tiny_model,
)

SMALL: dict[str, Any] = {
    "max_tokens": 400,
    "window": 64,
    "queries": 12,
    "kept_queries": 4,
    "pool": "sequence",
    "n": "16,32,48",
    "layers": (1,),
    "heads": (1, 2),
    "rules": "none",
}


def probe(name: str, out: Path, **more: Any) -> Any:
    options = more.pop("options", {})
    model, words = tiny_model(name, **options)
    return es.probe(model, few_texts(), tokenizer=words, out=out, **{**SMALL, **more})


def allowed_keys(name: str, padding: np.ndarray[Any, Any], position: int, window: int) -> list[int]:
    """By hand: all tokens; of a causal model those up to the query; of a sliding layer the last so
    many of these.
    """
    keys = [key for key in range(len(padding)) if not padding[key]]
    if name != "bert":
        keys = [key for key in keys if key <= position]
    if window:
        keys = [key for key in keys if key > position - window]
    return keys


@pytest.mark.parametrize(("name", "sliding"), [("llama", 0), ("bert", 0), ("mistral", 50)])
def test_the_pool_of_each_query_is_what_its_mask_allows(
    name: str, sliding: int, tmp_path: Path
) -> None:
    run = probe(name, tmp_path, options={"sliding_window": sliding} if sliding else {}, queries=24)
    found = source(run)
    state = own_state(found, 1)
    seen = dict(
        zip(
            *(lambda w: (w.tolist(), captured_layers(found, w)[1]))(
                np.unique(found.queries.windows)
            ),
            strict=True,
        )
    )
    keys_seen = found.mean_keys(1)
    ladder = drawn_ladder(found.spec, keys_seen)
    sizes = []
    for head in (1, 2):
        known = state.heads[head]
        assert not isinstance(known, str)
        for i, number in enumerate(known.queries.tolist()):
            window, position = (
                int(found.queries.windows[number]),
                int(found.queries.positions[number]),
            )
            captured = seen[window]
            own = head * captured.kv_heads // captured.heads
            keys = allowed_keys(name, found.windows.padding[window], position, sliding)
            sizes.append(len(keys))
            q, k, v = (
                captured.query[0, head, position],
                captured.key[0, own, keys],
                captured.value[0, own, keys],
            )
            truth = es.exact_pool_curve(
                q[None].double(), k.double(), v.double(), ladder, scale=captured.scale
            )
            np.testing.assert_allclose(
                known.found["draws"]["mse"][i], truth.queries.mse[0], rtol=3e-4
            )
            assert known.found["draws"]["keys"][i] == known.keys[i] == len(keys)
    heads = run.table("heads")
    assert keys_seen == round(np.mean(sizes))
    assert (heads["n_keys"] == keys_seen).all()
    assert (heads["n_keys_least"] == min(sizes)).all()
    assert (heads["n_keys_most"] == max(sizes)).all()
    assert (heads["n_queries"] == len(sizes) // 2).all()
    assert (heads["status"] == "ok").all()
    assert (heads["output_difference"] < 1e-5).all()
    assert run.table("about")["output_difference"][0] == heads["output_difference"].max() > 0


def test_a_call_without_a_mask_sees_every_key_that_came(tmp_path: Path) -> None:
    """The mask alone says what a query sees: padding is in it, and where there is none the model
    attends to all.
    """
    found = source(probe("bert", tmp_path, queries=24))
    window = int(np.flatnonzero(found.windows.padding.any(1))[-1])
    (captured,) = captured_layers(found, np.array([window]))[1]
    padded = torch.from_numpy(found.windows.padding[window])
    at = torch.arange(3)
    masked, bare = (one.take(at, 0) for one in (captured, replace(captured, mask=None)))
    assert torch.equal(masked.visible(at)[0, 0].any(0), ~padded)
    assert bool(bare.visible(at).all())
    assert bool(torch.isfinite(bare.scores()).all())


def test_a_window_goes_through_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    plain = context.forward

    def count(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        passes.append(tuple(inputs["input_ids"].shape))
        return plain(model, inputs, *args, **options)

    monkeypatch.setattr(context, "forward", count)
    run = probe("llama", tmp_path, layers=None)
    windows = len(np.unique(source(run).queries.windows))
    assert windows > 1
    assert passes == [(1, 64)] * windows


def test_curves_of_the_run_are_the_mean_over_the_queries_contexts(tmp_path: Path) -> None:
    run = probe("llama", tmp_path)
    found = source(run)
    seen = dict(
        zip(
            *(lambda w: (w.tolist(), captured_layers(found, w)[1]))(
                np.unique(found.queries.windows)
            ),
            strict=True,
        )
    )
    rows = rows_of(run, 1, 2)
    squares = []
    for window, position in zip(
        found.queries.windows.tolist(), found.queries.positions.tolist(), strict=True
    ):
        captured = seen[window]
        keys = allowed_keys("llama", found.windows.padding[window], position, 0)
        q, k, v = (
            captured.query[0, 2, position],
            captured.key[0, 1, keys],
            captured.value[0, 1, keys],
        )
        squares.append(
            es.exact_pool_curve(q[None].double(), k.double(), v.double(), rows["n"].to_numpy()).rms
            ** 2
        )
    np.testing.assert_allclose(rows["rms"], np.sqrt(np.mean(squares, axis=0)), rtol=1e-4)


def test_queries_of_a_causal_model_stand_at_every_quarter_of_their_windows(tmp_path: Path) -> None:
    found = source(probe("llama", tmp_path, max_tokens=126, queries=16, kept_queries=2))
    assert np.unique(found.queries.windows).tolist() == [0, 1]
    for window in (0, 1):
        rows = found.queries.inside(window)
        assert found.queries.positions[rows].tolist() == [14, 15, 30, 31, 46, 47, 62, 63]
        assert found.queries.depths[rows].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_positions_are_where_queries_stand(tmp_path: Path) -> None:
    found = source(probe("llama", tmp_path, max_tokens=126, queries=8, positions=(20, 50)))
    assert found.queries.positions.tolist() == [19, 20, 49, 50] * 2
    assert found.seen_keys(1).tolist() == [20, 21, 50, 51] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"positions": (5, 64)},
            "positions: a window has 64 tokens, expected places from 0 to 63, got 64",
        ),
        (
            {"positions": (63,), "max_tokens": 40},
            "positions: the text fills 41 tokens, expected places from 0 to 40, got 63",
        ),
        (
            {"positions": (3,), "pool": "corpus"},
            "positions: they are of queries in their own context; use --pool sequence",
        ),
    ],
)
def test_positions_that_are_not_there(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        probe("llama", tmp_path / "run", **{"n": None, **more})
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "pool"), [("llama", "sequence"), ("bert", "corpus"), ("t5", "corpus")]
)
def test_the_model_says_whose_keys(name: str, pool: str, tmp_path: Path) -> None:
    model, words = (
        tiny_model(name, "t5" if name == "t5" else "llama") if name != "bert" else tiny_model(name)
    )
    settings = {**SMALL, "pool": "auto", "n": None, "heads": (1,)}
    run = es.probe(model, few_texts(), tokenizer=words, out=tmp_path / "run", **settings)
    assert run.manifest.spec["pool"] == run.table("about")["pool"][0] == pool
    again = es.probe(model, few_texts(), tokenizer=words, out=tmp_path / "run", **settings)
    assert len(again.manifest.starts) == 1


def test_contexts_that_are_too_short_are_left_out_and_counted(tmp_path: Path) -> None:
    """Causal queries all along their windows: those at the start see few keys."""
    run = probe("llama", tmp_path, max_tokens=138, window=24, queries=132, kept_queries=9, n="4,8")
    found = source(run)
    sizes = found.queries.positions + 1
    short = int((sizes < 16).sum())
    assert 0 < short < len(sizes)
    used = np.flatnonzero(sizes >= 16)
    state = own_state(found, 1)
    heads = run.table("heads")
    assert set(heads["status"]) == {"ok"}
    assert (heads["n_queries"] == len(sizes) - short).all()
    assert (heads["n_keys_least"] == 16).all()
    assert (
        heads["reason"]
        == f"{short} of {len(sizes)} queries see fewer than 16 keys and are left out"
    ).all()
    known = state.heads[1]
    assert not isinstance(known, str)
    assert known.queries.tolist() == used.tolist()
    draws, tail = (known.found[name] for name in ("draws", "tail"))
    assert draws["keys"].tolist() == known.keys.tolist() == sizes[used].tolist()
    assert len(known.kept) == 9
    assert tail["count"].tolist() == sizes[known.kept].tolist()
    sinks = known.found["sinks"]
    assert len(sinks["mass"]) == len(sizes)
    mean = float(sinks["mass"][sizes >= 16].double().mean())
    assert heads["sink_mass"][0] == pytest.approx(mean, rel=1e-6)


def test_contexts_that_are_all_too_short_are_refused(tmp_path: Path) -> None:
    """A window of 5 keys."""
    with pytest.raises(ValueError, match="no query sees 16 keys, 5 at most, so nothing can be"):
        probe("mistral", tmp_path, n=None)

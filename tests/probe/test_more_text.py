"""Numbers on parts of a pool and their intervals: against curves of these parts, merged, stored,
told.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import esscher as es
from esscher.errors.more_text import BEYOND, PIECES
from esscher.probe.curves import headline, headline_numbers
from esscher.probe.session import Queries, Session, spread
from esscher.probe.spec import ProbeSpec, drawn_ladder
from esscher.probe.statistic import HeadEnd, HeadView, LayerMoments, Result
from esscher.probe.statistics import more_text
from esscher.probe.statistics.errors import Draws
from esscher.probe.statistics.more_text import MoreText, Pieces
from tests.models.probe_runs import few_texts, save_tiny
from tests.probe.views import INFO, view

SPEC = ProbeSpec(pool="corpus", kept_queries=7, epsilons=(0.2,))
KEYS, QUERIES, WIDTH = 320, 13, 3
KEPT = spread(QUERIES, 7)


def tokens(width: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
        for n in (QUERIES, KEYS, KEYS)
    )
    return width * q, k, v


def head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, some: slice = slice(None)) -> HeadView:
    pieces, at = torch.arange(KEYS) * PIECES // KEYS, torch.arange(KEYS)
    more = {"pieces": pieces[some], "positions": at[some], "center": v.mean(0)}
    whole = view(SPEC, q @ k.T, v, keys=KEYS)
    return view(SPEC, q @ k[some].T, v[some], keys=KEYS, whole=whole, **more)


def found_of(whole: HeadView, state: Pieces | None = None) -> Result:
    """``state``: of the statistic, where it is not that of the head."""
    statistic, rows = MoreText(), np.arange(QUERIES)
    draws = Draws().measure(whole)
    found = statistic.measure(whole) if state is None else statistic.reduce(state, whole)
    queries = Queries(rows, 0 * rows, 0 * rows, rows * PIECES // QUERIES)
    few = torch.zeros(1, 2, WIDTH)
    moments = LayerMoments.of(few, few, None)
    row = {"n_keys": KEYS, "effective_tokens": float(1 / (1 / draws["effective"]).mean())}
    end = HeadEnd(
        *(SPEC, INFO, 0, KEYS, KEYS, {}),
        session=object.__new__(Session),
        moments=moments,
        tails=None,
        gram=None,
        queries=queries,
        kept=KEPT,
        found={"draws": draws},
        row=row,
    )
    return statistic.finish(found, end)


@pytest.mark.parametrize("room", [more_text.ROOM, 1], ids=["at once", "one by one"])
def test_numbers_on_parts_are_those_of_curves_on_these_parts(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(more_text, "ROOM", room)
    q, k, v = tokens()
    table = found_of(head(q, k, v)).tables["endless"].set_index("number")
    n, kept = drawn_ladder(SPEC, KEYS), KEPT
    numbers = {number.key: number for number in headline_numbers(SPEC)}

    def on(rows: Any, some: slice) -> dict[str, float]:
        return headline(es.exact_pool_curve(q[rows], k[some], v[some], n, scale=1.0), SPEC, KEYS)

    whole, few = on(slice(None), slice(None)), on(kept, slice(None))
    for parts, name in ((2, "half"), (4, "quarter"), (8, "eighth")):
        size = KEYS // parts
        read = [on(kept, slice(i * size, (i + 1) * size)) for i in range(parts)]
        for key, number in numbers.items():
            f = math.log if number.log else float
            expected = np.mean([f(one[key]) for one in read]) + f(whole[key]) - f(few[key])
            assert table.loc[key, name] == pytest.approx(
                number.plain(expected), rel=2e-3 if number.n is None else 1e-7
            ), key
    for key in numbers:
        assert table.loc[key, "value"] == pytest.approx(whole[key], rel=2e-3)
        assert not table.loc[key, "low"] > table.loc[key, "estimate"]


def test_parts_of_the_keys_merge() -> None:
    """A part ends within a piece."""
    q, k, v = tokens()
    statistic, cut = MoreText(), 150
    states = [
        statistic.update(statistic.init(part), part)
        for part in (head(q, k, v, slice(cut)), head(q, k, v, slice(cut, None)))
    ]
    merged, whole = statistic.merge(*states), found_of(head(q, k, v)).tables["endless"]
    found = found_of(head(q, k, v), merged).tables["endless"]
    pd.testing.assert_frame_equal(found, whole, rtol=1e-9)


def test_scores_too_wide_for_a_grid_and_few_effective_tokens_leave_no_interval() -> None:
    wide = found_of(head(*tokens(400.0)))
    assert wide.columns["converged"] == BEYOND
    assert math.isnan(wide.columns["relative_1024_low"])
    assert math.isnan(wide.columns["relative_1024_high"])
    frozen = found_of(head(*tokens(4.0)))
    assert set(frozen.tables["endless"]["status"]) == {BEYOND}
    assert not math.isnan(frozen.columns["tokens_needed_20pct_low"])  # it grows with the pool
    assert frozen.columns["converged"] == BEYOND


def test_own_contexts_have_intervals_over_windows(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "pool": "sequence",
        "window": 64,
        "max_tokens": 400,
        "queries": 12,
        "kept_queries": 4,
    }
    run = es.probe(
        save_tiny(tmp_path / "model", "llama"),
        few_texts(),
        layers=(0,),
        rules="none",
        out=tmp_path / "run",
        **settings,
    )
    heads, table = run.table("heads"), run.table("endless")
    assert set(table["number"]) == {number.key for number in headline_numbers(ProbeSpec())}
    assert (heads["beta_low"] <= heads["beta_fit"]).all()
    assert (heads["beta_fit"] <= heads["beta_high"]).all()
    assert table["half"].isna().all()  # no pool grows

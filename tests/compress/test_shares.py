"""Shares of a cache whose layers hold different numbers of keys, counted by hand: a tiny model with
two sliding-window layers, one full layer, and one key-value head for four query heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from esscher.compress.choose import Cell, budgets_of
from esscher.compress.job import compute
from esscher.compress.session import context_of
from esscher.compress.text import EveryText, Text
from esscher.probe.budget import rule_budget
from tests.compress.runs import WINDOW, spec
from tests.models.frontiers import one_head_a_layer, probe_like

PREFILL = 60
HELD = (WINDOW, WINDOW, PREFILL)  # keys that the caches of the three layers hold: 20, 20 and 60
RULES = ["recent", "keynorm", "sinks:2+random"]


def text(**more: object) -> Text:
    found = context_of(spec("gemma", rules=RULES, **more))
    return Text(found, found.ids(int(found.texts[0])), found.prefill, budgets_of(found))


def counts(asked: Text, cell: Cell) -> list[int]:
    kept = asked.plan.choose(cell).kept
    return [int(kept[layer].sum()) for layer in range(3)]


@pytest.mark.parametrize(("size", "wanted"), [(0.2, [4, 4, 12]), (0.4, [8, 8, 24])])
def test_uniform_is_the_same_share_of_every_cache(size: float, wanted: list[int]) -> None:
    """20 % are 4, 4 and 12 keys: 20 of 100. The same 12 keys of each would be 36 %."""
    asked = text()
    assert [asked.plan.held(place) for place in asked.plan.contexts] == list(HELD)
    for rule in ("recent", "keynorm"):
        assert counts(asked, Cell(rule, "uniform", size, 0)) == wanted


def test_a_number_of_keys_is_the_mean_of_a_head() -> None:
    """10 keys a head are 30 of 100 in all: 6, 6 and 18."""
    assert counts(text(sizes=[10]), Cell("recent", "uniform", 10.0, 0)) == [6, 6, 18]


def test_one_cut_keeps_as_many_and_only_what_is_held() -> None:
    asked = text(splits=["cut"])
    kept = asked.plan.choose(Cell("keynorm", "cut", 0.4, 0)).kept
    assert sum(int(layer.sum()) for layer in kept.values()) == 40
    for layer in (0, 1):  # what lies before the window is not in the cache
        assert not bool(kept[layer][:, : PREFILL - WINDOW].any())


def test_stored_shares_are_of_what_the_cache_holds() -> None:
    asked = spec("gemma", rules=RULES)
    draws = compute(asked, {"text": 0})["draws"]
    own = [row for row in draws if row["rule"] == "recent" and row["reading"] == "kl"]
    assert [(row["size"], row["kept"], row["keys"]) for row in own] == [
        (0.2, pytest.approx(20 / 3), pytest.approx(100 / 3)),
        (0.4, pytest.approx(40 / 3), pytest.approx(100 / 3)),
        (0.7, pytest.approx(70 / 3), pytest.approx(100 / 3)),
    ]


@pytest.mark.parametrize(
    ("some", "kept"),
    [({"layers": [0]}, 4 + 20 + 60), ({"heads": [0, 1, 2]}, 100)],
    ids=["one layer drops", "a head of the cache drops nothing"],
)
def test_what_is_not_dropped_is_held(some: dict[str, list[int]], kept: int) -> None:
    """A layer that drops nothing keeps its whole cache, and so does a cache that one of its query
    heads reads whole.
    """
    draws = compute(spec("gemma", rules=["recent"], sizes=[0.2], **some), {"text": 0})["draws"]
    (row,) = [row for row in draws if row["rule"] == "recent" and row["reading"] == "kl"]
    assert row["kept"] / row["keys"] == pytest.approx(kept / 100)


def test_a_budget_says_shares_of_each_cache(tmp_path: Path) -> None:
    """Errors of windows of 200 and 600 keys, applied to caches of 20 and 60: the same shares."""
    table = one_head_a_layer({0: 200.0, 1: 200.0, 2: 600.0}, heads=4)
    probe = probe_like(tmp_path / "probe", table).path
    asked = text(splits=["budget"], budget=str(probe), weights="none", sizes=[0.4])
    best = rule_budget(table, "keynorm", total=400).caches
    assert counts(asked, Cell("keynorm", "budget", 0.4, 0)) == [
        round(ratio * held) for ratio, held in zip(best["ratio"], HELD, strict=True)
    ]
    assert best["keys"].sum() == pytest.approx(400)


def test_queries_that_each_keep_a_few() -> None:
    """Every query keeps 20 % of what a whole window of its layer has: pairs of queries and keys
    counted one by one.
    """
    found = context_of(spec("gemma", rules=["recent"], sizes=[0.2], when="every"))
    every = EveryText(found, int(found.texts[0]))
    tokens = every.ids.shape[1]  # 72
    kept, _ = every.run(Cell("recent", "uniform", 0.2, 0))
    seen = [[min(i + 1, most) for i in range(tokens)] for most in (WINDOW, WINDOW, tokens)]
    own = [[min(n, keys) for keys in layer] for n, layer in zip((4, 4, 14), seen, strict=True)]
    assert kept == pytest.approx(sum(map(sum, own)) / (3 * tokens))
    assert every.keys == pytest.approx(sum(map(sum, seen)) / (3 * tokens))

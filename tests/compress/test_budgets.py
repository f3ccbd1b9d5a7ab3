"""A probe's budget applied for real: every head keeps its share, the total is that of the uniform
split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esscher.compress.choose import Cell, budget_hashes, budgets_of
from esscher.compress.session import context_of
from esscher.compress.spec import DownstreamSpec
from esscher.compress.text import Text
from esscher.probe.budget import rule_budget
from tests.compress.runs import spec
from tests.models.frontiers import CONSTANTS, frontier, frontier_run
from tests.report.atlas import store_run


def weights_run(path: Path) -> Path:
    rows = [
        {"layer": layer, "head": head, "plain": 1.0, "sensitive": 9.0 if layer else 1.0}
        for layer, head in CONSTANTS
    ]
    return Path(store_run(path, DownstreamSpec(), {"sensitivity": rows}).path)


def asked(
    tmp_path: Path, gradients: dict[tuple[int, int], float] | None = None, **more: Any
) -> Any:
    """The tiny llama has the heads of the frontier: two layers of two key-value heads, each read by
    two heads.
    """
    probe = frontier_run(tmp_path / "probe", gradients=gradients).path
    return spec("llama", rules=["heavy"], splits=["uniform", "budget"], budget=str(probe), **more)


@pytest.mark.parametrize("weights", ["none", "of the probe", "of a run"])
def test_a_choice_keeps_what_the_budget_says(weights: str, tmp_path: Path) -> None:
    weighted = weights != "none"
    more = (
        {"weights": "none"} if not weighted else {"weights": str(weights_run(tmp_path / "weights"))}
    )
    felt = {place: 9.0 if place[0] else 1.0 for place in CONSTANTS}
    source = context_of(
        asked(tmp_path, felt) if weights == "of the probe" else asked(tmp_path, **more)
    )
    budgets = budgets_of(source)
    text = Text(source, source.ids(int(source.texts[0])), source.prefill, budgets)
    wanted = rule_budget(frontier(), "heavy", total=640, weights=felt if weighted else None).caches
    kept = text.plan.choose(Cell("heavy", "budget", 0.4, 0)).kept
    counts = [int(kept[row.layer][row.kv_head].sum()) for row in wanted.itertuples()]
    assert counts == [round(ratio * 60) for ratio in wanted["ratio"]]
    assert sum(counts) == pytest.approx(4 * 24, abs=2)  # the total of 40 % for each
    assert len(set(counts)) > 1
    assert {cell.split for cell in text.plan.cells()} == {"uniform", "budget"}
    assert set(budget_hashes(source)) == ({"budget", "weights"} if weighted else {"budget"})


def test_a_rule_that_was_not_probed_is_refused(tmp_path: Path) -> None:
    wanted = asked(tmp_path).model_copy(update={"rules": ("sinks:2+recent",)})
    with pytest.raises(
        ValueError, match=r"budget: .* measured random, .*; expected one of sinks:2\+recent"
    ):
        context_of(wanted)

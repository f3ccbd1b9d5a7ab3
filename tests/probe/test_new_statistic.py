"""A statistic from outside the package, in this one file: through parts, resuming, workers and own
contexts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import esscher as es
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.base import HEAD, LAYER, Block, Findings, Found, Start, Statistic
from esscher.probe.statistics.registry import STATISTICS, Column, checked, register
from esscher.report.page import write_report
from esscher.runs import RunError
from tests.models.probe_runs import SMALL, few_texts, pooled_tensors, save_tiny, source

LARGEST = Column(
    "largest_score",
    "float",
    "largest score of all",
    "Largest score of any query for any key.",
    scale="linear",
)
OF_QUERY = Column("score", "float", "score at its best", "Largest score of the query.")


@dataclass(frozen=True)
class Highest:
    """The largest score of each query so far, (m,)."""

    scores: torch.Tensor


@register
class LargestScore(Statistic):
    name = "largest_score"
    reads = ("identity",)
    state = Highest

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (LARGEST,)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        return {
            "best": (
                LAYER,
                HEAD,
                Column("query", "int", "number of the query", "Its place among the queries."),
                OF_QUERY,
            )
        }

    def init(self, start: Start) -> Highest:
        return Highest(torch.full((start.queries,), -torch.inf))

    def update(self, state: Highest, block: Block) -> Highest:
        assert len(block.positions) == len(block.keys) == block.scores.shape[1]
        assert len(block.queries) == len(block.scores)
        assert block.hidden is None or len(block.hidden) == len(block.keys)
        return Highest(torch.maximum(state.scores, block.scores.amax(1)))

    def merge(self, a: Highest, b: Highest) -> Highest:
        return Highest(torch.maximum(a.scores, b.scores))

    def finish(self, state: Highest, found: Found) -> Findings:
        assert found.row["n_queries"] == len(state.scores)
        rows = pd.DataFrame(
            {"query": np.arange(len(state.scores)), "score": state.scores.double().numpy()}
        )
        return Findings({"largest_score": float(state.scores.max())}, {"best": rows})


ENTRY = f"{LargestScore.__module__}:LargestScore"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> es.Run:
    return probe(folder, tmp_path_factory.mktemp("run") / "whole")


def probe(folder: Path, out: Path, **more: Any) -> es.Run:
    return es.probe(folder, few_texts(), out=out, **{**SMALL, "statistics": [ENTRY], **more})


def test_a_new_column_and_a_new_table(whole: es.Run) -> None:
    """Against the scores of all pooled keys at once."""
    q, k, _ = pooled_tensors(source(whole), 1)
    heads, best = whole.table("heads"), whole.table("best")
    assert list(best.columns) == ["layer", "head", "query", "score"]
    for head in (1, 2):
        truth = (q[head] @ k[head].T / q.shape[-1] ** 0.5).amax(1).detach()
        rows = best[best["head"] == head]
        assert rows["query"].tolist() == list(range(6))
        np.testing.assert_allclose(rows["score"], truth, rtol=1e-5)
        np.testing.assert_allclose(
            heads.set_index("head")["largest_score"][head], truth.max(), rtol=1e-5
        )
    assert heads.columns[-1] == "largest_score"


def test_its_words_are_stored_with_the_run_and_shown_by_the_report(
    whole: es.Run, tmp_path: Path
) -> None:
    assert whole.columns("heads")["largest_score"] == LARGEST
    assert whole.columns("best")["score"] == OF_QUERY
    page = write_report([whole], tmp_path / "page.html").read_text("utf-8")
    assert LARGEST.label in page
    assert LARGEST.help in page


def test_parts_stopped_and_resumed_by_two_workers_give_the_same(
    whole: es.Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        calls = iter(range(100))
        plain = LargestScore.update

        def stop(self: LargestScore, state: Highest, block: Block) -> Highest:
            if next(calls) == 3:  # two heads a part: in the second of three
                raise KeyboardInterrupt
            return plain(self, state, block)

        patch.setattr(LargestScore, "update", stop)
        with pytest.raises(KeyboardInterrupt):
            probe(folder, tmp_path / "parts", part=120)
    resumed = probe(folder, tmp_path / "parts", part=120, workers=2)
    assert resumed.status == "complete"
    assert len(resumed.manifest.starts) == 2
    for table, columns in (
        ("heads", ["largest_score"]),
        ("best", ["layer", "head", "query", "score"]),
    ):
        np.testing.assert_allclose(
            resumed.table(table)[columns], whole.table(table)[columns], rtol=1e-6
        )


def test_queries_with_contexts_of_their_own(folder: Path, whole: es.Run, tmp_path: Path) -> None:
    """No query sees more than in the whole corpus; tensors with a row for each query stack by
    themselves.
    """
    run = probe(folder, tmp_path / "own", pool="sequence", n="8,16,32", rules="none")
    assert (run.table("heads")["status"] == "ok").all()
    assert len(run.table("best")) == 12
    largest = [frame.table("heads")["largest_score"].to_numpy() for frame in (run, whole)]
    assert np.isfinite(largest[0]).all()


# ---- what is refused
# -------------------------------------------------------------------------------------------------


def test_a_module_that_nobody_registered_is_not_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from_a_file_of_a_run.py").write_text("raise SystemExit\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"from_a_file_of_a_run:Any is not registered.*entry points esscher\.statistics",
    ):
        probe(folder, tmp_path / "run", statistics=["from_a_file_of_a_run:Any"])
    assert "from_a_file_of_a_run" not in sys.modules
    with pytest.raises(ValueError, match=r"statistics: .*expected 'module:Class'"):
        probe(folder, tmp_path / "run", statistics=["os"])


def test_an_undeclared_column_and_a_missing_one_fail_the_unit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ({"largest_score": 1.0, "other": 2.0}, {}):
        monkeypatch.setattr(
            LargestScore, "finish", lambda self, state, found, given=given: Findings(given)
        )
        with pytest.raises(
            RunError, match=r"TypeError: .*declares the columns \['largest_score'\], gave \["
        ):
            probe(folder, tmp_path / str(len(given)))


def stat(name_: str, reads_: Sequence[str] = (), *keys: str) -> Statistic:
    class Made(Statistic):
        name = name_
        reads = tuple(reads_)

        def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
            return tuple(Column(key, "float", key, key) for key in keys)

        def finish(self, state: None, found: Found) -> Findings:
            return Findings()

    return Made()


@pytest.mark.parametrize(
    ("list_", "reason"),
    [
        ([stat("a", ["b"]), stat("b")], r"statistic a: it reads \['b'\]"),
        ([stat("a"), stat("a")], "two of this name"),
        ([stat("a", (), "x"), stat("b", (), "x")], "column x is a's already"),
        ([stat("a", ["a"])], "it reads"),
    ],
)
def test_the_order_and_the_names_are_checked(list_: list[Statistic], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        checked(list_, ProbeSpec())
    assert checked(STATISTICS, ProbeSpec()) == STATISTICS

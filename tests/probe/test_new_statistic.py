"""A statistic from outside the package, in this one file: through parts, resuming, workers and own
contexts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import esscher as es
from esscher.probe import measure
from esscher.probe.spec import ProbeSpec
from esscher.probe.statistic import (
    HEAD,
    LAYER,
    Head,
    HeadEnd,
    HeadView,
    Numbers,
    Result,
    Statistic,
)
from esscher.probe.statistics import register
from esscher.report.page import write_report
from esscher.runs import RunError
from esscher.runs.columns import Column
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
    """It streams, so that it also measures a corpus in parts."""

    name = "largest_score"
    state = (Highest,)

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (LARGEST,)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        query = Column("query", "int", "number of the query", "Its place among the queries.")
        return {"best": (LAYER, HEAD, query, OF_QUERY)}

    def init(self, head: HeadView) -> Highest:
        return Highest(torch.full((len(head.queries),), -torch.inf))

    def update(self, state: Highest, head: HeadView) -> Highest:
        assert len(head.positions) == len(head.keys) == head.scores.shape[1]
        assert len(head.queries) == len(head.scores)
        return Highest(torch.maximum(state.scores, head.scores.amax(1)))

    def merge(self, a: Highest, b: Highest) -> Highest:
        return Highest(torch.maximum(a.scores, b.scores))

    def reduce(self, state: Highest, head: Head) -> Numbers:
        return {"score": state.scores}

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        scores = found["score"].double()
        assert end.row["n_queries"] == len(scores)
        rows = pd.DataFrame({"query": np.arange(len(scores)), "score": scores.numpy()})
        return Result({"largest_score": float(scores.max())}, {"best": rows})


@register
class MeanWeight(Statistic):
    """One method: the mean over queries of a number of each query."""

    name = "mean_weight"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (Column("top_weight", "float", "top weight", "Mean of the largest weight."),)

    def measure(self, head: HeadView) -> Numbers:
        return {"top_weight": head.weights.amax(1)}


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

        def stop(self: LargestScore, state: Highest, block: HeadView) -> Highest:
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


def test_one_method_is_enough(folder: Path, tmp_path: Path) -> None:
    """On a corpus, against the softmax of all pooled keys, and in own contexts; not in parts."""
    entry = f"{MeanWeight.__module__}:MeanWeight"
    run = probe(folder, tmp_path / "corpus", statistics=[entry])
    q, k, _ = pooled_tensors(source(run), 1)
    for head in (1, 2):
        weights = (q[head] @ k[head].T / q.shape[-1] ** 0.5).double().softmax(1)
        found = run.table("heads").set_index("head")["top_weight"][head]
        assert found == pytest.approx(float(weights.amax(1).mean().detach()), rel=1e-5)
    settings = {"pool": "sequence", "n": "8,16,32", "rules": "none"}
    own = probe(folder, tmp_path / "own", statistics=[entry], **settings)
    assert (own.table("heads")["top_weight"] > 0).all()
    with pytest.raises(ValueError, match="mean_weight reads all keys at once, and the corpus"):
        probe(folder, tmp_path / "parts", statistics=[entry], part=120)


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
    with pytest.raises(ValueError, match="statistics: os is not registered"):
        probe(folder, tmp_path / "run", statistics=["os"])


def test_an_undeclared_column_and_a_missing_one_fail_the_unit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ({"largest_score": 1.0, "other": 2.0}, {}):
        monkeypatch.setattr(
            LargestScore, "finish", lambda self, found, end, given=given: Result(given, {})
        )
        with pytest.raises(
            RunError, match=r"TypeError: .*declares the columns \['largest_score'\], gave \["
        ):
            probe(folder, tmp_path / str(len(given)))


def test_a_column_that_is_there_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Column("khat", "float", "mine", "Mine.")
    monkeypatch.setattr(LargestScore, "columns", lambda self, spec: (taken,))
    with pytest.raises(ValueError, match="khat: declared twice in table heads"):
        measure.columns(ProbeSpec(statistics=(ENTRY,)))

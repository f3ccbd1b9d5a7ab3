"""A keep rule and an output metric from outside the package, each one class in one file: the rule
works on a pool, on a law, in a probe and in a cache; the metric is a column of every run.

A law: tests/measures/test_outside.py. A statistic: tests/probe/test_new_statistic.py. A claim:
tests/papers/outside_claim.py. A command: tests/cli/test_help.py. A model quirk:
tests/hf/test_quirk.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import esscher as es
from esscher.compress.metrics import Metric, Outcome
from esscher.keep import rule as rules
from esscher.keep.ranked import Observed
from esscher.runs import execute
from tests.compress.runs import source, spec
from tests.models.probe_runs import few_texts
from tests.models.tokenizers_for_tests import tokenizer


@dataclass(frozen=True)
class Largest(Observed):
    """Keys of largest weight times length of the value."""

    name: ClassVar[str] = "largest"
    size: int | None = None

    def score(self, rows: es.keep.Context) -> torch.Tensor:
        return rows.attention.sum(0) * rows.v.double().norm(dim=1)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    es.keep.register("largest", Largest)
    yield
    del rules._RULES["largest"]


def test_a_rule_on_a_pool_and_on_a_law() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (5, 40, 40))
    curve = es.exact_pool_curve(q, k, v, [5, 20, 40], keep="largest")
    assert curve.rms[0] > curve.rms[1] > curve.rms[2]
    chosen = Largest().order(es.keep.Context.of(q, k, v)).topk(20).indices
    kept = torch.softmax(q @ k[chosen].T / 3**0.5, 1) @ v[chosen]
    error = (kept - es.attend(q, k, v)).square().sum(1).mean().sqrt()
    assert curve.rms[1] == pytest.approx(float(error), rel=1e-6)
    eye = torch.eye(2, dtype=torch.float64)
    law = es.exact_curve(
        es.Head(eye, eye), es.Gaussian(eye), q[:, :2], [10, 40], keep=Largest(), context=80
    )
    assert law.rms[0] > law.rms[1] > 0


def test_a_rule_in_a_probe(tmp_path: Path) -> None:
    model = source("llama", rules=["recent"]).loaded.model
    settings = {"max_tokens": 120, "window": 40, "queries": 6, "kept_queries": 4, "heads": (0,)}
    run = es.probe(
        model,
        few_texts(),
        tokenizer=tokenizer("llama"),
        out=tmp_path,
        pool="sequence",
        rules=("largest", "sinks:2+recent"),
        **settings,
    )
    assert set(run.table("frontier")["rule"]) >= {"largest", "sinks:2+recent"}


def test_a_rule_in_a_cache() -> None:
    found = source("llama", rules=["recent"])
    model, ids = found.loaded.model, found.ids(int(found.texts[0]))[:, : found.prefill]
    before = model.config._attn_implementation
    try:
        cache = es.compress(model, ids, keep=0.5, rule="largest")
    finally:
        model.set_attn_implementation(before)
    assert cache.compression.keep == pytest.approx(0.5, abs=0.01)
    assert cache.compression.split == "exact"


def test_an_output_metric(tmp_path: Path) -> None:
    class Top(Metric):
        """Largest probability of the model on fewer keys."""

        name = "top"
        help = "Largest probability, mean over positions."
        tasks = ("language",)
        most = 1.0

        def value(self, full: Outcome, kept: Outcome) -> float:
            return float(torch.softmax(kept.rows.double(), -1).amax(-1).mean())

    run = execute(spec("llama", rules=["sinks:2+recent"], texts=2), tmp_path / "run")
    rows = run.table("compress")
    assert rows.loc[rows["rule"] != "full", "top"].between(0, 1).all()
    assert run.columns("compress")["top"].help == Top.help
    del Top

"""Normality as a run: laws and heads of the packaged model, resumed and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

import esscher as es
from esscher.models.normality.job import head_of_pool, trial_of
from esscher.models.normality.spec import NormalitySpec
from esscher.runs import execute
from tests.cli.commands import run
from tests.real_head import model_folder

LAWS = """
job: normality
title: few
laws:
  - {name: sphere, law: {law: sphere, dim: 2}, head: {horizon: 0.5}}
  - {name: gaussian, law: {law: gaussian, dim: 2}, head: {horizon: 0.5}}
n: 10,30
repeats: 30
queries: 2
"""


def test_a_pool_of_keys_and_values_is_a_law_with_a_head() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, width, dtype=torch.float64, generator=generator)
        for rows, width in ((3, 4), (20, 4), (20, 5))
    )
    head, pool = head_of_pool(k, v, 0.7)
    torch.testing.assert_close(es.limit(head, pool)(q), es.attend(q, k, v, scale=0.7))
    bounds = es.Bounds.of(head, pool, q)
    torch.testing.assert_close(bounds.score, 0.7 * (q @ k.T).amax(1))


def test_a_run_of_laws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "laws.yaml", tmp_path / "run"
    file.write_text(LAWS)
    code, text, _ = run(["converge", str(file), "--out", str(out)], capsys)
    assert code == 0
    assert "markov, proved for 95%" in text
    stored = es.load_run(out)
    table = stored.table("coverage")
    assert table["case"].tolist() == ["sphere"] * 2 + ["gaussian"] * 2
    assert table["bernstein"].notna().tolist() == [True, True, False, False]
    assert len(stored.table("draws")) == 2 * 2 * 2 * 30
    before = table.copy()
    for shard in sorted((out / "shards").glob("*"))[:1] + list(out.glob("*.parquet")):
        shard.unlink()
    code, text, _ = run(["resume", str(out), "--json"], capsys)
    assert code == 0
    assert len(json.loads(text)["coverage"]) == 4
    pd.testing.assert_frame_equal(es.load_run(out).table("coverage"), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("name: gaussian", "name: sphere"), "each name once"),
        (("repeats: 30", "level: 1.0"), "level"),
        (("queries: 2", "metrics: [mean]"), "metrics"),
        (("job: normality", "job: probing"), "job: expected converge or normality"),
    ],
)
def test_mistakes(
    change: tuple[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(LAWS.replace(*change))
    code, _, err = run(["converge", str(file), "--out", str(tmp_path / "run")], capsys)
    assert code == 2
    assert words in err


def test_heads_of_the_packaged_model(tmp_path: Path) -> None:
    """The limit is attention on the pool, whose tokens are the probe's; the proved regions hold it
    in each of a few draws.
    """
    model_folder()
    fields = {
        "heads": [{"name": "a head", "layer": 0, "head": 3}],
        "tokens": 300,
        "n": "40,80",
        "repeats": 3,
        "queries": 2,
    }
    spec = NormalitySpec.model_validate(fields)
    trial = trial_of(spec, "a head")
    assert trial.measure.as_pool() is not None
    assert trial.queries.shape == (2, 32)
    assert trial.head.dim_out == 32
    table = execute(spec, tmp_path / "run").table("coverage")
    assert (table["bernstein"] == 1.0).all()
    assert table["n"].tolist() == [40, 80]
    with pytest.raises(ValueError, match="has 12 heads"):
        trial_of(
            spec.model_copy(update={"heads": (spec.heads[0].model_copy(update={"head": 12}),)}),
            "a head",
        )

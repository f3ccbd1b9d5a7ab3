"""Paired training as a run: settings, resuming, bad specs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from esscher.icl.training.job import units
from esscher.icl.training.spec import TrainSpec
from esscher.runs import execute, resume

SMALL = {
    "dim": 2,
    "covariances": ("kms:0.3",),
    "lengths": (8, 4),
    "seeds": 2,
    "steps": 60,
    "rate": 0.02,
}
SPEC = TrainSpec(**SMALL, records=4, evaluation=64, final_evaluation=20_000)


def test_paper_settings_are_the_defaults():
    spec = TrainSpec()
    assert (spec.dim, spec.noise, spec.steps, spec.batch, spec.rate) == (5, 0.1, 500_000, 128, 1e-3)
    assert [unit["length"] for unit in units(spec)] == sorted(
        unit["length"] for unit in units(spec)
    )
    assert len(units(spec)) == 18


def test_a_training_run_is_resumed_to_the_same_tables(tmp_path: Path):
    run = execute(SPEC, tmp_path / "run")
    assert set(run.tables) == {"curve", "distance", "path", "final"}
    final = run.table("final")
    assert len(final) == 8
    before = {name: (tmp_path / "run" / f"{name}.parquet").read_bytes() for name in run.tables}
    (tmp_path / "run" / "shards" / "000002.parquet").unlink()
    resume(tmp_path / "run")
    for name, content in before.items():
        assert (tmp_path / "run" / f"{name}.parquet").read_bytes() == content
    first = run.table("path").query("step == 0").groupby("seed")["values"]
    assert all(len({tuple(row) for row in rows}) == 1 for _, rows in first)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": (0,)},
        {"lengths": ()},
        {"steps": 0},
        {"batch": 0},
        {"rate": -1.0},
        {"seeds": 0},
        {"heads": 0},
    ],
)
def test_bad_specs(change: dict[str, object]):
    with pytest.raises(ValidationError, match=next(iter(change))):
        TrainSpec(**change)

"""Every column that a run of the lab stores is declared by its job, and the words are read from the
run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from esscher.icl.concentration.spec import ConcentrationSpec
from esscher.icl.flow.spec import FlowSpec
from esscher.icl.training.spec import TrainSpec
from esscher.runs import RunSpec, execute
from esscher.runs.columns import undeclared
from esscher.runs.job import find_job

SMALL = {"dim": 2, "covariances": ("isotropic",)}
SPECS = [
    TrainSpec(**SMALL, lengths=(4,), seeds=1, steps=3, records=2, evaluation=4, final_evaluation=4),
    FlowSpec(**SMALL, lengths=(10,), draws=10),
    ConcentrationSpec(**SMALL, lengths=(10, 100, 1000), repeats=4, prompts=4),
]


@pytest.mark.parametrize("spec", SPECS, ids=[spec.job for spec in SPECS])
def test_stored_columns_are_the_declared_ones(spec: RunSpec, tmp_path: Path):
    run = execute(spec, tmp_path / "run")
    declared = find_job(spec.job).columns(spec)
    assert set(declared) == set(run.tables)
    for table, columns in declared.items():
        stored = run.columns(table)
        assert {column.key: column.kind for column in columns} == {
            key: column.kind for key, column in stored.items()
        }
        for column in columns:
            assert (
                stored[column.key].help == column.help != undeclared(column.key, column.kind).help
            )

"""Every column that a run of the lab stores is declared by its job, and the words are read from the
run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from esscher.icl.specs import (
    FIGURES,
    ConcentrationSpec,
    FlowSpec,
    StabilitySpec,
    TrainSpec,
    choose_figures,
    specs_for,
)
from esscher.runs import RunSpec, execute, find_job
from esscher.runs.columns import undeclared

SMALL = {"dim": 2, "covariances": ("isotropic",)}
SPECS = [
    TrainSpec(**SMALL, lengths=(4,), seeds=1, steps=3, records=2, evaluation=4, final_evaluation=4),
    FlowSpec(**SMALL, lengths=(10,)),
    ConcentrationSpec(**SMALL, lengths=(10, 100, 1000), repeats=4, prompts=4),
    StabilitySpec(**SMALL, lengths=(10,), starts=1, training=2, until=3, times=4),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.job)
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


def test_figures_by_name():
    assert [figure.name for figure in choose_figures(None)] == [f"fig{i}" for i in range(1, 9)]
    assert [figure.name for figure in choose_figures("fig2, 7,fig3")] == ["fig2", "fig7", "fig3"]
    with pytest.raises(ValueError, match=r"figure: expected some of fig1, .*, got 'fig9'"):
        choose_figures("fig9")
    assert set(specs_for([FIGURES["fig1"]], quick=True)) == {"concentration"}
    paper = specs_for([FIGURES["fig6"]], quick=False)
    assert paper["train"] == TrainSpec(covariances=("kms:0.5",))
    assert set(paper) == {"train", "flow"}

"""Every column that a job stores is declared by it, with its kind; every text about a column is
written once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from esscher.convergence.montecarlo.job import CONVERGE
from esscher.icl.concentration.job import CONCENTRATION
from esscher.icl.concentration.spec import ConcentrationSpec
from esscher.icl.flow.job import FLOW
from esscher.icl.flow.spec import FlowSpec
from esscher.icl.stability.job import STABILITY
from esscher.icl.stability.spec import StabilitySpec
from esscher.icl.training.job import TRAIN
from esscher.icl.training.spec import TrainSpec
from esscher.models.downstream.job import DOWNSTREAM
from esscher.models.downstream.spec import DownstreamSpec
from esscher.models.normality.job import NORMALITY
from esscher.models.probe.job import PROBE
from esscher.models.probe.spec import ProbeSpec
from esscher.runs import Column
from esscher.runs.columns import Declared, columns_of

SOURCE = Path(__file__).parents[1] / "src" / "esscher"
SHOWN = (
    "report/**/*",
    "cli/probe.py",
    "cli/converge.py",
    "cli/icl.py",
    "cli/stability.py",
    "cli/fit.py",
)  # where stored tables are shown
# of figures drawn from points, whatever table they come from
AXES = {"rms error", "mean squared error", "two-sided horizon"}
KEPT = Path(__file__).parent / "snapshot"
DECLARED: dict[str, Declared] = {
    "converge": CONVERGE.columns(None),
    "normality": NORMALITY.columns(None),
    "icl_train": TRAIN.columns(TrainSpec()),
    "icl_flow": FLOW.columns(FlowSpec()),
    **dict.fromkeys(
        ("corpus", "moments", "parts"), PROBE.columns(ProbeSpec(epsilons=(0.1, 0.3), moments=4))
    ),
    "sequence": PROBE.columns(
        ProbeSpec(epsilons=(0.1, 0.3), pool="sequence", scales=(1.0,), temperature=(1.0, 0.1))
    ),
    "downstream": DOWNSTREAM.columns(DownstreamSpec()),
    "icl_concentration": CONCENTRATION.columns(ConcentrationSpec()),
    "icl_stability": STABILITY.columns(StabilitySpec()),
}


EVERY = list(
    dict.fromkeys(
        column for tables in DECLARED.values() for columns in tables.values() for column in columns
    )
)


@pytest.mark.parametrize("run", [name for name in DECLARED if (KEPT / name).is_dir()])
def test_every_column_of_the_kept_tables_is_declared(run: str) -> None:
    for path in sorted((KEPT / run).glob("*.parquet")):
        declared = {column.key: column for column in DECLARED[run][path.stem]}
        for key, found in columns_of(pq.read_schema(path)).items():
            assert key in declared, f"{run}/{path.stem}: {key}"
            assert declared[key].kind == found.kind, f"{run}/{path.stem}: {key}"


@pytest.mark.parametrize("column", EVERY, ids=lambda column: column.key)
def test_texts_are_for_people(column: Column) -> None:
    assert column.label.strip() == column.label != ""
    assert column.help.endswith((".", "..."))
    assert len(column.header) <= 32
    assert (column.scale == "words") <= (column.kind == "word")


def strings(paths: Iterable[Path]) -> Counter[str]:
    text = "\n".join(
        path.read_text("utf-8") for path in sorted(paths) if path.suffix in (".py", ".js")
    )
    return Counter(re.findall(r'(?<!")"((?:[^"\\\n]|\\.)+)"(?!")', text))


def test_every_text_about_a_column_is_written_once() -> None:
    """Labels of one word (head, n, tokens) are words of the language, and stand elsewhere too."""
    everywhere, shown = (
        strings(SOURCE.rglob("*")),
        strings(path for place in SHOWN for path in SOURCE.glob(place)),
    )
    helps = Counter(column.help for column in EVERY)
    assert {
        text: everywhere[text] for text, count in helps.items() if everywhere[text] > count
    } == {}
    labels = {column.label for column in EVERY if " " in column.label} - AXES
    assert {label: shown[label] for label in labels if shown[label]} == {}

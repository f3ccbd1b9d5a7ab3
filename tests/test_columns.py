"""Every column that a job stores is declared by it, with its kind; every text about a column is
written once.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from esscher.compress.job import COMPRESS
from esscher.compress.spec import CompressSpec
from esscher.errors.montecarlo.job import CONVERGE
from esscher.icl.jobs import CONCENTRATION, FLOW, STABILITY, TRAIN
from esscher.icl.specs import ConcentrationSpec, FlowSpec, StabilitySpec, TrainSpec
from esscher.probe.job import PROBE
from esscher.probe.spec import ProbeSpec
from esscher.runs.columns import Declared, columns_of

SHOWN = (
    "report/**/*",
    "cli/probe.py",
    "cli/converge.py",
    "cli/icl.py",
    "cli/icl.py",
    "cli/fit.py",
)  # where stored tables are shown
# of figures drawn from points, whatever table they come from
KEPT = Path(__file__).parent / "snapshot"
DECLARED: dict[str, Declared] = {
    "converge": CONVERGE.columns(None),
    "icl_train": TRAIN.columns(TrainSpec()),
    "icl_flow": FLOW.columns(FlowSpec()),
    **dict.fromkeys(
        ("corpus", "moments", "parts"), PROBE.columns(ProbeSpec(epsilons=(0.1, 0.3), moments=4))
    ),
    "sequence": PROBE.columns(ProbeSpec(epsilons=(0.1, 0.3), pool="sequence", scales=(1.0,))),
    "compress": COMPRESS.columns(CompressSpec()),
    "icl_concentration": CONCENTRATION.columns(ConcentrationSpec()),
    "icl_stability": STABILITY.columns(StabilitySpec()),
}


@pytest.mark.parametrize("run", [name for name in DECLARED if (KEPT / name).is_dir()])
def test_every_column_of_the_kept_tables_is_declared(run: str) -> None:
    for path in sorted((KEPT / run).glob("*.parquet")):
        declared = {column.key: column for column in DECLARED[run][path.stem]}
        for key, found in columns_of(pq.read_schema(path)).items():
            assert key in declared, f"{run}/{path.stem}: {key}"
            assert declared[key].kind == found.kind, f"{run}/{path.stem}: {key}"

"""Probes as runs: parts of a corpus, many processes, kill -9 and resume give the tables of one
undisturbed pass.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import esscher as es
from esscher.cli import main
from esscher.corpus.spec import CorpusSpec
from esscher.probe import session
from esscher.probe.spec import (
    FIXED,
    ProbeSpec,
    drawn_ladder,
    fit_points,
    fit_range,
    own_ladder,
)
from esscher.runs import Run, execute, load_run
from esscher.runs.store import Store
from tests.models.probe_runs import SETTINGS, few_texts, same_bytes, save_tiny, source, whole_prose
from tests.runs.test_dask import cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ProbeSpec:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("\n".join(few_texts()), encoding="utf-8")
    corpus = {"text": [str(path)], "max_tokens": 900}
    return ProbeSpec.read(
        {"model": str(folder), "corpus": corpus, "window": 64, "queries": 8, "kept_queries": 3}
    )


@pytest.fixture(scope="module")
def undisturbed(spec: ProbeSpec, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return execute(spec, tmp_path_factory.mktemp("run") / "whole")


def close(one: pd.DataFrame, other: pd.DataFrame, rtol: float) -> None:
    assert list(one.columns) == list(other.columns)
    for name in one.columns:
        if pd.api.types.is_numeric_dtype(one[name]):
            np.testing.assert_allclose(one[name], other[name], rtol=rtol, atol=1e-7, err_msg=name)
        elif name not in ("regime_reason", "text"):
            assert list(one[name]) == list(other[name]), name


def test_parts_of_a_corpus_give_the_tables_of_one_pass(tmp_path: Path) -> None:
    """4096 tokens of prose through the packaged model in parts of 1024 and at once."""
    settings = {
        **SETTINGS,
        "max_tokens": 4096,
        "layers": (1, 5),
        "heads": (1,),
        "kept_queries": 4,
        "n": "16,128,1024,4096",
    }
    whole = es.probe(None, whole_prose(), out=tmp_path / "whole", **settings)
    parts = es.probe(None, whole_prose(), out=tmp_path / "parts", part=1024, **settings)
    assert parts.manifest.units == 4
    assert [len(part) for part in source(parts).parts] == [8] * 4
    heads = [run.table("heads").drop(columns="accuracy") for run in (whole, parts)]
    rounded = [
        "tokens_needed_5pct",
        "tokens_needed_10pct",
        "tokens_needed_20pct",
    ]
    close(*(frame.drop(columns=rounded) for frame in heads), rtol=2e-5)
    for name in rounded:
        np.testing.assert_allclose(heads[0][name], heads[1][name], rtol=1e-4, atol=1)
    for name in ("curves", "tails", "layers"):
        close(whole.table(name), parts.table(name), rtol=1e-4)


@pytest.mark.slow
def test_64_parts_on_a_dask_cluster_give_the_tables_of_one_pass(
    spec: ProbeSpec, tmp_path: Path
) -> None:
    """Windows of 64 tokens, a part each, on two workers: the bytes of one process, and the numbers
    of one part to the accuracy of float32 sums.
    """
    pytest.importorskip("distributed")
    path = tmp_path / "prose.txt"
    path.write_text(whole_prose(), encoding="utf-8")
    corpus = {"text": [str(path)], "max_tokens": 64 * 64}
    whole = spec.model_copy(update={"corpus": CorpusSpec.model_validate(corpus)})
    parts = whole.model_copy(update={"part": 64})
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", 2) as running:
        reduced = execute(parts, tmp_path / "dask", dask=running.address)
    assert reduced.manifest.units == 64
    assert same_bytes(reduced.path, execute(parts, tmp_path / "here").path)
    curves = [run.table("curves") for run in (reduced, execute(whole, tmp_path / "whole"))]
    close(*curves, rtol=1e-4)


def test_layers_apart_are_layers_together(
    spec: ProbeSpec, undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tokens of all layers do not fit into memory each layer is a pass of its own."""
    monkeypatch.setattr(session, "MEMORY", 1.0)
    apart = execute(spec, tmp_path / "apart")
    assert same_bytes(undisturbed.path, apart.path)


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(
    spec: ProbeSpec, undisturbed: Run, tmp_path: Path
) -> None:
    both = execute(spec, tmp_path / "two", workers=2)
    assert same_bytes(undisturbed.path, both.path)


def test_a_killed_probe_resumes_to_the_same_bytes(
    spec: ProbeSpec, undisturbed: Run, tmp_path: Path
) -> None:
    """SIGKILL after the first shard, then ``esscher resume`` in a process of its own."""
    out = tmp_path / "killed"
    code = (
        "import sys, time; from esscher.probe import job as probe\n"
        "from esscher.runs import execute\n"
        "whole = probe.layer_tables\n"
        "def slow(*args):\n"
        "    time.sleep(0.5)\n"
        "    return whole(*args)\n"
        "probe.layer_tables = slow\n"
        "execute(sys.argv[1], sys.argv[2])\n"
    )
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec.as_dict()), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(out)], cwd=ROOT, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 240
    while Store(out).count() < 1:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = Store(out).count()
    assert 1 <= kept < undisturbed.manifest.units
    assert load_run(out).status != "complete"
    with pytest.raises(SystemExit) as stop:
        main(["resume", str(out), "--workers", "2"])
    assert not stop.value.code
    resumed = load_run(out)
    assert resumed.status == "complete"
    assert len(resumed.manifest.starts) == 2
    assert same_bytes(undisturbed.path, out)


# ---- ladders
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 2, 7, 16, 17, 100, 1000, 2048, 16384, 123457])
def test_ladders_rise_to_the_pool(keys: int) -> None:
    spec = ProbeSpec()
    own, drawn = own_ladder(spec, keys), drawn_ladder(spec, keys)
    for ladder in (own, drawn):
        assert (np.diff(ladder) > 0).all()
        assert ladder[0] >= 1
    assert own[-1] == keys
    assert drawn[-1] == max(1024 * keys, 4096)
    assert {*own, *FIXED, *fit_points(fit_range(spec, keys))} <= set(drawn)
    if keys >= 1000:
        assert own[0] == 16
        assert (np.diff(np.log2(own.astype(float))) <= 0.53).all()


def test_given_ladders_are_kept_and_must_fit() -> None:
    spec = ProbeSpec.read({"n": "10,100,400"})
    assert own_ladder(spec, 500).tolist() == [10, 100, 400]
    drawn = set(drawn_ladder(spec, 500).tolist())
    assert drawn == {
        10,
        100,
        400,
        *(500 * 2**i for i in range(11)),
        *fit_points((64, 4096)).tolist(),
    }
    assert own_ladder(ProbeSpec.read({"n": "100,400"}), 50).tolist() == [50, 100, 400]

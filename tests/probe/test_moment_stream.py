"""Moments of outputs of a corpus in parts, of a sampled one, and of a run that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import esscher as es
from esscher.cli import main
from esscher.probe import moments, session
from esscher.probe.moments import WHOLE_LAYER, moment_curves
from esscher.probe.statistic import LayerInfo
from esscher.runs import Run
from esscher.runs.store import Store
from tests.models.probe_runs import (
    captured_layers,
    few_texts,
    rows_of,
    save_tiny,
    source,
    tiny_model,
)

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "max_tokens": 300,
    "window": 64,
    "queries": 6,
    "kept_queries": 2,
    "n": "16,64,256",
    "pool": "corpus",
}
MOMENTS: dict[str, Any] = {**SMALL, "moments": 5, "moments_n": "8,20,50"}
EXPONENTS = [f"beta_{metric}{end}" for metric in ("mean", "cov") for end in ("", "_low", "_high")]


def moment_rows(run: Run) -> pd.DataFrame:
    curves = run.table("curves")
    chosen = curves[curves["metric"].isin(["mean", "cov"])]
    return chosen.sort_values(["layer", "head", "metric", "n"], ignore_index=True)


def equal(one: Run, other: Run, rtol: float) -> None:
    a, b = moment_rows(one), moment_rows(other)
    assert a[["layer", "head", "metric", "n", "kind"]].equals(
        b[["layer", "head", "metric", "n", "kind"]]
    )
    for name in ("rms", "relative", "stderr", "q95"):
        np.testing.assert_allclose(a[name], b[name], rtol=rtol, err_msg=name)
    for name in ("heads", "layers"):
        np.testing.assert_allclose(
            one.table(name)[EXPONENTS], other.table(name)[EXPONENTS], rtol=10 * rtol
        )
        assert list(one.table(name).columns) == list(other.table(name).columns)


@pytest.mark.parametrize("family", ["bert", "llama", "gemma2"])
def test_parts_and_blocks_of_layers_change_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus in three parts, layers that do not fit into memory together; grouped keys and capped
    scores among the families.
    """
    model, words = tiny_model(family)
    model.double()
    given = {**MOMENTS, "tokenizer": words, "dtype": "float64"}
    whole = es.probe(model, few_texts(), out=tmp_path / "whole", **given)
    assert whole.table("heads")["beta_cov"].notna().all()
    assert whole.manifest.units == 3  # two layers, and moments of both
    monkeypatch.setattr(session, "MEMORY", 1000)
    parts = es.probe(model, few_texts(), out=tmp_path / "parts", part=100, **given)
    assert parts.manifest.units == 8  # three parts and moments, for each layer
    equal(whole, parts, 1e-6)


def test_a_large_corpus_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is so many tokens, evenly spread: against attention on these tokens alone; heads as
    asked for.
    """
    monkeypatch.setattr(moments, "POOL", 120)
    model, words = tiny_model("llama")
    given = {**MOMENTS, "heads": (1, 2, 3), "tokenizer": words}
    run = es.probe(model, few_texts(), out=tmp_path, part=100, **given)
    found = source(run)
    places = np.flatnonzero(found.pooled)[np.linspace(0, 299, 120).round().astype(int)]
    seen = captured_layers(found)[1]
    q, k, v = (
        torch.cat([getattr(call, name)[0] for call in seen], dim=1)[:, places].double()
        for name in ("query", "key", "value")
    )
    info = LayerInfo(1, 4, 2, 8**-0.5, None, "")
    truth = moment_curves(info, (q, k, v), (1, 2, 3), np.array([8, 20, 50]), 5, 0)
    assert {head for head, _ in truth} == {1, 2, 3, WHOLE_LAYER}
    for (head, metric), curve in truth.items():
        np.testing.assert_allclose(rows_of(run, 1, head, metric)["rms"], curve.rms, rtol=1e-4)
    with pytest.raises(ValueError, match="moments_n: the pool has 120 keys, got n = 121"):
        es.probe(model, few_texts(), out=tmp_path / "more", **{**given, "moments_n": "8,121"})


def test_a_killed_probe_resumes_to_the_same_moments(tmp_path: Path) -> None:
    """As [B] did it with BERT on Wikipedia: a dataset of Parquet files, streamed, in parts, with
    moments. SIGKILL while the units of moments run, then ``esscher resume``: the bytes of an
    undisturbed run.
    """
    pytest.importorskip("datasets")
    (tmp_path / "wikipedia").mkdir()
    for number, one in enumerate(few_texts()):
        file = tmp_path / "wikipedia" / f"train-{number:05d}.parquet"
        pd.DataFrame({"title": [str(number)], "text": [one]}).to_parquet(file)
    fields = {key: value for key, value in MOMENTS.items() if key != "max_tokens"}
    spec = {"job": "probe", "model": str(save_tiny(tmp_path / "model")), "part": 100, **fields}
    spec["corpus"] = {"dataset": str(tmp_path / "wikipedia"), "max_tokens": 300}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    code = (
        "import importlib, sys, time; from esscher.runs import execute\n"
        "job = importlib.import_module('esscher.probe.job')\n"
        "whole = job.unit_moments\n"
        "def slow(*args):\n"
        "    time.sleep(60 * (len(sys.argv) > 3))\n"
        "    return whole(*args)\n"
        "job.unit_moments = slow\n"
        "execute(sys.argv[1], sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    subprocess.run([*command, str(tmp_path / "whole")], cwd=ROOT, check=True)
    process = subprocess.Popen([*command, str(tmp_path / "killed"), "slowly"], cwd=ROOT)
    deadline = time.monotonic() + 240
    while Store(tmp_path / "killed").count() < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with pytest.raises(SystemExit) as stop:
        main(["resume", str(tmp_path / "killed")])
    assert not stop.value.code
    for name in ("heads", "layers", "curves"):
        one, other = (
            (tmp_path / run / f"{name}.parquet").read_bytes() for run in ("whole", "killed")
        )
        assert one == other, name

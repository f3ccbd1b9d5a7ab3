"""Moments of outputs where tokens stream by: the held ones where every query is sampled, else off
by what they say.
"""

from __future__ import annotations

import math
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
from esscher.probe import moments
from esscher.probe.moments import WHOLE_LAYER, Errors, Limit, estimate, sample_queries
from esscher.runs import Run
from esscher.runs.store import Store
from esscher.tails import moments as token_moments
from tests.models.probe_runs import few_texts, save_tiny, tiny_model

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "max_tokens": 300,
    "window": 64,
    "queries": 6,
    "kept_queries": 2,
    "n": "16,64,256",
    "pool": "corpus",
}
MOMENTS: dict[str, Any] = {**SMALL, "moments": 5, "moments_n": "8,20,50", "moments_queries": 1000}
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
def test_a_sample_of_all_queries_gives_the_held_limit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, and by layers with draws that take several passes; grouped keys and capped scores
    among the families.
    """
    model, words = tiny_model(family)
    model.double()
    given = {**MOMENTS, "tokenizer": words, "dtype": "float64"}
    held = es.probe(model, few_texts(), out=tmp_path / "held", **given)
    assert "limits" not in held.tables
    assert held.table("heads")["beta_cov"].notna().all()
    monkeypatch.setattr(moments, "MEMORY", 1000)
    if family == "bert":
        monkeypatch.setattr(moments, "DRAWN", 20_000)  # tokens of a repeat or two
    streamed = es.probe(
        model, few_texts(), out=tmp_path / "some", part=131072 if family == "bert" else 100, **given
    )
    # two layers and two units of moments, or three parts and one
    assert streamed.manifest.units == 4
    equal(held, streamed, 1e-6)
    assert "limits" not in streamed.tables  # every token is among the sampled queries


def test_a_sampled_limit_on_a_few_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer queries than tokens: the limit has an error, errors are near the held ones; heads as
    asked for, with agreement.
    """
    monkeypatch.setattr(moments, "CONTROL", 60)
    model, words = tiny_model("llama")
    given = {**MOMENTS, "heads": (1, 2, 3), "tokenizer": words, "moments": 12}
    held = es.probe(model, few_texts(), out=tmp_path / "held", **given)
    monkeypatch.setattr(moments, "MEMORY", 1000)
    some = es.probe(
        model, few_texts(), out=tmp_path / "some", part=100, **{**given, "moments_queries": 60}
    )
    limits = some.table("limits")
    assert set(limits["head"]) == {1, 2, 3, WHOLE_LAYER}
    assert (limits["stderr"] > 0).all()
    assert (limits["queries"] < 80).all()
    ratio = moment_rows(some)["rms"] / moment_rows(held)["rms"]
    assert (abs(ratio - 1) < 0.1).all()
    assert "agreement" in some.tables


def population(generator: np.random.Generator) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """23 windows of 5 to 31 tokens, alike within windows: which tokens are pooled, outputs (N, 3),
    the control's (N, 3).
    """
    sizes = generator.integers(5, 32, size=23)
    pooled = np.arange(32) < sizes[:, None]
    window = np.repeat(np.arange(23), sizes)
    x = generator.normal(size=(len(window), 3)) + generator.normal(size=(23, 3))[window]
    c = (
        0.8 * x
        + 0.3 * generator.normal(size=x.shape)
        + 0.4 * generator.normal(size=(23, 3))[window]
        + 0.7
    )
    return pooled, torch.from_numpy(x), torch.from_numpy(c)


@pytest.mark.parametrize(("windows", "each"), [(9, 4), (23, 3)])
def test_the_limits_standard_error(
    windows: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 samples of one population: squared distances from the truth are the stated ones on
    average, to 4 standard errors and what a sample of few windows is biased by (a tenth), and so
    along a direction; nothing is biased.
    """
    monkeypatch.setattr(moments, "WINDOWS", windows)
    monkeypatch.setattr(moments, "EACH", each)
    pooled, x, c = population(np.random.default_rng(5))
    every = token_moments.update(token_moments.init(3, higher=False), c)
    truth, own = Limit.of(x), slice(0, 3)
    errors = {
        "mean": torch.tensor([[1.0, -2.0, 0.5]]).double(),
        "cov": torch.tensor([[[1.0, 0.5, 0.0]] * 3]).double(),
    }
    seen: dict[str, list[list[float]]] = {"mean": [], "cov": []}
    for seed in range(400):
        sample = sample_queries(pooled, windows * each, seed)
        assert len(sample.windows) == windows
        rows = torch.from_numpy(sample.tokens)
        found = estimate(sample, x[rows], c[rows], every)
        assert found.spread is not None
        for metric, delta in (("mean", found.mean - truth.mean), ("cov", found.cov - truth.cov)):
            along = float((errors[metric][0] * delta).sum())
            spread = found.spread.along(metric, own, errors[metric])
            seen[metric].append(
                [
                    float(delta.square().sum()),
                    found.spread.square(metric, own),
                    along,
                    float(spread[0, 0]),
                ]
            )
    for metric, rows_seen in seen.items():
        square, stated_square, along, spread = np.array(rows_seen).T
        for found_square, stated in ((square, stated_square), (along**2, spread)):
            apart = found_square.mean() - stated.mean()
            noise = math.hypot(found_square.std(), stated.std()) / math.sqrt(len(stated))
            assert abs(apart) < 4 * noise + 0.1 * found_square.mean(), metric
        assert abs(along.mean()) < 4 * along.std() / math.sqrt(len(along)) + 0.1 * along.std(), (
            metric
        )


def test_all_tokens_are_a_sample_without_error() -> None:
    pooled, x, c = population(np.random.default_rng(6))
    sample = sample_queries(pooled, 10**6, 0)
    assert sample.tokens.tolist() == list(range(len(x)))
    found = estimate(sample, x, c, token_moments.update(token_moments.init(3, higher=False), c))
    truth = Limit.of(x)
    torch.testing.assert_close(found.mean, truth.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.cov, truth.cov, rtol=1e-12, atol=1e-12)
    assert found.spread is not None
    assert found.spread.square("cov", slice(None)) == 0


def test_variances_of_products() -> None:
    """Without the products of all tokens, against the covariance of these products."""
    pooled, x, c = population(np.random.default_rng(8))
    sample = sample_queries(pooled, 50, 2)
    x, c = (values[torch.from_numpy(sample.tokens)] for values in (x, c))
    products = (x[:, :, None] * x[:, None, :] - c[:, :, None] * c[:, None, :]).flatten(1)
    expected = sample.covariance(products).diagonal().reshape(3, 3)
    torch.testing.assert_close(sample.product_variances(x, c), expected, rtol=1e-10, atol=0)


def test_errors_below_the_limits_own_are_left_out_of_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stand in the curve as they came, with a standard error as large as themselves; the
    others have it taken off.
    """
    monkeypatch.setattr(moments, "WINDOWS", 4)
    pooled, x, c = population(np.random.default_rng(7))
    sample = sample_queries(pooled, 16, 1)
    rows = torch.from_numpy(sample.tokens)
    limit = estimate(
        sample, x[rows], c[rows], token_moments.update(token_moments.init(3, higher=False), c)
    )
    assert limit.spread is not None
    square = limit.spread.square("mean", slice(None))
    errors = Errors(limit, (0,), np.array([10, 20, 40, 80]))
    generator = np.random.default_rng(1)
    level = square * np.array([50.0, 20.0, 9.0, 1.5])
    samples = level * generator.chisquare(9, size=(30, 4)) / 9
    errors.squared = {(0, "mean"): samples.tolist()}
    sampled = errors.curves("made up")[0, "mean"]
    mean = samples.mean(axis=0)
    np.testing.assert_allclose(sampled.curve.rms**2, [*(mean[:3] - square), mean[3]], rtol=1e-12)
    assert sampled.curve.stderr[3] == pytest.approx(sampled.curve.rms[3])
    assert sampled.limit_stderr == pytest.approx(math.sqrt(square))
    fit = es.fit_rate(sampled.curve)
    assert fit.n.tolist() == [10, 20, 40]
    row = sampled.row()
    assert row["beta_mean"] == pytest.approx(fit.exponent)
    assert row["beta_mean_low"] < fit.interval[0] < fit.interval[1] < row["beta_mean_high"]


@pytest.mark.slow
def test_a_killed_probe_resumes_to_the_same_moments(tmp_path: Path) -> None:
    """SIGKILL while the units of moments run, then ``esscher resume``: the bytes of an undisturbed
    run.
    """
    text = tmp_path / "prose.txt"
    text.write_text("\n".join(few_texts()), encoding="utf-8")
    fields = {key: value for key, value in MOMENTS.items() if key != "max_tokens"} | {
        "moments_queries": 50,
        "part": 100,
    }
    spec = {"job": "probe", "model": str(save_tiny(tmp_path / "model")), **fields}
    spec["corpus"] = {"text": [str(text)], "max_tokens": 300}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    code = (
        "import sys, time, esscher.probe.job as probe; from esscher.runs import execute\n"
        "whole = probe.stream_moments\n"
        "def slow(*args):\n"
        "    time.sleep(60 * (len(sys.argv) > 3))\n"
        "    return whole(*args)\n"
        "probe.stream_moments = slow\n"
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
    for name in ("heads", "layers", "curves", "limits", "agreement"):
        one, other = (
            (tmp_path / run / f"{name}.parquet").read_bytes() for run in ("whole", "killed")
        )
        assert one == other, name

"""Scores multiplied: every scale against the exact curve of scaled queries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import esscher as es
from esscher.probe.moments import moment_curves, moment_row
from esscher.probe.session import spread
from esscher.probe.spec import ProbeSpec, fit_points
from esscher.probe.statistic import LayerInfo
from esscher.probe.statistics.errors import Scales
from esscher.theory import bohbot, sharp
from tests.models.probe_runs import head_row, pooled_tensors, source
from tests.probe.test_gaps import probe, some_scores
from tests.probe.test_moments import all_queries
from tests.probe.views import view

ALPHAS = (0.01, 0.5, 1.0, 3.0, 300.0)  # the last too wide for a grid


def test_every_scale_is_the_head_with_scaled_queries(tmp_path: Path) -> None:
    run = probe("bert", tmp_path, pool="corpus", scales=ALPHAS)
    found, table = source(run), run.table("scales")
    q, k, v = pooled_tensors(found, 1)
    rows = spread(q.shape[1], 4)
    for head in (1, 2):
        own = table[(table["layer"] == 1) & (table["head"] == head)].set_index("scale")
        row = head_row(run, 1, head)
        for alpha in ALPHAS:
            told = own.loc[alpha]
            tensors = alpha * q[head, rows].double(), k[head].double(), v[head].double()
            points = es.exact_pool_curve(*tensors, fit_points((64, 4096)))
            assert points.queries is not None
            fit = es.fit_rate(
                replace(
                    points,
                    queries=replace(points.queries, clusters=found.queries.windows[rows]),
                )
            )
            assert told["beta_fit"] == pytest.approx(fit.exponent, rel=1e-4)
            assert (told["beta_low"], told["beta_high"]) == pytest.approx(fit.interval, rel=1e-4)
            coupling, horizon2 = alpha**2 * row["coupling"], alpha * row["horizon2"]
            assert told["coupling"] == pytest.approx(coupling)
            assert told["beta_paper"] == pytest.approx(bohbot.moment_exponent(coupling))
            assert told["beta_paper_experimental"] == pytest.approx(
                bohbot.moment_exponent_experimental(coupling)
            )
            assert told["beta_sharp"] == pytest.approx(sharp.l2_exponent_typical(horizon2))
            assert told["beta_sharp_rms"] == pytest.approx(sharp.l2_exponent_rms(horizon2))


def test_windows_of_a_causal_model_are_stacked(tmp_path: Path) -> None:
    """At scale 1 and with every query kept it is the head itself."""
    run = probe("llama", tmp_path, pool="sequence", scales="1", queries=8, kept_queries=8)
    for told in run.table("scales").to_dict("records"):
        row = head_row(run, told["layer"], told["head"])
        assert told["beta_fit"] == pytest.approx(row["beta_fit"], rel=1e-6)


def test_moments_at_every_scale(tmp_path: Path) -> None:
    """At scale 1 those of the head; at another those of the head with scaled queries."""
    asked = {"scales": (1.0, 2.0), "moments": 5, "moments_n": (16, 32, 64)}
    run = probe("bert", tmp_path, pool="corpus", heads=(1,), **asked)
    own, row = run.table("scales").set_index("scale"), head_row(run, 1, 1)
    told = [f"beta_{metric}{end}" for metric in ("mean", "cov") for end in ("", "_low", "_high")]
    assert own.loc[1.0, told].tolist() == pytest.approx([row[name] for name in told])
    found = source(run)
    q, (_, k, v) = all_queries(found), pooled_tensors(found, 1)
    info = LayerInfo(1, q.shape[0], k.shape[0], q.shape[-1] ** -0.5, None, "")
    n, seed = np.array(asked["moments_n"]), run.spec["seed"]
    truth = moment_row(moment_curves(info, (2 * q, k.double(), v.double()), (1,), n, 5, seed), 1)
    assert own.loc[2.0, told].tolist() == pytest.approx([truth[name] for name in told], rel=1e-4)


def test_nothing_is_kept_unless_asked(tmp_path: Path) -> None:
    run = probe("bert", tmp_path, pool="corpus")
    assert "scales" not in run.tables
    assert Scales().measure(view(ProbeSpec(), some_scores(3, 60, 1.0))) == {}


@pytest.mark.parametrize("given", ["0,1", "1,x", (-1.0,), "", (float("inf"),)])
def test_scales_are_numbers_above_0(given: Any) -> None:
    with pytest.raises(ValueError, match="scales"):
        ProbeSpec(scales=given)
    assert ProbeSpec(scales="10, 0.1,10").scales == (0.1, 10.0)


def test_scales_of_a_corpus_in_parts_are_those_of_the_corpus(tmp_path: Path) -> None:
    settings = {"pool": "corpus", "scales": (0.5, 2.0)}
    whole = probe("bert", tmp_path / "whole", **settings).table("scales")
    parts = probe("bert", tmp_path / "parts", **settings, part=130).table("scales")
    by = ["head", "scale"]
    one, other = (table.sort_values(by, ignore_index=True) for table in (whole, parts))
    np.testing.assert_allclose(one["beta_fit"], other["beta_fit"], rtol=1e-4)

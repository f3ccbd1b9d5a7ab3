"""Normality and coverage by drawing tokens: against Student's law where scores are equal, and
against what is proved; and as a run of laws and of heads of the packaged model, resumed and shown.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import esscher as es
from esscher.papers.normality import (
    NormalitySpec,
    case_of,
    coverage_table,
    draw_regions,
    head_of_pool,
    normality_table,
    open_cases,
)
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


def eye(d: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.eye(d, dtype=torch.float64)


def test_without_scores_the_studentised_error_is_students() -> None:
    """A = 0 on the line: C_n = (1 - 1/n) s^2 / n, so t = sqrt(n/(n-1)) t_{n-1}. Coverage within 4
    binomial errors of Student's, Kolmogorov's test at 1 in 10,000; fixed seed.
    """
    n, repeats = 8, 500
    head, law = es.Head([[0.0]], [[1.0]]), es.Gaussian([[2.0]])
    draws = draw_regions(head, law, torch.tensor([[1.0]]).double(), (n,), range(repeats))
    factor = math.sqrt((n - 1) / n)
    assert scipy.stats.kstest(factor * draws["student"], scipy.stats.t(n - 1).cdf).pvalue > 1e-4
    np.testing.assert_allclose(draws["chi2"], draws["student"] ** 2, rtol=1e-9)
    (row,) = coverage_table(draws).to_dict("records")
    exact = 1 - 2 * scipy.stats.t(n - 1).sf(factor * scipy.stats.norm.ppf(0.975))
    assert abs(row["normal"] - exact) < 4 * row["normal_stderr"]
    assert row["normal_stderr"] == pytest.approx(math.sqrt(exact * (1 - exact) / repeats), rel=0.1)
    exact_distance = max(
        abs(scipy.stats.t(n - 1).cdf(factor * x) - scipy.stats.norm.cdf(x))
        for x in np.linspace(-4, 4, 801)
    )
    assert row["kolmogorov"] < exact_distance + 3 * row["kolmogorov_noise"]
    assert row["rms"] == pytest.approx(math.sqrt(2.0 / n), rel=0.05)
    assert row["effective_tokens"] == pytest.approx(n)


def test_proved_regions_hold_and_all_become_normal() -> None:
    """Tokens on a sphere, 150 draws: the proved shares are at least .95 but for 4 standard errors,
    the asymptotic one at n = 2000 too, and the distance to normal falls.
    """
    law = es.Sphere(3)
    x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]]).double()
    found = normality_table(es.Head(eye(3), eye(3)), law, x, [10, 2000], repeats=150)
    assert (found["bernstein"] >= 0.95 - 4 * found["bernstein_stderr"]).all()
    small, large = found.to_dict("records")
    assert small["normal"] < 0.9
    assert abs(large["normal"] - 0.95) < 4 * large["normal_stderr"]
    assert large["chi2_mean"] == pytest.approx(1.0, abs=0.2)
    assert large["kolmogorov"] < small["kolmogorov"]
    exact = es.exact_curve(es.Head(eye(3), eye(3)), law, x, [10, 2000])
    assert found["rms"].tolist() == pytest.approx(exact.rms.tolist(), rel=0.15)


def test_a_law_without_bounds_has_no_region_from_them() -> None:
    found = normality_table(
        es.Head(eye(2, 0.3), eye(2)), es.Gaussian(eye(2)), [[1.0, 0.0]], [20], repeats=4
    )
    assert found["bernstein"].isna().all()
    assert found["bernstein_stderr"].isna().all()


def test_draws_do_not_depend_on_who_makes_them() -> None:
    def drawn(repeats: range) -> pd.DataFrame:
        head, queries = es.Head(eye(2), eye(2)), torch.ones(2, 2).double()
        return draw_regions(head, es.Ball(2), queries, (5, 9), repeats, 0.9, seed=3, name="x")

    whole = drawn(range(4))
    parts = pd.concat([drawn(range(2, 4)), drawn(range(2))], ignore_index=True)
    order = ["repeat", "n", "query"]
    pd.testing.assert_frame_equal(
        *(frame.sort_values(order, ignore_index=True) for frame in (whole, parts))
    )


def test_a_table_of_known_draws() -> None:
    """Two queries, four repeats: shares, errors, radii over the rms error, chi-squared over its
    degrees of freedom.
    """
    rows = [
        (r, q, 7, 1.0 if r < 2 else -1.0, 6.0, 4.0, 2.0, 3.0, float(r < 3), 8.0)
        for r in range(4)
        for q in range(2)
    ]
    names = [
        "repeat",
        "query",
        "n",
        "student",
        "chi2",
        "squared",
        "effective_tokens",
        "dim",
        "normal",
        "normal_radius",
    ]
    (row,) = coverage_table(pd.DataFrame(rows, columns=names)).to_dict("records")
    assert (row["n"], row["rms"], row["effective_tokens"]) == (7, 2.0, 2.0)
    assert (row["normal"], row["normal_size"], row["chi2_mean"]) == (0.75, 4.0, 2.0)
    assert row["normal_stderr"] == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 4))
    assert row["kolmogorov"] == pytest.approx(float(scipy.stats.norm.cdf(1.0)) - 0.5)
    assert (row["skewness"], row["kurtosis"]) == (0.0, -2.0)


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
    assert "bernstein, proved for 95%" in text
    stored = es.load_run(out)
    table = stored.table("coverage")
    assert table["case"].tolist() == ["sphere"] * 2 + ["gaussian"] * 2
    assert table["bernstein"].notna().tolist() == [True, True, False, False]
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
    head, measure, queries = case_of(open_cases(spec), "a head")
    assert measure.as_pool() is not None
    assert queries.shape == (2, 32)
    assert head.dim_out == 32
    table = execute(spec, tmp_path / "run").table("coverage")
    assert (table["bernstein"] == 1.0).all()
    assert table["n"].tolist() == [40, 80]
    wrong = (spec.heads[0].model_copy(update={"head": 12}),)
    cases = open_cases(spec.model_copy(update={"heads": wrong}))
    with pytest.raises(ValueError, match="has 12 heads"):
        case_of(cases, "a head")

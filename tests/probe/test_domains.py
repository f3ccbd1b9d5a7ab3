"""Domains compared: medians and ranks by hand, heads that failed or never came down, columns that
are declared.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from esscher.probe.agreement import DOMAIN_COLUMNS, RANK_COLUMNS, compare_domains


def heads(seed: int, failed: int | None = None) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    table = pd.DataFrame(
        {"layer": np.repeat([0, 1], 4), "head": np.tile(np.arange(4), 2), "status": "ok"}
    )
    table["beta_fit"] = generator.uniform(0.1, 0.5, 8)
    table["tokens_needed_10pct"] = generator.uniform(100.0, 1e4, 8)
    table["sink_mass"] = generator.uniform(0.0, 1.0, 8)
    if failed is not None:
        table.loc[failed, ["beta_fit", "tokens_needed_10pct", "sink_mass"]] = math.nan
        table.loc[failed, "status"] = "failed"
    return table


def test_medians_and_ranks_by_hand() -> None:
    prose, code, law = heads(1), heads(2, failed=3), heads(3).iloc[::-1]
    domains, ranks = compare_domains({"prose": prose, "code": code, "law": law}, seed=0)
    assert list(domains) == [column.key for column in DOMAIN_COLUMNS]
    assert list(ranks) == [column.key for column in RANK_COLUMNS]
    assert set(domains["measure"]) == {"beta_fit", "tokens_needed_10pct", "sink_mass"}
    by = domains.set_index(["domain", "measure"])
    assert by.loc[("code", "beta_fit"), "median"] == pytest.approx(code["beta_fit"].median())
    assert by.loc[("code", "beta_fit"), "heads"] == 7
    pair = ranks.set_index(["measure", "first", "second"])
    assert len(pair) == 9
    other = law.sort_values(["layer", "head"])
    expected = scipy.stats.spearmanr(prose["sink_mass"], other["sink_mass"]).statistic
    row = pair.loc[("sink_mass", "prose", "law")]
    assert row["rho"] == pytest.approx(expected, rel=1e-12)
    assert row["rho_low"] <= row["rho"] <= row["rho_high"]
    assert row["change"] == pytest.approx(
        np.median(other["sink_mass"].to_numpy() / prose["sink_mass"].to_numpy())
    )
    without = [i for i in range(8) if i != 3]
    expected = scipy.stats.spearmanr(
        prose["beta_fit"][without], code["beta_fit"][without]
    ).statistic
    assert pair.loc[("beta_fit", "prose", "code"), "rho"] == pytest.approx(expected, rel=1e-12)


def test_a_head_that_never_came_down_demands_most() -> None:
    one, other = heads(4), heads(5)
    one.loc[0, "tokens_needed_10pct"] = math.nan
    other.loc[:4, "tokens_needed_10pct"] = math.nan
    domains, ranks = compare_domains({"a": one, "b": other}, seed=0)
    by = domains.set_index(["domain", "measure"])
    filled = one["tokens_needed_10pct"].fillna(1e9)
    assert by.loc[("a", "tokens_needed_10pct"), "median"] == pytest.approx(filled.median())
    assert math.isnan(by.loc[("a", "tokens_needed_10pct"), "most"])
    assert math.isnan(by.loc[("b", "tokens_needed_10pct"), "median"])
    row = ranks.set_index("measure").loc["tokens_needed_10pct"]
    assert row["rho"] == pytest.approx(
        scipy.stats.spearmanr(filled, other["tokens_needed_10pct"].fillna(1e9)).statistic
    )
    assert math.isfinite(row["change"])
    assert not np.isinf(domains.select_dtypes("number")).any().any()


def test_few_or_no_heads_in_common_have_no_ranks() -> None:
    one, other = heads(6), heads(7)
    other["layer"] += 2
    _, ranks = compare_domains({"a": one, "b": other}, seed=0)
    assert ranks["rho"].isna().all()
    assert ranks["change"].isna().all()
    assert (ranks["heads"] == 0).all()

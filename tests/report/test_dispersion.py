"""Dispersion on the page of a probe and in its figures: the curves of a head, and what is said of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from esscher.report import write_report
from esscher.report.page import content_of
from esscher.runs import Run
from tests.report.atlas import OwnContexts, atlas_tables, store_run
from tests.report.browser import Page

N = np.array([2, 16, 128, 1024])


def tables() -> dict[str, Any]:
    found = atlas_tables(2, 3)
    heads = found["heads"]
    heads["tokens_exponent"], heads["half_weight_at"] = (
        0.75,
        [np.nan, *np.arange(3.0, 3.0 + len(heads) - 1)],
    )
    parts = []
    for row in heads.to_dict("records"):
        place = {"layer": row["layer"], "head": row["head"]}
        tokens = N ** (0.5 + 0.1 * row["head"])
        whole = {
            "n": N,
            "effective_tokens": tokens,
            "entropy": np.log(tokens),
            "largest_weight": 1 / N,
        }
        parts.append({**place, **whole})
    return found | {
        "dispersion": pd.concat([pd.DataFrame(part) for part in parts], ignore_index=True)
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return store_run(tmp_path_factory.mktemp("spread") / "run", OwnContexts(), tables())


def test_content_holds_the_curves_of_every_head(run: Run) -> None:
    content = content_of(run)
    (random,) = content["dispersion"][2]
    assert content["grids"][random[0]] == N.tolist()
    assert random[1] == pytest.approx((N**0.7).tolist(), rel=1e-3)
    assert random[2] == pytest.approx((1 / N).tolist(), rel=1e-3)


def test_a_head_shows_its_spread(visit: Callable[..., Page], run: Run) -> None:
    page = visit(write_report([run]), "#L0H1")
    assert page.texts("#head .spread h3") == [
        "Effective tokens against keys",
        "Largest weight against keys",
    ]
    assert page.texts("#head .spread figcaption") == [
        "Effective tokens of random keys grow as n to the power 0.75.",
        "The largest weight stays below a half from about 3 random keys on.",
    ]
    page = visit(write_report([run]), "#L0H0")
    assert (
        page.texts("#head .spread figcaption")[1]
        == "The largest weight is not below a half at the last n."
    )

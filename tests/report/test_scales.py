"""Scores multiplied, on the page of a probe and in its figures: heads as points, medians as
lines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from esscher.probe.spec import ProbeSpec
from esscher.probe.statistics.errors import Scales
from esscher.report import write_report
from esscher.report.page import content_of
from esscher.runs import Run
from tests.report import atlas
from tests.report.browser import Page

ALPHAS = (0.1, 1.0, 10.0)
SCALES = Scales().tables(ProbeSpec(scales=ALPHAS))["scales"]
DECLARED = atlas.declared


def tables() -> dict[str, Any]:
    found = atlas.atlas_tables(2, 3)
    rows = []
    for row in found["heads"].to_dict("records"):
        for alpha in ALPHAS:
            beta = 0.5 / (1 + 0.01 * alpha**2 * (1 + row["head"]))
            number = {column.key: 0.25 for column in SCALES if column.kind == "float"}
            place = {"layer": row["layer"], "head": row["head"], "scale": alpha, "beta_fit": beta}
            rows.append({**number, **place})
    return found | {"scales": pd.DataFrame(rows)[[column.key for column in SCALES]]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("scales") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atlas, "declared", lambda spec: {**DECLARED(spec), "scales": SCALES})
        return atlas.store_run(folder, atlas.ProbeLike(), tables())


def test_content_has_every_measured_point(run: Run) -> None:
    found = content_of(run)["scales"]
    assert set(found["rows"]["scale"]) == set(ALPHAS)
    assert len(found["rows"]["beta_fit"]) == 2 * 3 * 3
    assert [line["label"].rsplit("(", 1)[1] for line in found["theory"]] == [
        *("proved if Gaussian)", "experimental)", "heuristic)", "heuristic)")
    ]


def test_the_page_draws_them(visit: Callable[..., Page], run: Run) -> None:
    page = visit(write_report([run]))
    assert page.texts("#scales h3") == ["Exponents against the squared scale"]
    scales = "new Atlas(DATA.runs[0], 0).scales.rows"
    middle = f"median({scales}.beta_fit.filter((_, j) => {scales}.scale[j] === 1))"
    assert page.evaluate(middle) == pytest.approx(0.5 / 1.02, rel=1e-4)
    assert page.count("#scales .series.line path") == 1 + 4  # the medians, and theory's


def test_axes_hold_every_point(
    visit: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exponents above 0.6 and below 0."""
    monkeypatch.setattr(atlas, "declared", lambda spec: {**DECLARED(spec), "scales": SCALES})
    made = tables()
    made["scales"].loc[0, "beta_fit"], made["scales"].loc[1, "beta_fit"] = 0.663, -0.05
    made["heads"].loc[0, "beta_fit"] = -0.04
    run = atlas.store_run(tmp_path / "run", atlas.ProbeLike(), made)
    page = visit(write_report([run]))
    outside = """[...document.querySelectorAll('#scales .plot circle, #scatter .plot circle')].filter((dot) => {
        const frame = dot.ownerSVGElement.querySelector('clipPath rect');
        const top = Number(frame.getAttribute('y')), y = Number(dot.getAttribute('cy'));
        return y < top || y > top + Number(frame.getAttribute('height'));
    }).length"""  # noqa: E501
    assert page.count("#scales .plot circle") > 10
    assert page.evaluate(outside) == 0

"""Figures chosen by name, and the runs they need."""

from __future__ import annotations

import pytest

from esscher.icl.figures import FIGURES, choose_figures, specs_for
from esscher.icl.training.spec import TrainSpec


def test_figures_by_name():
    assert [figure.name for figure in choose_figures(None)] == [f"fig{i}" for i in range(1, 9)]
    assert [figure.name for figure in choose_figures("fig2, 7,Figure3")] == ["fig2", "fig7", "fig3"]
    with pytest.raises(ValueError, match=r"figure: expected some of fig1, .*, got 'fig9'"):
        choose_figures("fig9")
    assert set(specs_for([FIGURES["fig1"]], quick=True)) == {"concentration"}
    paper = specs_for([FIGURES["fig6"]], quick=False)
    assert paper["train"] == TrainSpec(covariances=("kms:0.5",))
    assert set(paper) == {"train", "flow"}

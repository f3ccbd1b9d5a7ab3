"""One probe of the packaged model for all tests that look at its tables."""

from __future__ import annotations

import pytest

import esscher as es
from esscher.runs import Run
from tests.models.probe_runs import SETTINGS, whole_prose
from tests.real_head import model_folder


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six heads of the packaged model on 2048 tokens of prose."""
    model_folder()
    return es.probe(None, whole_prose(), out=tmp_path_factory.mktemp("probe") / "run", **SETTINGS)

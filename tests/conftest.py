"""One process environment for all tests: no network, one thread per worker, no screen, the same
examples every time.
"""

from __future__ import annotations

import os

# Read by the libraries when they are imported, so this comes first.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("COLUMNS", None)  # workers of xdist have one, and tables would be folded to it

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numba
import pytest
import torch
from hypothesis import settings

from tests import accelerator

accelerator.make()

# Hypothesis: no deadline, since a test never asserts a time; the same examples in every run.
settings.register_profile("esscher", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("esscher")


def _compile_the_original(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """numba cannot compile the wrapper that checks shapes, so it is given the function inside."""

    @functools.wraps(compiler)
    def decorator(*args: Any, **options: Any) -> Any:
        if args and inspect.isfunction(args[0]):
            return compiler(inspect.unwrap(args[0]), *args[1:], **options)
        made = compiler(*args, **options)
        return lambda function: made(inspect.unwrap(function))

    return decorator


for _name in ("njit", "jit", "vectorize", "guvectorize"):
    setattr(numba, _name, _compile_the_original(getattr(numba, _name)))


@pytest.fixture
def generator() -> torch.Generator:
    """Random state with a fixed seed."""
    return torch.Generator().manual_seed(20251)


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A probe of six heads of the packaged model on 2048 tokens of prose."""
    import esscher as es
    from tests.models.probe_runs import SETTINGS, whole_prose
    from tests.real_head import model_folder

    model_folder()
    return es.probe(None, whole_prose(), out=tmp_path_factory.mktemp("probe") / "run", **SETTINGS)

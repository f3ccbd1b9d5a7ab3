"""Laws and heads from plain data."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from esscher.errors.montecarlo.spec import HeadSpec
from esscher.measures.fields import LawSpec

law_adapter = TypeAdapter(LawSpec)


@pytest.mark.parametrize(
    "law",
    [
        {"law": "gaussian", "dim": 3, "variance": 2.0, "decay": 1.0, "mean": 0.5},
        {"law": "gaussian", "dim": 2, "mean": [1.0, 0.0]},
        {"law": "sphere", "dim": 3, "radius": 2.0},
        {"law": "ball", "dim": 3},
        {"law": "cube", "dim": 3, "half_width": 0.5},
        {"law": "rademacher", "dim": 3},
        {"law": "laplace", "dim": 3, "scale": 0.2},
        {
            "law": "mixture",
            "weights": [1, 2],
            "components": [{"law": "ball", "dim": 3}, {"law": "cube", "dim": 3}],
        },
    ],
)
def test_every_law_is_built(law: dict[str, object]) -> None:
    measure = law_adapter.validate_python(law).build(torch.float64, "cpu")
    assert measure.dim in (2, 3)
    for kind in ("identity", "random"):
        head = HeadSpec(kind=kind, horizon=1.7).build(measure)  # type: ignore[arg-type]
        assert head.horizon(measure) == pytest.approx(1.7)
    assert HeadSpec(scale=3.0).build(measure).A[0, 0] == 3.0


@pytest.mark.parametrize(
    "law",
    [
        {"law": "gauss", "dim": 3},
        {"law": "gaussian"},
        {"law": "gaussian", "dim": 0},
        {"law": "gaussian", "dim": 3, "spectrum": [1.0, 1.0, 1.0]},
        {"law": "sphere", "dim": 3, "radius": -1.0},
        {"law": "sphere", "dim": 3, "radios": 1.0},
    ],
)
def test_bad_laws(law: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        law_adapter.validate_python(law)


def test_horizon_and_scale_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="one of the two"):
        HeadSpec(horizon=1.0, scale=1.0)

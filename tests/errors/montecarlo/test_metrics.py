"""The table of metrics: each states what it is, and one from outside the package, in one file, is
asked for like the others.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import esscher as es
from esscher.errors.montecarlo.converge import METRICS, register
from tests.cli.commands import run

OUTSIDE = '''
from esscher.attention.finite import attend
from esscher.attention.limit import limit
from esscher.errors.montecarlo.converge import Metric, register


class Worst(Metric):
    """max over the queries of |Gamma_n(x) - Gamma(x)|."""

    name = "worst"

    def error(self, draw):
        head, x, y = draw.plan.head, draw.queries, draw.tokens.double()
        target = limit(head, draw.plan.measure)(x)
        q, k, v = head.queries(x), head.keys(y), head.values(y)
        errors = [attend(q, k[:n], v[:n], 1.0) - target for n in draw.ladder]
        squared = [float(error.square().sum(1).max()) for error in errors]
        return np.array(squared), float(target.square().sum(1).max())

    def exponents(self, head, measure):
        return {"sharp": 0.25}


register(Worst())
'''

EXPERIMENT = """
job: converge
title: outside
law: {law: sphere, dim: 3}
head: {kind: identity}
n: 20,50,120
repeats: 24
metrics: [l2, worst]
queries: 5
"""


@pytest.fixture
def worst(tmp_path: Path) -> Iterator[None]:
    file = tmp_path / "worst.py"
    file.write_text("import numpy as np\n" + OUTSIDE)
    spec = importlib.util.spec_from_file_location("worst", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    del METRICS["worst"]


@pytest.mark.usefixtures("worst")
def test_a_metric_from_outside_in_python() -> None:
    head, law = es.Head(torch.eye(3).double(), torch.eye(3).double()), es.Sphere(3)
    x = law.sample(4, torch.Generator().manual_seed(5))
    double = torch.float64
    both = es.converge(head, law, [7, 19], 3, ("l2", "worst"), queries=x, dtype=double)
    each = [
        es.converge(head, law, [7, 19], 3, "l2", queries=row[None], dtype=double)["l2"].samples
        for row in x
    ]
    assert list(both) == ["l2", "worst"]
    assert both["worst"].samples == pytest.approx(np.max(each, axis=0), rel=1e-9)
    assert both["l2"].samples == pytest.approx(np.mean(each, axis=0), rel=1e-9)
    assert "4 given queries; limit: exact" in both["worst"].origin
    with pytest.raises(ValueError, match="metrics: l2, worst compare with attention's limit"):
        es.converge(head, es.Student(3, 5.0), [7, 19], 3, ("l2", "worst"))


@pytest.mark.usefixtures("worst")
def test_a_metric_from_outside_in_a_yaml_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "outside.yaml", tmp_path / "run"
    file.write_text(EXPERIMENT)
    code, text, _ = run(["converge", str(file), "--out", str(out), "--json"], capsys)
    assert code == 0
    rates = {row["metric"]: row for row in json.loads(text)["rates"]}
    assert set(rates) == {"l2", "worst"}
    assert rates["worst"]["status"] == "ok"
    assert rates["worst"]["low"] < 0.5 < rates["worst"]["high"]
    assert rates["worst"]["sharp"] == 0.25
    curves = es.load_run(out).table("curves").pivot_table(index="n", columns="metric", values="rms")
    assert (curves["worst"] > curves["l2"]).all()
    assert {row["metric"] for row in json.loads(run(["fit", str(out), "--json"], capsys)[1])} == {
        "l2",
        "worst",
    }


def test_an_unknown_metric_is_refused_by_name() -> None:
    head, law = es.Head(torch.eye(3).double(), torch.eye(3).double()), es.Sphere(3)
    with pytest.raises(
        ValueError, match=r"metrics: expected some of mean, cov, l2, .*, each once, got 'worst'"
    ):
        es.converge(head, law, [7, 19], 3, "worst")


def test_a_name_is_given_once() -> None:
    register(METRICS["l2"])

    class Other(type(METRICS["l2"])):  # type: ignore[misc]
        pass

    with pytest.raises(ValueError, match="metric l2: already registered"):
        register(Other())
    with pytest.raises(ValueError, match="metric: expected"):
        register(type(METRICS["l2"]))


def test_hardmax_says_whose_queries_it_takes() -> None:
    """On the line only Gaussian tokens ask themselves; a bounded law there has queries as
    elsewhere.
    """
    head = es.Head([[1.0]], [[1.0]])
    line = es.converge(head, es.Gaussian([[1.0]]), [7, 19], 3, "hardmax")["hardmax"]
    bounded = es.converge(head, es.Cube(1), [7, 19], 3, "hardmax", queries=5)["hardmax"]
    assert "queries are the tokens" in line.origin
    assert "5 fresh queries of the law a repeat; limit" in bounded.origin
    inside = es.converge(head, es.Cube(1), [7, 19], 3, "hardmax", queries=5, query_inside=True)[
        "hardmax"
    ]
    assert np.array_equal(inside.samples, bounded.samples)
    assert inside.origin == bounded.origin


@pytest.mark.parametrize("metric", ["l2", "mean", "cov"])
def test_the_sharp_exponent_is_said_of_centred_gaussian_tokens_alone(metric: str) -> None:
    head = es.Head(torch.eye(2), torch.eye(2))
    said = {
        "gaussian": METRICS[metric].exponents(head, es.Gaussian(torch.eye(2))),
        "ball": METRICS[metric].exponents(head, es.Ball(2)),
        "shifted": METRICS[metric].exponents(head, es.Gaussian(torch.eye(2), [1.0, 0.0])),
    }
    assert [name for name, exponents in said.items() if "sharp" in exponents] == ["gaussian"]

"""One contract for all public functions: the same numbers give the same answer however they come.

Contiguous, transposed, strided, sliced, expanded; with or without a gradient; tensor, array or
list; in four dtypes. The numbers have at most 8 binary digits, so every dtype holds them exactly
and float64's answer is everyone's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import esscher as es

Inputs = dict[str, Any]


def randn(*shape: int, seed: int) -> torch.Tensor:
    numbers = 0.5 * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return (numbers * 64).round() / 64


def covariance(dim: int) -> torch.Tensor:
    return torch.eye(dim, dtype=torch.float64) + 0.25 * torch.ones(dim, dim, dtype=torch.float64)


QKV = {"q": randn(12, 16, seed=1), "k": randn(12, 16, seed=2), "v": randn(12, 3, seed=3)}
WIDE = QKV | {"v": randn(12, 16, seed=3)}  # no padding: the kernel sees the tensors themselves
MAPS = {
    "A": randn(4, 4, seed=4),
    "V": randn(3, 4, seed=5),
    "a0": randn(4, seed=6),
    "v0": randn(3, seed=7),
}
LAW = {"cov": covariance(4), "mean": randn(4, seed=8)}
QUERIES = {"x": randn(5, 4, seed=9)}
THETA = {"theta": 0.25 * randn(5, 4, seed=10)}
TOKENS = {"tokens": randn(9, 4, seed=11), "weights": torch.arange(1.0, 10.0, dtype=torch.float64)}
N = {"n": torch.tensor([1.0, 4.0, 16.0, 64.0], dtype=torch.float64)}


def head(i: Inputs) -> es.Head:
    return es.Head(i["A"], i["V"], i["a0"], i["v0"])


def gaussian(i: Inputs) -> es.Gaussian:
    return es.Gaussian(i["cov"], i["mean"])


def of_head(i: Inputs) -> list[Any]:
    h, law = head(i), gaussian(i)
    from_weights = es.Head.from_weights(i["A"], i["A"], i["V"], i["a0"], i["a0"], i["v0"])
    maps = [
        f(i["x"])
        for g in (h, from_weights, h.scaled(2.0))
        for f in (g.tilt, g.queries, g.keys, g.values)
    ]
    return [
        *maps,
        h.A,
        h.tilt_bias,
        from_weights.A,
        h.horizon(law),
        h.horizon(law, sided=1),
        h.coupling(law),
    ]


def of_law(make: Callable[[Inputs], es.Measure], bounded: bool) -> Callable[[Inputs], list[Any]]:
    def answers(i: Inputs) -> list[Any]:
        law, theta = make(i), i["theta"]
        out = [
            law.log_laplace(theta),
            law.tilted_mean(theta),
            law.tilted_cov(theta),
            law.mean,
            law.cov,
            law.reach,
        ]
        return [*out, law.extreme(theta)] if bounded else out

    return answers


def of_student(i: Inputs) -> list[Any]:
    law = es.Student(4, i["numbers"][0], i["numbers"][1])
    return [
        law.log_laplace(i["zero"]),
        law.tilted_mean(i["zero"]),
        law.tilted_cov(i["zero"]),
        law.cov,
    ]


def of_curve(curve: es.ErrorCurve) -> list[Any]:
    return [curve.rms, curve.slope, curve.effective_tokens, curve.scale]


def pool_curve(i: Inputs, n: Any = None) -> es.ErrorCurve:
    return es.exact_pool_curve(i["q"], i["k"], i["v"], i["n"] if n is None else n)


def of_prefixes(i: Inputs) -> list[Any]:
    return [
        part
        for moments in es.attend_prefixes(i["q"], i["k"], i["v"], i["sizes"])
        for part in moments
    ]


def of_region(i: Inputs) -> list[Any]:
    region = es.confidence_region(i["q"], i["k"], i["v"])
    return [
        region.center,
        region.cov,
        region.effective_tokens,
        region.contains(region.center).double(),
    ]


def of_known(known: Callable[[Inputs], Any]) -> Callable[[Inputs], list[Any]]:
    def answers(i: Inputs) -> list[Any]:
        region = es.confidence_region(i["q"], i["k"], i["v"], known=known(i))
        return [region.center, region.shape, region.radius]

    return answers


def of_predictions(i: Inputs) -> list[Any]:
    found = es.predictions(head(i), gaussian(i))
    return [list(p.numbers.values()) for p in found] + [
        p.exponent for p in found if p.exponent is not None
    ]


def of_mixture(i: Inputs) -> es.Measure:
    return es.Mixture(i["numbers"], [gaussian(i), es.Gaussian(i["cov"])])


NUMBERS = {"numbers": torch.tensor([4.0, 1.5], dtype=torch.float64)}
ZERO = {"zero": torch.zeros(2, 4, dtype=torch.float64)}
SIZES = {"sizes": torch.tensor([3.0, 12.0], dtype=torch.float64)}


@dataclass(frozen=True)
class Case:
    name: str  # of the public function or class it is about
    inputs: Inputs
    call: Callable[[Inputs], Any]
    float32: float = 2e-5  # relative to the largest entry of each answer


HEAD = MAPS | LAW | QUERIES
CASES = [
    Case("Head", HEAD, of_head),
    Case("attend", WIDE, lambda i: es.attend(i["q"], i["k"], i["v"])),
    *(
        Case(
            "attend",
            given,
            lambda i, rule=rule: es.attend(
                i["q"], i["k"], i["v"], keep=rule, positions=np.arange(12)
            ),
        )
        for given in (QKV, WIDE)
        for rule in (
            "window:3",
            "sinks:1+recent:2",
            "strided:3+window:1",
            "topk:4",
            "heavy:3+recent:1",
        )
    ),
    Case("attend_hardmax", QKV, lambda i: es.attend_hardmax(i["q"], i["k"], i["v"])),
    Case("attend_linear", QKV, lambda i: es.attend_linear(i["q"], i["k"], i["v"])),
    Case("attend_prefixes", WIDE | SIZES, of_prefixes),
    Case(
        "limit",
        HEAD,
        lambda i: [
            es.limit(head(i), gaussian(i))(i["x"]),
            *es.limit(head(i), gaussian(i)).pushforward(),
        ],
    ),
    Case(
        "linear_limit",
        HEAD,
        lambda i: [
            es.linear_limit(head(i), gaussian(i))(i["x"]),
            *es.linear_limit(head(i), gaussian(i)).pushforward(),
        ],
    ),
    Case("hardmax_limit", HEAD, lambda i: es.hardmax_limit(head(i), es.Sphere(4))(i["x"])),
    Case(
        "horizon_of_covariances",
        LAW | NUMBERS,
        lambda i: es.horizon_of_covariances(i["cov"], i["cov"], i["numbers"][1]),
    ),
    Case("confidence_region", QKV, of_region),
    Case(
        "Bounds",
        QKV | NUMBERS,
        of_known(lambda i: es.Bounds(9.0 * i["numbers"][1], i["numbers"][0] * 9.0, i["v"][0])),
    ),
    Case("delta_covariance", HEAD, lambda i: es.delta_covariance(head(i), gaussian(i), i["x"])),
    Case(
        "exact_curve",
        HEAD | N,
        lambda i: of_curve(es.exact_curve(head(i), gaussian(i), i["x"], i["n"])),
    ),
    Case(
        "exact_curve",
        HEAD | N,
        lambda i: of_curve(es.exact_curve(head(i), es.Sphere(4), i["x"], i["n"])),
    ),
    Case(
        "exact_curve",
        HEAD | N | TOKENS,
        lambda i: of_curve(es.exact_curve(head(i), es.Pool(i["tokens"]), i["x"], i["n"])),
    ),
    Case(
        "exact_curve",
        HEAD | N,
        lambda i: (
            es.exact_curve(
                head(i), gaussian(i), i["x"][:1], i["n"][1:2], keep="topk", context=64
            ).rms
        ),
    ),
    Case(
        "exact_curve",
        HEAD | N,
        lambda i: of_curve(es.exact_curve(head(i), gaussian(i), i["x"][:1], i["n"], keep="neyman")),
    ),
    Case("exact_pool_curve", QKV | N, lambda i: of_curve(pool_curve(i)), 1e-4),
    Case(
        "exact_pool_curve",
        QKV,
        lambda i: es.exact_pool_curve(i["q"], i["k"], i["v"], keep="sinks:2+random:0.5").rms,
        1e-4,
    ),
    Case(
        "converge",
        MAPS | LAW,
        lambda i: (
            es.converge(head(i), gaussian(i), [4, 8], 3, metrics=["l2"], dtype=torch.float64)[
                "l2"
            ].rms
        ),
    ),
    Case(
        "fit_rate",
        QKV | N,
        lambda i: es.fit_rate(pool_curve(i), raise_on_failure=False).exponent,
        1e-4,
    ),
    Case(
        "tokens_needed",
        QKV | N | NUMBERS,
        lambda i: es.tokens_needed(pool_curve(i), 0.2 * i["numbers"][0]),
        0.1,
    ),
    Case("Gaussian", LAW | THETA, of_law(gaussian, False)),
    Case("Mixture", LAW | THETA | NUMBERS, of_law(of_mixture, False)),
    Case("Pool", TOKENS | THETA, of_law(lambda i: es.Pool(i["tokens"]), True)),
    Case("Sphere", THETA | NUMBERS, of_law(lambda i: es.Sphere(4, i["numbers"][1]), True)),
    Case("Ball", THETA | NUMBERS, of_law(lambda i: es.Ball(4, i["numbers"][1]), True)),
    Case("Cube", THETA | NUMBERS, of_law(lambda i: es.Cube(4, i["numbers"][1]), True)),
    Case("Rademacher", THETA | NUMBERS, of_law(lambda i: es.Rademacher(4, i["numbers"][1]), True)),
    Case("Laplace", THETA | NUMBERS, of_law(lambda i: es.Laplace(4, i["numbers"][1]), False)),
    Case("Student", ZERO | NUMBERS, of_student),
    Case(
        "gaussian_error",
        N,
        lambda i: [as_double(part) for part in es.gaussian_error(detached(i["n"]), i["n"])],
    ),
    Case("predictions", MAPS | LAW, of_predictions),
]

ELSEWHERE = {  # public names that take no numbers of the user's
    **dict.fromkeys(
        [
            "ConfidenceRegion",
            "ErrorCurve",
            "FitError",
            "RateFit",
            "Prediction",
            "Run",
        ],
        "a result, made by the functions above",
    ),
    "Measure": "abstract; every law is in the table",
    "capture": "takes a model; tests/hf/test_capture.py",
    "describe": "takes a model; tests/cli/test_describe.py",
    "budget": "takes a run; tests/cli/test_budget.py",
    "compress": "takes a model and token ids; tests/compress/test_cache.py",
    "probe": "takes a model and texts; tests/models",
    "icl": "a part with functions of its own; tests/icl",
    "keep": "a part with rules of its own; tests/keep",
    "load_run": "takes a path; tests/runs/test_reading.py",
}


def detached(value: Any) -> Any:
    """Counts have no gradient; a list or array has none anyway."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def as_double(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().double()
    return torch.as_tensor(np.asarray(value, dtype=np.float64))


def answers(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [part for item in value for part in answers(item)]
    return [as_double(value)]


def compare(found: Any, expected: Any, tolerance: float) -> None:
    found, expected = answers(found), answers(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        finite = b[b.isfinite()].abs()
        size = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def each(inputs: Inputs, change: Callable[[torch.Tensor], Any]) -> Inputs:
    return {name: change(value) for name, value in inputs.items()}


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else x


def foreign(x: torch.Tensor) -> np.ndarray:
    array = x.numpy().astype(">f8")
    array.setflags(write=False)
    return array


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": transposed,
    "strided": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "strided rows": lambda x: x.repeat_interleave(3, dim=0)[::3],
    "sliced": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "requires grad": lambda x: x.clone().requires_grad_(True),
    "transposed, requires grad": lambda x: transposed(x.clone().requires_grad_(True)),
    "list": lambda x: x.tolist(),
    "tuple": lambda x: tuple(x.tolist()),
    "list of tensors": lambda x: list(x),
    "list of arrays": lambda x: list(x.numpy()),
    "array": lambda x: x.numpy(),
    "column-major array": lambda x: np.asfortranarray(x.numpy()),
    "array read backwards": lambda x: x.numpy()[..., ::-1].copy()[..., ::-1],
    "read-only array of foreign byte order": foreign,
    "wider array": lambda x: x.numpy().astype(np.longdouble),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


@pytest.fixture(autouse=True)
def every_warning() -> Iterator[None]:
    """Torch says some things once in a process; here each case must hear them, as errors."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.fixture(params=CASES, ids=[f"{case.name}-{number}" for number, case in enumerate(CASES)])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_every_public_name_is_in_the_table() -> None:
    assert {case.name for case in CASES} | set(ELSEWHERE) == set(es.__all__)
    assert not {case.name for case in CASES} & set(ELSEWHERE)


def test_every_kind_of_input_has_one_answer(case: Case) -> None:
    expected = case.call(case.inputs)
    for kind, change in KINDS.items():
        try:
            found = case.call(each(case.inputs, change))
        except Exception as cause:
            raise AssertionError(f"{case.name} of {kind}") from cause
        compare(found, expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_has_the_answer_of_float64(case: Case, dtype: torch.dtype) -> None:
    expected = case.call(case.inputs)
    tolerance = max(TOLERANCE[dtype], case.float32)
    compare(case.call(each(case.inputs, lambda x: x.to(dtype))), expected, tolerance)
    compare(
        case.call(each(case.inputs, lambda x: transposed(x.to(dtype)).requires_grad_(False))),
        expected,
        tolerance,
    )
    if dtype != torch.bfloat16:
        compare(
            case.call(each(case.inputs, lambda x: np.asfortranarray(x.to(dtype).numpy()))),
            expected,
            tolerance,
        )


def test_expanded_inputs_have_the_answer_of_their_copies(case: Case) -> None:
    """One row for all: memory of stride zero. Covariances and counts stay as they are."""

    def repeated(name: str, x: torch.Tensor) -> torch.Tensor:
        return (
            x[:1].expand_as(x)
            if name in ("q", "k", "v", "x", "tokens", "theta", "A", "V", "weights")
            else x
        )

    lazy = {name: repeated(name, x) for name, x in case.inputs.items()}
    try:
        expected = case.call(each(lazy, lambda x: x.clone(memory_format=torch.contiguous_format)))
    except ValueError as refusal:  # no error to fit where all values are one
        words = str(refusal)
        with pytest.raises(ValueError, match=words[:8]):
            case.call(lazy)
        return
    compare(case.call(lazy), expected, 1e-9)

"""attend(..., keep=rule) equals dense attention under the mask that the rule gives, and never has
all pairs open.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import esscher as es
from esscher.attention import finite
from esscher.keep import rule as blocks
from esscher.keep.rule import Chance
from tests.keep.table import RULES, Given

KEYS = 67
MORE = (
    ("strided:4+window:3", False),
    ("strided:3+strided:5+sinks:2", False),
    ("strided:9+recent", True),
    ("global:0,50,3+recent:6+sinks:3", False),
    ("heavy:4+recent:3+sinks:1", False),
    ("strided:7+keynorm:4", False),
    ("keynorm+heavy:2+window:1", True),
    ("recent+neyman:6:shared", True),
    ("sinks:1+recent:2+neyman:shared", True),
    ("topk:3+heavy:3+strided:9", False),
    ("recent:1+random:reweight", True),
    ("recent:1+neyman:5+random:0.2:reweight", False),
    ("topk:2+neyman:4:shared", False),
    ("window:1+random:0.5", False),
    ("window:1000000000000", False),
    ("strided:1000000000000+recent:2", False),
)


def tensors(
    rows: int = KEYS, width: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(size, width, generator=generator, dtype=torch.float64)
        for size in (rows, KEYS, KEYS)
    )
    return [x.to(dtype) for x in (2 * q, k, v[:, :3])]


PLACES: dict[str, Any] = {
    "at the end": (11, None),
    "one each": (KEYS, torch.arange(KEYS)),
    "anywhere": (9, [66, 3, 3, 17, 40, 40, 66, 12, 9]),
    "backwards": (KEYS, torch.arange(KEYS - 1, -1, -1)),
}


def dense(text: str, n: int | None, q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
    """Softmax over the mask and weights of the whole context, with the draw that the docstring of
    attend describes.
    """
    context = es.keep.Context.of(q, k, v, None, options.get("positions"))
    rule = es.keep.parse(text)
    kept = rule.include(context, n)
    chances = [part for part in rule.parts if isinstance(part, Chance)]
    mask = kept.sure
    if chances:
        shape = (KEYS,) if all(part.shared for part in chances) else tuple(kept.probability.shape)
        mask = (
            torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            < kept.probability
        )
    scores = context.scores if kept.weight is None else context.scores + kept.weight.log()
    return scores.masked_fill(~mask, -torch.inf).softmax(1) @ v.double()


@pytest.fixture(params=["one block", "many blocks"])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many blocks":
        monkeypatch.setattr(finite, "PAIRS", 5 * KEYS)
        monkeypatch.setattr(blocks, "PAIRS", 5 * KEYS)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("text", "is_open"), [*RULES, *MORE])
def test_every_rule_equals_masked_dense(text: str, is_open: bool, places: str) -> None:
    rows, positions = PLACES[places]
    n = 11 if is_open else None
    single = [(torch.float32, 1e-5)] if places == "one each" else []
    for dtype, tolerance in ((torch.float64, 1e-12), *single):
        q, k, v = tensors(rows, dtype=dtype)
        expected = dense(text, n, q, k, v, positions=positions)
        blind = int(expected.isnan().any(1).sum())
        options = {
            "keep": text,
            "n": n,
            "positions": positions,
            "generator": torch.Generator().manual_seed(5),
        }
        if blind:
            with pytest.raises(ValueError, match=rf"keep: {blind} of {rows} queries keep no key"):
                es.attend(q, k, v, **options)
        else:
            found = es.attend(q, k, v, **options)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(
    "text", ["window:5", "sinks:2+recent:4", "strided:4", "topk:5", "heavy:5", "window:1+topk:4"]
)
def test_a_mask_says_what_queries_see(text: str) -> None:
    q, k, v = tensors()
    mask = torch.rand(KEYS, KEYS, generator=torch.Generator().manual_seed(1)) < 0.7
    mask |= torch.eye(KEYS, dtype=torch.bool)
    places = torch.arange(KEYS)
    context = es.keep.Context(q, k, v, 5**-0.5, places, mask)
    expected = (
        context.scores.masked_fill(~es.keep.parse(text).include(context).sure, -torch.inf).softmax(
            1
        )
        @ v
    )
    torch.testing.assert_close(
        es.attend(q, k, v, None, mask, keep=text, positions=places),
        expected,
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    "text", ["window:5", "topk:5", "heavy:4+recent:3", "recent:2+random:0.3:reweight"]
)
def test_heads_of_leading_axes_decide_by_themselves(text: str) -> None:
    q, k, v = (
        torch.stack([torch.stack([a, b]), torch.stack([b, a])])
        for a, b in zip(tensors(), tensors(seed=1), strict=True)
    )
    places = torch.arange(KEYS)
    found = es.attend(
        q, k, v, keep=text, positions=places, generator=torch.Generator().manual_seed(2)
    )
    generator = torch.Generator().manual_seed(2)
    for i in range(2):
        for j in range(2):
            one = es.attend(
                q[i, j], k[i, j], v[i, j], keep=text, positions=places, generator=generator
            )
            torch.testing.assert_close(found[i, j], one, rtol=0, atol=0)


@pytest.mark.parametrize(
    "text",
    [
        "window:9",
        "sinks:2+recent:8",
        "strided:4+window:3",
        "topk:6",
        "recent:1+random:0.3:reweight",
    ],
)
def test_gradients_are_those_of_masked_dense(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "PAIRS", 16 * KEYS)
    places = torch.arange(KEYS)
    found, expected = (tuple(x.clone().requires_grad_(True) for x in tensors()) for _ in range(2))
    es.attend(
        *found, keep=text, positions=places, generator=torch.Generator().manual_seed(5)
    ).square().sum().backward()
    q, k, v = expected
    kept = es.keep.parse(text).include(es.keep.Context.of(q, k, v, None, places))
    drawn = torch.rand(KEYS, KEYS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scores = q @ k.T * 5**-0.5 + (0.0 if kept.weight is None else kept.weight.log())
    mask = drawn < kept.probability
    (scores.masked_fill(~mask, -torch.inf).softmax(1) @ v).square().sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_half_precision_and_a_rule_that_keeps_all() -> None:
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        q, k, v = tensors(dtype=dtype)
        found = es.attend(q, k, v, keep="window:8", positions=torch.arange(KEYS))
        assert found.dtype == dtype
        expected = dense(
            "window:8", None, *(x.double() for x in (q, k, v)), positions=torch.arange(KEYS)
        )
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    q, k, v = tensors()
    for text in (
        f"recent:{KEYS}",
        f"sinks:{KEYS}",
        f"topk:{KEYS}",
        f"heavy:{KEYS}",
        "random:1",
        "strided:1",
    ):
        whole = es.attend(q, k, v, keep=text, generator=torch.Generator())
        torch.testing.assert_close(whole, es.attend(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "recent:1+random:0.3",
        "recent:1+neyman:20",
        "recent:1+neyman:20:shared",
    ],
)
def test_keys_are_drawn_as_often_as_the_rule_says(text: str) -> None:
    """Values are one-hot and scores equal: outputs show the keys. 300 draws; 5 standard errors,
    2e-4 over 4 x 67 keys.
    """
    generator = torch.Generator().manual_seed(3)
    q, k, _ = tensors(4)
    v = torch.eye(KEYS, dtype=torch.float64)
    p = es.keep.parse(text).include(es.keep.Context.of(q, k, v, 1e-3)).probability
    draws, hits, together = 300, torch.zeros_like(p), True
    for _ in range(draws):
        kept = es.attend(q, k, v, 1e-3, keep=text, generator=generator) > 0
        hits += kept
        together &= bool((kept == kept[0]).all())
    assert together == ("shared" in text), "shared: one set of keys for all queries"
    assert bool(((hits / draws - p).abs() <= 5 * (p * (1 - p) / draws).sqrt() + 1e-9).all())


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made by torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(
                    self.numbers, x.untyped_storage().nbytes() // max(1, x.element_size())
                )
        return result


@pytest.mark.parametrize("text", ["window:60", "sinks:4+recent:60", "topk:8", "keynorm:64"])
def test_what_each_query_decides_is_streamed(text: str) -> None:
    size = 2048
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, 8, generator=generator) for _ in range(3))
    with Largest() as largest:
        es.attend(q, k, v, keep=text, positions=torch.arange(size))
    assert largest.numbers <= blocks.PAIRS < size**2 / 4


BAD = (
    ({"keep": "sinks:1+recent"}, r"expects n: recent has no number of its own; got none"),
    ({"keep": "recent:3", "n": 4}, r"every number of the rule is given; got 4"),
    (
        {"keep": "sinks:9+recent", "n": 4},
        r"n: sinks:9\+recent keeps 9 keys surely; expected at least as many, got 4",
    ),
    ({"keep": "sinks:9+random", "n": 4, "generator": torch.Generator()}, r"keeps 9 keys surely"),
    ({"keep": "recent", "n": 68}, r"n: expected 1 to 67 keys, got 68"),
    ({"keep": "recent", "n": 0}, r"n: expected whole numbers from 1"),
    ({"keep": "recent:68"}, r"recent: expected at most 67, the number of keys, got 68"),
    ({"keep": "global:67"}, r"queries keep no key"),
    ({"keep": "window:0"}, r"window: expected a whole number of at least 1, got 0"),
    ({"keep": "nearest:3"}, r"keep: no rule 'nearest' in 'nearest:3'; esscher rules"),
    ({"keep": "lowrank:3"}, r"lowrank: it mixes all keys and keeps none"),
    ({"keep": 3}, r"keep: expected a rule such as sinks:4\+recent:256, got 3"),
    (
        {"keep": "random:0.1"},
        r"generator: random keeps keys by chance; expected a torch.Generator, got None",
    ),
    ({"keep": "random:0.1", "generator": 3}, r"expected a torch.Generator, got 3"),
    ({"keep": "window:1", "positions": [0, 1]}, r"positions: expected 67 whole numbers"),
    ({"keep": "global:5", "positions": list(range(67))}, r"keep: 5 of 67 queries keep no key"),
    (
        {"positions": list(range(67))},
        r"positions: matters to a rule that keeps keys; give keep too",
    ),
    ({"n": 4}, r"n: matters to a rule"),
    ({"generator": torch.Generator()}, r"generator: matters to a rule"),
)


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        es.attend(*tensors(), **options)
    assert "\n" not in str(refused.value)


def test_given_probabilities_of_each_query() -> None:
    q, k, v = tensors(9)
    p = torch.rand(9, KEYS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = es.attend(q, k, v, keep=Given(p), generator=torch.Generator().manual_seed(5))
    mask = torch.rand(9, KEYS, generator=torch.Generator().manual_seed(5), dtype=torch.float64) < p
    scores = (q @ k.T / math.sqrt(5) - p.log()).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(found, scores.softmax(1) @ v, rtol=1e-12, atol=1e-12)

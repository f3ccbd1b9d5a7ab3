"""Every path on a device that is not the CPU: the numbers of the CPU, and nothing leaves the device
but what is named here. tests/accelerator.py has no kernels of its own, so that this shows where
tensors are, not how fast a GPU is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map

import esscher as es
from esscher.hf.gradients import drawn_gradients, fisher_metric
from esscher.hf.interventions import prefill
from esscher.icl import UV, LinearTask, default_weights
from esscher.icl.specs import TrainSpec
from esscher.icl.training import sampled_risk, train
from tests.accelerator import Watch, place
from tests.models.probe_runs import few_texts, tiny_model

Numbers = dict[str, Any]
Place = Callable[[Any], Any]
Work = Callable[[Place, Path], Numbers]
# What leaves the device by the function that reads it, where it is more than FEW numbers at once or
# numbers read OFTEN.
FEW, OFTEN = 64, 1000
RESULT = "of each query and size: a curve is of numpy"
NAMED = {
    "errors/exact.py:_over_rows": RESULT,
    "errors/exact.py:_two_directions": RESULT,
    "errors/integral.py:as_numpy": RESULT,
    "errors/keep_curve.py:<genexpr>": RESULT,
    "errors/keep_curve.py:_ranked": "the metric of each head",
    "errors/keep_curve.py:curve": RESULT,
    "errors/keep_curve.py:low_rank_curve": RESULT,
    "errors/keep_curve.py:ranked_errors": RESULT,
    "errors/integral.py:negligible": "whether an integral ends here",
    "errors/scatter.py:spline_coefficients": "kernels: the same for all data, remembered",
    "hf/loading.py:wrap_model": "weights are hashed",
    "icl/training.py:evaluate": "squared errors of prompts",
    "inputs.py:is_finite": "whether inputs are finite",
    "measures/matrices.py:<genexpr>": "whether inputs are in range",
    "probe/statistics/frontier.py:kept_first": "which keys each rule keeps, for the page",
    "probe/session.py:grams": "W_q W_q' of each head, once",
    "probe/measure.py:_tree": "the state of a unit, for the store",
    "tails/extremes.py:<genexpr>": "largest numbers of a head, fitted by scipy",
    "tails/scores.py:finish": "largest scores of each query, fitted by scipy",
    "tails/scores.py:score_statistics": "cells of scores of each query, fitted by scipy",
}


def rows(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(size, 8, generator=generator).to(dtype) for size in sizes]


def curve_numbers(curve: es.ErrorCurve) -> Numbers:
    found = {"rms": curve.rms, "effective": curve.effective_tokens}
    if curve.queries is not None:
        found |= {
            "mse": curve.queries.mse,
            "limit": curve.queries.limit,
            "bias": curve.queries.bias,
        }
    return {name: x for name, x in found.items() if x is not None}


def attend(put: Place, out: Path) -> Numbers:
    q, k, v = put(rows(7, 900, 900))
    mask = put(torch.rand(7, 900, generator=torch.Generator().manual_seed(1)) < 0.7)
    sizes = [10, 300, 900]
    return {
        "plain": es.attend(q, k, v),
        "masked": es.attend(q, k, v, mask=mask),
        "half": es.attend(q.bfloat16(), k.bfloat16(), v.bfloat16()),
        "large": es.attend(2000 * q, k, v),
        "prefixes": es.attend_prefixes(k, k, v, sizes),
        "hardmax": es.attend_hardmax(q, k, v),
        "linear": es.attend_linear(q, k, v),
        **{
            rule: es.attend(q, k, v, keep=rule, generator=torch.Generator().manual_seed(2))
            for rule in ("sinks:4+recent:16", "heavy:40", "topk:9+random:0.1:reweight")
        },
    }


def pool_curve(put: Place, out: Path) -> Numbers:
    found = {}
    for dtype in (torch.float32, torch.float64):
        q, k, v = put(rows(24, 1200, 1200, dtype=dtype))
        for sampling in ("replacement", "bernoulli"):
            curve = es.exact_pool_curve(q, k, v, [1, 30, 1200], sampling, details=True)
            found[f"{dtype} {sampling}"] = curve_numbers(curve)
    few = es.exact_pool_curve(q[:3], 300 * k, v, [1, 30], details=True)  # key by key, and wide
    return found | {"few": curve_numbers(few)}


RULES = ("random", "neyman", "neyman:shared", "sinks:4+random", "topk", "sinks:2+heavy", "recent")


def kept_curve(put: Place, out: Path) -> Numbers:
    q, k, v = put(rows(20, 700, 700))
    earlier = put(rows(9))[0]
    found = {}
    for rule in (*RULES, "impact", "expected", "lowrank", "random:0.2:reweight"):
        n = None if rule.startswith("random:") else [8, 60]
        positions = None if rule == "lowrank" else np.arange(680, 700)
        by = earlier if rule in ("neyman:shared", "sinks:2+heavy", "impact") else None
        curve = es.exact_pool_curve(
            q, k, v, n, keep=rule, positions=positions, chosen_by=by, details=rule != "lowrank"
        )
        found[rule] = curve_numbers(curve)
    return found


def exact_curve(put: Place, out: Path) -> Numbers:
    """Of laws of every kind, and of keep rules on one."""
    cov = torch.diag(torch.linspace(0.2, 1.0, 8, dtype=torch.float64))
    head = es.Head(*(put(0.4 * x) for x in rows(8, 5, dtype=torch.float64)))
    x = put(0.3 * rows(4, dtype=torch.float64)[0])
    tokens = put(rows(300, dtype=torch.float64)[0])
    gaussian = es.Gaussian(put(cov))
    ball = es.Ball(8, device=gaussian.device)
    laws = {
        "gaussian": gaussian,
        "sphere": es.Sphere(8, device=gaussian.device),
        "ball": ball,
        "cube": es.Cube(8, device=gaussian.device),
        "rademacher": es.Rademacher(8, device=gaussian.device),
        "laplace": es.Laplace(8, 0.1, device=gaussian.device),
        "mixture": es.Mixture([0.3, 0.7], [gaussian, ball]),
        "pool": es.Pool(tokens),
    }
    found: Numbers = {}
    for name, law in laws.items():
        curve = es.exact_curve(head, law, x, [1, 20, 1000], details=True, pool_size=128)
        found[name] = curve_numbers(curve)
    found["law of queries"] = es.exact_curve(head, gaussian, gaussian, [1, 20]).rms
    for rule in ("random", "neyman"):
        found[rule] = es.exact_curve(head, gaussian, x, [5, 50], keep=rule).rms
    kept = es.exact_curve(head, gaussian, x, [5], keep="sinks:1+heavy", context=20)
    return found | {"kept": kept.rms}


def converge(put: Place, out: Path) -> Numbers:
    law = es.Gaussian(put(torch.diag(torch.linspace(0.2, 1.0, 8, dtype=torch.float64))))
    head = es.Head(*(put(0.3 * x) for x in rows(8, 8)))
    found = {}
    for sampling, metrics in (("nested", ("mean", "cov", "l2")), ("independent", "uniform")):
        curves = es.converge(head, law, [20], 2, metrics, sampling=sampling, seed=1)
        found[sampling] = {name: curve.rms for name, curve in curves.items()}
    return found


SMALL: dict[str, Any] = {
    "max_tokens": 130,
    "queries": 8,
    "kept_queries": 3,
    "layers": (1,),
    "window": 64,
    "n": "16,32,48",
}


def probe(name: str) -> Work:
    """Of a tiny model: the numbers of all tables."""

    def run(put: Place, out: Path) -> Numbers:
        model, words = tiny_model(name)
        model = model.to(put(torch.zeros(1)).device)
        made = es.probe(model, few_texts(), tokenizer=words, out=out, **SMALL)
        return {
            f"{table} {column}": values.to_numpy(float)
            for table in ("heads", "curves")
            for column, values in made.table(table).select_dtypes("number").items()
            if column != "output_difference"  # itself a rounding
        }

    return run


def gradients(put: Place, out: Path) -> Numbers:
    model, _ = tiny_model("llama")
    model = model.to(put(torch.zeros(1)).device)
    ids = put(torch.arange(40)[None] % 50)
    with torch.no_grad():
        held = prefill(model, ids[:, :30])
    drawn = drawn_gradients(held, ids[:, 30:], 3, torch.Generator().manual_seed(0))
    metric = fisher_metric(drawn)
    return {"metric": metric.of_layer, "stderr": metric.stderr}


def compress(put: Place, out: Path) -> Numbers:
    model, words = tiny_model("llama", max_position_embeddings=160)
    model = model.to(put(torch.zeros(1)).device)
    ids = put(torch.arange(60)[None] % 50)
    found = {}
    before = model.config._attn_implementation
    for rule in ("fisher+refit", "sinks:2+recent:2+heavy", "kvzip_plus"):
        cache = es.compress(model, ids, keep=0.5, rule=rule, tokenizer=words, observe=16, recent=4)
        found[rule] = {
            "kl": cache.compression.price.kl,
            "values": [x for layer in cache.layers for _, x in layer.held()],
        }
        with torch.no_grad():
            found[f"{rule} logits"] = model(input_ids=ids[:, :3], past_key_values=cache).logits
        model.set_attn_implementation(before)
    return found


def laboratory(put: Place, out: Path) -> Numbers:
    device = str(put(torch.zeros(1)).device)
    task = LinearTask.kms(3)
    spec = TrainSpec(steps=30, batch=16, rate=0.05, records=3, evaluation=64, device=device)
    tables = train(task, 6, spec.model_copy(update={"final_evaluation": 64}))
    weights = default_weights(3, torch.Generator().manual_seed(0))
    uv = UV(*(put(x) for x in (weights.uv().U, weights.uv().V)))
    generator = torch.Generator().manual_seed(5)
    return {
        "loss": tables["curve"]["loss"].to_numpy(),
        "mse": tables["final"]["mse"].to_numpy(),
        "Q": np.array(tables["final"]["Q"].tolist()),
        "risk": sampled_risk(task, uv, 6, prompts=200, generator=generator).value,
    }


PATHS: dict[str, tuple[Work, float]] = {
    "attend": (attend, 1e-5),
    "pool curve": (pool_curve, 1e-6),
    "kept curve": (kept_curve, 1e-4),
    "exact curve": (exact_curve, 1e-9),
    "converge": (converge, 1e-5),
    "probe of an encoder": (probe("bert"), 1e-4),
    "probe of a language model": (probe("llama"), 1e-4),
    "gradients": (gradients, 1e-4),
    "laboratory": (laboratory, 1e-8),
}


def numbers(x: Any) -> Any:
    return x.detach().cpu().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


@pytest.mark.parametrize("name", PATHS)
def test_the_numbers_of_the_cpu_and_nothing_leaves_unnamed(name: str, tmp_path: Path) -> None:
    path, accuracy = PATHS[name]
    expected = tree_map(numbers, path(lambda x: x, tmp_path / "cpu"))
    with Watch() as watch:
        found = path(place, tmp_path / "device")
        read = {where: (watch.most[where], watch.times[where]) for where in watch.most}
        found = tree_map(numbers, found)
    pairs = zip(tree_flatten_with_path(found)[0], tree_flatten_with_path(expected)[0], strict=True)
    for (key, one), (_, other) in pairs:
        size = np.nanmax(np.abs(other), initial=1e-300)
        np.testing.assert_allclose(one, other, rtol=0, atol=accuracy * size, err_msg=str(key))
    unnamed = {
        where: (most, times)
        for where, (most, times) in read.items()
        if where not in NAMED and (most > FEW or times > OFTEN)
    }
    assert not unnamed, f"numbers at once, and how many times: {unnamed}"

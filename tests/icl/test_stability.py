"""Flows of (O, V, K, Q): the population risk against the closed forms, the quadrature of the block
form, and differences; traps are critical points where flows get stuck; the run, the test between
the models, distances, and training beside them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from scipy.stats import binom

from esscher.icl import OVKQ, Block, LinearTask, default_weights, risk, risk_gradient
from esscher.icl.comparison import beside_training, spec_beside, trained_risks
from esscher.icl.specs import StabilitySpec, TrainSpec
from esscher.icl.stability import (
    ALL,
    PopulationRisk,
    Trap,
    Weights,
    apart,
    balance,
    chain,
    holm,
    pack,
    pair_flows,
    traps,
    unpack,
    verdict,
    weight_flow,
    weight_hessian,
    weights_of,
    whiten,
)
from esscher.runs import execute, find_job, resume

TASK = LinearTask.kms(3, 0.4, noise=0.2)


def weights(seed: int = 0, scale: float = 1.0) -> tuple[OVKQ, Weights]:
    drawn = default_weights(3, torch.Generator().manual_seed(seed))
    params = OVKQ(*(scale * part for part in (drawn.O, drawn.V, drawn.K, drawn.Q)))
    return params, weights_of(params)


@pytest.mark.parametrize("length", [3, 70, math.inf])
def test_linear_attention_has_the_closed_form_and_its_gradient(length: float | int):
    params, own = weights(1, 1.7)
    value, slope = risk_gradient(TASK, params, length, "linear")
    found, gradient = PopulationRisk(TASK, length, "linear")(own)
    assert found == pytest.approx(value, rel=1e-13)
    assert isinstance(slope, OVKQ)
    expected = weights_of(slope)
    for one, two in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-11, atol=1e-13)


def test_an_infinite_prompt_is_the_same_for_both():
    _, own = weights(2)
    assert (
        PopulationRisk(TASK, math.inf, "softmax")(own)[0]
        == PopulationRisk(TASK, math.inf, "linear")(own)[0]
    )


@pytest.mark.parametrize("length", [5, 200])
def test_softmax_in_the_block_form_has_the_error_of_the_quadrature(length: int):
    """The cubature of queries, four shells and directions exact to degree 5, is within 1e-3
    of it.
    """
    block = Block(0.5 * torch.linalg.inv(TASK.sigma), 1.4)
    rule = PopulationRisk(TASK, length, "softmax")
    white = np.zeros((4, 4))
    root = rule.root
    white[:3, :3], white[3, 3] = root[:3, :3].T @ block.U11.numpy() @ root[:3, :3], 1.4
    excess = float(risk(TASK, block, length)) - float(risk(TASK, block, math.inf))
    assert rule.white(white)[0] - float(risk(TASK, block, math.inf)) == pytest.approx(
        excess, rel=2e-3
    )


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_gradient_and_hessian_are_those_of_the_risk(kind: str):
    _, own = weights(3, 1.5)
    rule, state, step = PopulationRisk(TASK, 20, kind), pack(own), 1e-5
    gradient, hessian = pack(rule(own)[1]), weight_hessian(rule, own)
    for i in range(0, state.size, 5):
        unit = np.zeros_like(state)
        unit[i] = step
        ahead, behind = (rule(unpack(state + sign * unit, own)) for sign in (1, -1))
        assert gradient[i] == pytest.approx((ahead[0] - behind[0]) / (2 * step), abs=1e-8)
        np.testing.assert_allclose(
            hessian[i], (pack(ahead[1]) - pack(behind[1])) / (2 * step), atol=1e-7
        )


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_the_risk_has_its_symmetries(kind: str):
    """(a, r) -> (-a, -r) and (U, V) -> (-U, -V), for both kinds; the scale for linear attention
    alone.
    """
    _, own = weights(4, 1.5)
    rule = PopulationRisk(TASK, 20, kind)
    white = whiten(own, rule.root)
    value, mirrored, scaled = rule.white(white)[0], white.copy(), white.copy()
    mirrored[3, :3] *= -1
    mirrored[:3, 3] *= -1
    scaled[:, :3] *= 1.3
    scaled[:, 3] /= 1.3
    assert rule.white(mirrored)[0] == pytest.approx(value, rel=1e-12)
    assert rule.white(-white)[0] == pytest.approx(value, rel=1e-12)
    assert (abs(rule.white(scaled)[0] / value - 1) < 1e-12) == (kind == "linear")


def test_the_flow_is_gradient_descent_with_small_steps():
    _, own = weights(5)
    rule, times = PopulationRisk(TASK, 20, "linear"), np.array([0.0, 1.0, 4.0])
    flow = weight_flow(rule, own, times)
    state, step = pack(own), 1e-3
    for _ in range(4000):
        half = state - 0.5 * step * pack(rule(unpack(state, own))[1])  # midpoint rule
        state = state - step * pack(rule(unpack(half, own))[1])
    np.testing.assert_allclose(flow.states[-1], state, atol=2e-3)
    assert flow.mse[-1] == pytest.approx(2 * rule(unpack(state, own))[0], rel=1e-3)
    assert flow.mse[0] == pytest.approx(2 * rule(own)[0], rel=1e-14)


def test_chain_rule_through_o_v_k_q():
    """Against autograd through a product loss that depends on U and c in a known linear way."""
    drawn = default_weights(3, torch.Generator().manual_seed(2), width=4)
    root = PopulationRisk(TASK, 10, "linear").root
    o, V, K, Q = (
        part.clone().requires_grad_() for part in (drawn.O[-1], drawn.V, drawn.K, drawn.Q)
    )
    slope = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    R = torch.from_numpy(root)
    joined = torch.cat([(K.T @ Q)[:, :-1], (V.T @ o)[:, None]], dim=1)
    ((R.T @ joined @ R) * slope).sum().backward()
    own = weights_of(drawn)
    np.testing.assert_allclose(whiten(own, root), (R.T @ joined @ R).detach().numpy(), atol=1e-14)
    for ours, theirs in zip(chain(own, root, slope.numpy()), (o, V, K, Q), strict=True):
        np.testing.assert_allclose(ours, theirs.grad.numpy(), atol=1e-13)


def rule_at(trap: Trap, length: int, kind: str, values: list[float]) -> PopulationRisk:
    dim = trap.white.shape[0] - 1
    return PopulationRisk(LinearTask(np.diag(values), np.eye(dim) / dim), length, kind)


def test_isotropic_trap_of_linear_attention():
    """At L = 100 in five dimensions: one direction against the others, and flows from seed 0 end
    there.
    """
    task = LinearTask.isotropic(5)
    (trap,) = traps(task, 100, "linear")
    along = trap.white[5, 5] * np.diag(trap.white)[:5]
    assert (along < 0).sum() == 1
    assert trap.falling == 0
    assert trap.slope < 1e-10
    flows = pair_flows(task, 100, 0, [0.0, 1000.0])
    assert flows["linear"].mse[-1] == pytest.approx(trap.mse, rel=1e-6)
    assert flows["softmax"].mse[-1] < trap.mse


def test_a_minimum_is_below_its_surroundings():
    (trap,) = traps(LinearTask.isotropic(5), 100, "linear")
    risk, rng = rule_at(trap, 100, "linear", [1.0] * 5), np.random.default_rng(0)
    around = [
        2 * risk.white(trap.white + 0.02 * rng.standard_normal(trap.white.shape))[0]
        for _ in range(200)
    ]
    assert min(around) > trap.mse - 1e-12


def test_saddles_of_a_covariance_with_distinct_eigenvalues():
    """0.5^|i-j|, L = 1000: a trap for each eigenvector, the direction with the least variance a
    minimum, the others saddles.
    """
    task = LinearTask.kms(5, 0.5)
    found = traps(task, 1000, "linear")
    assert [trap.falling for trap in found] == [4, 3, 2, 1, 0]
    assert np.all(np.diff([trap.variance for trap in found]) < 0)
    assert np.all(np.diff([trap.mse for trap in found]) < 0)
    saddle, values = found[0], np.linalg.eigvalsh(task.sigma.numpy())
    risk = rule_at(saddle, 1000, "linear", values.tolist())
    rng = np.random.default_rng(1)
    lower = saddle.white
    for _ in range(3000):  # a descent from beside the saddle passes below it
        lower = (
            lower
            + 0.02 * rng.standard_normal(lower.shape) * (lower is saddle.white)
            - 0.02 * risk.white(lower)[1]
        )
    assert 2 * risk.white(lower)[0] < saddle.mse


def test_no_trap_on_short_prompts():
    assert traps(LinearTask.isotropic(5), 10, "linear") == []


def test_tasks_with_other_axes_are_refused():
    with pytest.raises(ValueError, match="task_cov: expected the eigenvectors"):
        traps(LinearTask(np.diag([1.0, 2.0]), [[1.0, 0.5], [0.5, 1.0]]), 10)


SMALL = StabilitySpec(
    dim=2,
    covariances=("isotropic",),
    lengths=(10,),
    starts=3,
    block=2,
    training=60,
    until=90,
    times=12,
)


def test_a_run_is_resumed_to_the_same_tables(tmp_path: Path):
    run = execute(SMALL, tmp_path / "run")
    assert set(run.tables) == {"flows", "curve", "distance", "verdict"}
    flows, curve = run.table("flows"), run.table("curve")
    assert len(flows) == 3 * 2
    assert flows.groupby(["length", "seed"])["lead"].nunique().eq(1).all()
    fixed = curve[curve["model"] == "linear"].groupby(["length", "seed"])["balance"]
    assert (fixed.max() - fixed.min()).max() < 1e-3  # what the scale moves, linear attention keeps
    before = {name: (tmp_path / "run" / f"{name}.parquet").read_bytes() for name in run.tables}
    (tmp_path / "run" / "shards" / "000001.parquet").unlink()
    resume(tmp_path / "run")
    for name, content in before.items():
        assert (tmp_path / "run" / f"{name}.parquet").read_bytes() == content


def test_a_run_that_is_stopped_has_all_settings():
    spec = SMALL.model_copy(update={"lengths": (10, 40)})
    assert [(unit["first"], unit["length"]) for unit in find_job("icl-stability").units(spec)] == [
        (0, 10),
        (0, 40),
        (2, 10),
        (2, 40),
    ]
    with pytest.raises(
        ValidationError, match="until: expected a time of at least that of training"
    ):
        StabilitySpec(training=100, until=10)


def flows(stuck: dict[tuple[str, int], list[tuple[bool, bool]]]) -> pd.DataFrame:
    """A table of starts that are stuck (softmax, linear) in some settings; the lead is the number
    of the start.
    """
    rows = []
    for (covariance, length), starts in stuck.items():
        for seed, pair in enumerate(starts):
            for model, there in zip(("softmax", "linear"), pair, strict=True):
                row = {
                    "covariance": covariance,
                    "length": length,
                    "seed": seed,
                    "model": model,
                    "lead": float(seed),
                }
                rows.append(
                    row
                    | {"status": "stuck" if there else "ok", "arrival": math.nan if there else 10.0}
                )
    return pd.DataFrame(rows)


def test_verdict_counts_starts_that_tell_the_models_apart():
    one = [(True, True)] * 2 + [(False, True)] * 6 + [(False, False)] * 2
    two = [(False, False)] * 9 + [(True, False)]
    table = verdict(flows({("isotropic", 10): one, ("isotropic", 100): two}))
    first, second, total = table.to_dict("records")
    assert (first["only_linear"], first["only_softmax"]) == (6, 0)
    assert first["p"] == pytest.approx(2 * 2 * binom.cdf(0, 6, 0.5))  # two-sided, times Holm's 2
    assert (second["only_linear"], second["only_softmax"], second["p"]) == (0, 1, 1.0)
    assert (first["softmax"], first["linear"], first["linear_never"]) == (0.2, 0.8, 0.8)
    assert (total["covariance"], total["only_linear"], total["only_softmax"]) == (ALL, 6, 1)
    assert total["p"] == pytest.approx(2 * binom.cdf(1, 7, 0.5))
    assert total["linear"] == 0.4
    assert first["linear_lead"] == 1.0  # every stuck start has less of it
    assert second["softmax_lead"] == 0.0
    assert math.isnan(second["linear_lead"])


def test_correction():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])


def test_distance_modulo_scale():
    one = weights_of(default_weights(3, torch.Generator().manual_seed(0)))
    scaled = Weights(1.4 * one.o, 1.4 * one.V, one.K / 1.4, one.Q / 1.4)
    found = apart(scaled, one)
    assert found.plain == pytest.approx(np.sum((pack(scaled) - pack(one)) ** 2))
    assert found.modulo < 1e-20
    assert found.product < 1e-15
    two = weights_of(default_weights(3, torch.Generator().manual_seed(1)))
    grid = np.exp(np.linspace(-2, 2, 4001))
    tried = [
        np.sum((pack(one) - pack(Weights(l * two.o, l * two.V, two.K / l, two.Q / l))) ** 2)
        for l in grid
    ]
    assert apart(one, two).modulo == pytest.approx(min(tried), rel=1e-5)
    tensors = [np.multiply.outer(w.V.T @ w.o, (w.K.T @ w.Q)[:, :-1]) for w in (one, two)]
    assert apart(one, two).product == pytest.approx(np.sum((tensors[0] - tensors[1]) ** 2))
    assert balance(scaled) != pytest.approx(balance(one))


def test_softmax_alone_moves_along_the_valley_and_slower_on_longer_prompts():
    moved = {}
    for length in (1000, 100_000):
        found = pair_flows(LinearTask.isotropic(2), length, 1, [0.0, 40.0])
        for kind, flow in found.items():
            moved[kind, length] = abs(balance(flow.at(-1)) - balance(flow.at(0)))
    assert max(moved["linear", 1000], moved["linear", 100_000]) < 1e-3
    assert moved["softmax", 1000] > 4 * moved["softmax", 100_000] > 0.01


def test_the_flow_tells_what_training_ends_with(tmp_path: Path):
    """Isotropic covariates in five dimensions, L = 100: SGD leaves linear attention with seed 0 in
    the trap, the rest not.
    """
    trained = TrainSpec(
        covariances=("isotropic",),
        lengths=(100,),
        seeds=2,
        steps=2500,
        rate=0.02,
        records=2,
        final_evaluation=2000,
    )
    run = execute(trained, tmp_path / "train")
    spec = spec_beside(run.spec)
    assert (spec.starts, spec.training) == (2, 100.0)
    flowed = execute(spec.model_copy(update={"times": 8}), tmp_path / "flow")
    exact = trained_risks(run.table("final"), run.table("path"), 5, 0.1)
    table = beside_training(
        flowed.table("flows"), flowed.table("distance"), exact, run.table("distance")
    )
    assert list(
        table.query("flow_status == 'stuck'")[["seed", "model"]].itertuples(index=False, name=None)
    ) == [(0, "linear")]
    assert (table["flow_status"] == table["trained_status"]).all()
    assert table["trained"].to_numpy() == pytest.approx(table["flow"].to_numpy(), rel=0.05)
    with pytest.raises(ValueError, match="--train: expected one head trained by SGD"):
        spec_beside(run.spec | {"optimizer": "adam"})

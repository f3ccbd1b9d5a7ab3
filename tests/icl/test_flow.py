"""Gradient flow: known limits, conserved quantities, Theorem 5.2 and Lemma E.1 of [S]."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from esscher.icl import UV, Block, LinearTask, default_weights
from esscher.icl.exact import bayes_risk, risk, risk_gradient
from esscher.icl.flow import (
    alpha_limit,
    final_parameters,
    flow_limit,
    flow_times,
    gradient_flow,
    prompt_length_for,
    start_block,
)
from esscher.icl.layer import flatten
from esscher.icl.specs import FlowSpec
from esscher.runs import execute

EYE = {d: torch.eye(d, dtype=torch.float64) for d in (2, 3)}
PAPER = LinearTask.kms(3, 0.5, task_cov=EYE[3], noise=0)  # equation (11) of [S]
SINGULAR = LinearTask(np.diag([1.0, 0.5, 0.0]), EYE[3], 0)
THETA = np.array([[1.0, 0.2, 0.1], [0.0, 0.8, 0.4], [0.3, 0.0, 0.7]])


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_remark_5_3(kind: str) -> None:
    start = start_block(PAPER, theta=THETA)
    flow = gradient_flow(PAPER, start, math.inf, kind, flow_times(1e5, 30))
    inverse = torch.linalg.inv(PAPER.sigma)
    root = float(torch.trace(inverse @ inverse)) ** 0.25
    end = flow.end
    assert isinstance(end, Block)
    assert flow.converged
    assert torch.allclose(end.U11, inverse / root, atol=1e-6)
    assert float(end.v) == pytest.approx(root, abs=1e-6)
    assert flow.risks[-1] == pytest.approx(0, abs=1e-9)
    assert (np.diff(flow.risks) <= 1e-10).all()


def test_sigma_l_of_zhang() -> None:
    """Linear attention on L tokens, as printed: Sigma_L = (1 + 1/L) Sigma + tr(Sigma)/L I."""
    L = 12
    flow = gradient_flow(PAPER, start_block(PAPER), L, "linear", flow_times(1e5, 30))
    sigma_L = (1 + 1 / L) * PAPER.sigma + torch.trace(PAPER.sigma) / L * EYE[3]
    inverse = torch.linalg.inv(sigma_L)
    root = float(torch.trace(inverse @ inverse)) ** 0.25
    end = flow.end
    assert isinstance(end, Block)
    assert torch.allclose(end.U11, inverse / root, atol=1e-6)
    assert float(end.v) == pytest.approx(root, abs=1e-6)


def test_f_3_singular_sigma() -> None:
    """The limit as [S] prints it in F.3, gamma and all."""
    alpha = 0.4
    start = start_block(SINGULAR, alpha, THETA)
    flow = gradient_flow(SINGULAR, start, math.inf, "softmax", flow_times(1e5, 30))
    gram = torch.tensor(THETA @ THETA.T)
    gram = gram / torch.linalg.matrix_norm(gram)
    pinv = torch.linalg.pinv(SINGULAR.sigma)
    onto = SINGULAR.sigma @ pinv
    P = gram - onto @ gram @ onto
    trace, size = float(torch.trace(pinv @ pinv)), float(torch.sum(P**2))
    gamma = math.sqrt((math.sqrt(alpha**4 * size**2 + 4 * trace) - alpha**2 * size) / (2 * trace))
    end = flow.end
    assert isinstance(end, Block)
    assert torch.allclose(end.U11, gamma * pinv + alpha * P, atol=1e-6)
    assert float(end.v) == pytest.approx(1 / gamma, abs=1e-6)


@pytest.mark.parametrize("length", [7, math.inf])
def test_limit_with_noise_and_any_law_of_tasks(length: float) -> None:
    """Sigma and W that do not commute, singular Sigma, unbalanced start: the flow ends where
    flow_limit says.
    """
    task = LinearTask(
        [[1.0, 0.4, 0.0], [0.4, 0.7, 0.0], [0.0, 0.0, 0.0]],
        [[0.9, 0.2, 0.1], [0.2, 0.5, 0.0], [0.1, 0.0, 0.8]],
    )
    start = Block(0.3 * torch.tensor(THETA @ THETA.T), 0.6)
    flow = gradient_flow(task, start, length, "linear", flow_times(1e5, 30))
    limit = flow_limit(task, start, length)
    assert np.abs(flatten(flow.end) - flatten(limit)).max() < 1e-6
    assert np.linalg.norm(flatten(risk_gradient(task, limit, length, "linear")[1])) < 1e-12


def test_block_form_is_kept_by_the_general_flow() -> None:
    """[S], after Assumption 5.1; here for the full (U, V), finite L and softmax, with the
    cubature's error in between.
    """
    task, times = LinearTask([[1.0]], [[1.0]], 0.1), flow_times(5, 6)
    block = start_block(task)
    small = gradient_flow(task, block, 8, times=times)
    full = gradient_flow(task, block.uv(), 8, times=times, rtol=1e-6, atol=1e-8)
    end, wanted = full.end, small.end.uv()
    assert isinstance(end, UV)
    assert torch.allclose(end.U, wanted.U, atol=2e-3)
    assert torch.allclose(end.V, wanted.V, atol=2e-3)


def test_flow_of_o_v_k_q_lowers_the_risk(generator: torch.Generator) -> None:
    task, start = LinearTask.isotropic(1), default_weights(1, generator)
    flow = gradient_flow(task, start, 30, "linear", flow_times(30, 8), rtol=1e-4, atol=1e-6)
    assert (np.diff(flow.risks) <= 1e-6).all()
    best = float(risk(task, flow_limit(task, start_block(task), 30), 30, "linear"))
    assert best - 1e-9 <= flow.risks[-1] < 0.9 * flow.risks[0]
    assert flow.gradients[-1] < 0.1 * flow.gradients[0]


def test_flows_come_together_as_the_prompt_grows() -> None:
    task, times = LinearTask.kms(2, 0.5), flow_times(10, 12)
    start = start_block(task)
    infinite = gradient_flow(task, start, math.inf, times=times)
    apart = []
    for length in (10**2, 10**6):
        soft, lin = (
            gradient_flow(task, start, length, kind, times, rtol=1e-6, atol=1e-8)
            for kind in ("softmax", "linear")
        )
        apart.append([np.abs(soft.states - other.states).max() for other in (infinite, lin)])
    # slowly: long tails of s need many tokens
    assert (np.array(apart[1]) < 0.1 * np.array(apart[0])).all()


def test_softmax_limit_is_where_the_flow_goes() -> None:
    task = LinearTask([[1.0]], noise=0.5)
    start = start_block(task)
    flow = gradient_flow(
        task, start, 5, times=flow_times(1e5, 6), tolerance=1e-8, rtol=1e-6, atol=1e-9
    )
    end = final_parameters(task, start, 5)
    assert flow.converged
    assert np.abs(flatten(flow.end) - flatten(end)).max() < 1e-5
    assert np.linalg.norm(flatten(risk_gradient(task, end, 5)[1])) < 1e-6


def final_risks(task: LinearTask, lengths: list[int]) -> np.ndarray:
    """Rows softmax, linear, Bayes: the risks at the end of the flow."""
    start, generator = start_block(task), torch.Generator().manual_seed(0)
    rows = [
        [float(risk(task, final_parameters(task, start, n, kind), n, kind)) for n in lengths]
        for kind in ("softmax", "linear")
    ]
    return np.array([*rows, [float(bayes_risk(task, n, 4000, generator)) for n in lengths]])


def check_order(task: LinearTask, lengths: list[int], near: float) -> None:
    """Linear below softmax, above Bayes, the gap closing, all to the noise level."""
    softmax, linear, bayes = final_risks(task, lengths)
    assert (softmax > linear).all()
    assert (linear > bayes).all()
    assert (np.diff(softmax - linear) < 0).all()
    assert softmax[-1] == pytest.approx(0.5 * task.noise, abs=near)


def test_final_risks_order() -> None:
    check_order(LinearTask.kms(2, 0.5), [10, 10**5], 1e-4)


def test_prompt_length_for_linear_attention() -> None:
    """Against the closed form, evaluated at every length."""
    task = LinearTask.isotropic(2)
    start = start_block(task)
    goal = 0.05 + 0.02
    curve = [float(risk(task, flow_limit(task, start, L), L, "linear")) for L in range(1, 80)]
    shortest = 1 + next(index for index, value in enumerate(curve) if value <= goal)
    found = prompt_length_for(task, 0.02, "linear")
    assert found == shortest


@pytest.mark.parametrize(("eps", "shortest"), [(0.1, 144), (0.01, 1494), (0.001, 14994), (4.0, 1)])
def test_prompt_length_is_the_closed_form(eps: float, shortest: int) -> None:
    """d = 5, Sigma = Lambda = I, no noise: linear attention ends at the risk 15 / (L + 6)."""
    task = LinearTask.isotropic(5, torch.eye(5), noise=0.0)
    assert prompt_length_for(task, eps, "linear") == shortest


def test_a_start_for_small_covariates_is_not_beyond_its_range() -> None:
    """Sigma = 0.01 I: the printed limit allows a start of 100 times the risk of no weights; the
    default is within both.
    """
    small = LinearTask(0.01 * torch.eye(5), torch.eye(5), 0.0)
    nothing = 0.5 * 0.05
    assert float(risk(small, start_block(small), math.inf)) < nothing
    printed = math.sqrt(2) / (5**0.25 * 0.01)
    assert alpha_limit(small) == pytest.approx(printed / 10)
    with pytest.warns(UserWarning, match="as Theorem 5.2 does.*below that of no weights"):
        start = start_block(small, 0.5 * printed)
    assert float(risk(small, start, math.inf)) > 50 * nothing


def test_alpha_range() -> None:
    assert alpha_limit(PAPER) == pytest.approx(
        math.sqrt(2) / (3**0.25 * float(torch.linalg.eigvalsh(PAPER.sigma)[-1]))
    )
    with pytest.warns(
        UserWarning, match=r"alpha = 2: expected one below 0.583.*, as Theorem 5.2 does"
    ):
        start_block(PAPER, 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start_block(PAPER, 0.5)


def test_bad_input() -> None:
    start = start_block(PAPER)
    with pytest.raises(ValueError, match="alpha: expected a finite number above 0"):
        start_block(PAPER, 0)
    with pytest.raises(ValueError, match="theta: expected 3 rows"):
        start_block(PAPER, theta=np.eye(2))
    with pytest.raises(ValueError, match="never leaves"):
        start_block(SINGULAR, theta=np.diag([0.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match="length: expected whole numbers from 1"):
        gradient_flow(PAPER, start, 0)
    with pytest.raises(ValueError, match="begin with 0"):
        gradient_flow(PAPER, start, times=[1.0, 2.0])
    with pytest.raises(ValueError, match="limit is not unique"):
        flow_limit(LinearTask(np.eye(2), np.diag([1.0, 0.0])), Block(np.eye(2), 1.0))
    with pytest.raises(ValueError, match="v above 0"):
        flow_limit(PAPER, Block(np.eye(3), -1.0))
    with pytest.raises(ValueError, match="eps: expected a finite number above 0"):
        prompt_length_for(PAPER, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [LinearTask.isotropic(5), LinearTask.kms(5, 0.5)], ids=["isotropic", "kms"]
)
def test_theorem_5_2_at_the_size_of_the_paper(task: LinearTask) -> None:
    check_order(task, [10**k for k in range(1, 7)], 2e-5)
    length = prompt_length_for(task, 0.01)
    end = final_parameters(task, start_block(task), length)
    assert float(risk(task, end, length)) <= 0.05 + 0.01


def test_flow_run_orders_the_models(tmp_path: Path):
    run = execute(FlowSpec(dim=2, covariances=("isotropic",), lengths=(10, 200)), tmp_path / "run")
    table = run.table("final").pivot_table(index="length", columns="model", values="mse")
    assert (table["bayes"] < table["linear"]).all()
    assert (table["linear"] < table["softmax"]).all()
    assert (table.loc[200] < table.loc[10]).all()

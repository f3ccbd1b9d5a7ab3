"""cov and cov_op: the covariance of self-attention's outputs, in Frobenius and in operator norm."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Float64
from torch import Tensor

from esscher.attention.head import Head
from esscher.convergence.montecarlo.draw import Draw, Plan
from esscher.convergence.montecarlo.metrics.base import Discrepancy, Exponents, Metric, as_floats
from esscher.convergence.montecarlo.metrics.moments import moment_exponents
from esscher.measures.base import Measure

__all__ = ["Cov", "CovOp"]


class _Covariance(Metric):
    """|Cov_n - covariance of the push-forward|, Cov_n that of the empirical measure of the n
    outputs, divided by n [B].
    """

    asked_by = "tokens"

    @abstractmethod
    def squared_norm(self, matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, " k"]:
        """Of each matrix."""

    def target(self, plan: Plan, x: Tensor) -> Tensor:
        return plan.pushforward.cov

    def error(self, draw: Draw) -> Discrepancy:
        cov = self.target(draw.plan, draw.tokens).to(draw.tokens.device)
        differences = torch.stack([prefix.cov - cov for prefix in draw.moments])
        return Discrepancy(
            as_floats(self.squared_norm(differences)), float(self.squared_norm(cov[None]))
        )

    def target_error(self, plan: Plan) -> tuple[float, str]:
        push = plan.pushforward
        return push.cov_error, f"{push.method}, own error {push.cov_error:.2g}"

    def exponents(self, head: Head, measure: Measure) -> Exponents:
        return moment_exponents(head, measure)


class Cov(_Covariance):
    name = "cov"
    description = "covariance of self-attention's outputs, Frobenius norm"
    brings = ("cov_op",)

    def squared_norm(self, matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, " k"]:
        return matrices.square().sum((1, 2))


class CovOp(_Covariance):
    name = "cov_op"
    description = "covariance of self-attention's outputs, operator norm"

    def squared_norm(self, matrices: Float64[Tensor, "k d d"]) -> Float64[Tensor, " k"]:
        largest: Tensor = torch.linalg.eigvalsh(matrices).abs().amax(dim=1)
        return largest.square()

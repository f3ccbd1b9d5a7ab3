"""Reach, horizons and coupling of a head's tokens, and the exponents that theory gives for them."""

from __future__ import annotations

import math

import torch

from esscher.attention.head import coupling_of, horizon_of_covariances
from esscher.convergence.columns import HORIZONS
from esscher.models.probe.spec import ProbeSpec
from esscher.models.probe.statistics.statistic import Findings, Found, Statistic
from esscher.models.probe.tokens import largest_variance
from esscher.runs.columns import Column
from esscher.theory import bohbot, sharp

__all__ = ["REACH", "Theory"]

REACH = Column(
    "reach",
    "float",
    "reach",
    "Largest variance of the tokens in any direction, the norm of their covariance.",
)


class Theory(Statistic):
    """From the moments of the layer's tokens.

    Where q and k are affine functions of what enters the layer, tokens are that: A = scale W_k^T
    W_q. Elsewhere (rotary positions, norms) the token is the pair (q, k) itself and A = scale times
    the map from its one half to the other, so that reach is the norm of their joint covariance and
    H = scale ||Sigma_k||^{1/2}. The two-sided horizon is the same in both.
    """

    name = "theory"

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        return (
            Column(
                "token_space",
                "word",
                "token space",
                "Where tokens live: hidden states, or pairs of a query and a key after rotation.",
            ),
            REACH,
            *HORIZONS,
            Column(
                "beta_paper",
                "float",
                "exponent proved if Gaussian",
                "Exponent proved for moments of Gaussian tokens of this covariance.",
                short="[B] proved",
                of="coupling",
                status="proved if Gaussian",
                formula=f"{bohbot.PROVED}, moments",
            ),
            Column(
                "beta_paper_experimental",
                "float",
                "experimental exponent",
                "Exponent from an experiment that a summary of the paper suggests; not proved.",
                short="[B] experimental",
                of="coupling",
                status="experimental",
                formula=f"{bohbot.EXPERIMENTAL}, moments",
            ),
            Column(
                "beta_sharp",
                "float",
                "sharp exponent, typical",
                "Heuristic exponent of the error in a typical draw of the tokens.",
                short="sharp",
                of="horizon2",
                status="heuristic",
                formula=f"{sharp.TYPICAL}, typical",
            ),
            Column(
                "beta_sharp_rms",
                "float",
                "sharp exponent, rms",
                "Heuristic exponent of the root mean square error.",
                short="sharp, rms",
                of="horizon2",
                status="heuristic",
                formula=f"{sharp.RMS}, rms",
            ),
        )

    def finish(self, state: None, found: Found) -> Findings:
        layer, head = found.layer, found.head
        own = layer.info.kv_head(head)
        key_cov, query_cov, scale, maps = (
            layer.k.cov[own],
            layer.q.cov[head],
            layer.info.scale,
            layer.maps,
        )
        horizon2 = horizon_of_covariances(key_cov, query_cov, scale)
        if maps is not None and maps.affine and layer.hidden is not None and maps.wq is not None:
            width = maps.wq.shape[0] // layer.info.heads
            wq = maps.wq[head * width : (head + 1) * width].double().to(key_cov.device)
            space, reach = "hidden", largest_variance(layer.hidden.cov)
            horizon = horizon_of_covariances(key_cov, wq @ wq.T, scale)
        else:
            space, reach = "query-key", largest_variance(layer.moments.pair_cov(head, own))
            horizon = horizon_of_covariances(key_cov, torch.eye(len(key_cov)).to(key_cov), scale)
        coupling = coupling_of(math.sqrt(reach), horizon)
        row = {
            "token_space": space,
            "reach": reach,
            "horizon": horizon,
            "horizon2": horizon2,
            "coupling": coupling,
        }
        row |= {
            "beta_paper": bohbot.moment_exponent(coupling),
            "beta_paper_experimental": bohbot.moment_exponent_experimental(coupling),
        }
        return Findings(
            row
            | {
                "beta_sharp": sharp.l2_exponent_typical(horizon2),
                "beta_sharp_rms": sharp.l2_exponent_rms(horizon2),
            }
        )

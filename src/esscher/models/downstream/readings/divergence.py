"""Kullback-Leibler divergence of what the model says from what the full model says."""

from __future__ import annotations

import torch

from esscher.models.downstream.readings.reading import Outcome, Reading

__all__ = ["Divergence"]


class Divergence(Reading):
    """sum_w p(w) log(p(w) / p_kept(w)), mean over the positions; p of the full model."""

    name = "kl"
    label = "divergence"
    help = (
        "Kullback-Leibler divergence of the next token, or of the label, from the full model's, in"
        " nats; mean over positions."
    )
    tasks = ("language", "classifier")
    paired = True

    def value(self, full: Outcome, kept: Outcome) -> float:
        p, q = (torch.log_softmax(rows.double(), -1) for rows in (full.rows, kept.rows))
        return float((p.exp() * (p - q)).sum(-1).mean())

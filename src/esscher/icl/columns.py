"""Columns that the tables of the lab share, each described once."""

from __future__ import annotations

from esscher.convergence.columns import STDERR
from esscher.runs.columns import Column

__all__ = ["COVARIANCE", "LENGTH", "MODEL", "MSE", "SEED", "STATUS", "STDERR"]

COVARIANCE = Column(
    "covariance",
    "word",
    "covariance",
    "Covariance of the covariates: isotropic, kms:RHO or diag:A,B,...",
)
LENGTH = Column("length", "int", "prompt length", "Labelled tokens in a prompt.", "log")
SEED = Column("seed", "int", "seed", "Number of the first weights.")
MODEL = Column(
    "model",
    "word",
    "model",
    "softmax or linear attention; bayes is the best predictor on as many tokens.",
    "words",
)
MSE = Column(
    "mse",
    "float",
    "mean squared error",
    "Mean squared error of the query's noisy label; the risk is half of it.",
    "log",
)
STATUS = Column("status", "word", "status", "ok, or what went wrong.", "words")

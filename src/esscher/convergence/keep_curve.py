"""The exact error of attention on the keys that a rule keeps, for a ladder of sizes. Formulas: integral.inclusion."""

from __future__ import annotations

from typing import Any

import numpy as np

from esscher.convergence.curve import ErrorCurve, QueryErrors
from esscher.convergence.integral.inclusion import inclusion_error
from esscher.inputs import as_counts
from esscher.keep.context import Context
from esscher.keep.rule import Rule

__all__ = ["keep_curve"]


def keep_curve(context: Context, rule: Rule, n: Any = None, *, details: bool = False) -> ErrorCurve:
    """Root mean square over the queries of the context; ``n``: keys kept in all, for the part without a number.

    A rule whose numbers are all given has one point, at the keys it keeps on average.
    """
    counts = [None] if n is None else as_counts(n, "n").tolist()
    found, sizes = [], []
    for count in counts:
        kept = rule.include(context, count)
        found.append(inclusion_error(context.scores, context.v, kept.probability, kept.weight))
        sizes.append(kept.size.cpu().numpy())
    mse = np.stack([part.mse.cpu().numpy() for part in found], axis=1)
    queries = QueryErrors(
        mse=mse,
        sum_p2=np.stack([part.sum_p2.cpu().numpy() for part in found], axis=1),
        limit=context.limit.cpu().numpy(),
        delta=np.full(len(mse), np.nan),
        bias=np.stack([part.bias.cpu().numpy() for part in found], axis=1) if details else None,
    )
    size = np.stack(sizes, axis=1)
    ladder = np.asarray([max(1, round(float(size.mean())))] if n is None else counts, dtype=np.int64)
    return ErrorCurve.from_queries(
        ladder,
        queries,
        None,
        kind="exact",
        accuracy=max(part.accuracy for part in found),
        origin=f"exact error on the keys that {rule} keeps of {context.keys}",
        kept=size.mean(axis=0),
    )

"""[S] Lemma C.2: sums of independent vectors with two moments, which its Lemma C.1 applies to the
numerator of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from esscher.theory.boursier.logs import counts_of, from_logs, log_of
from esscher.theory.boursier.query import DELTA, token_conditions
from esscher.theory.prediction import Prediction
from esscher.theory.setting import Setting

__all__ = ["lemma_c2_printed", "lemma_c2_sharpened", "predictions"]

Floats = npt.NDArray[np.float64]


def lemma_c2_printed(n: Any, delta: float, second: float) -> Floats:
    """|sum_i (Q_i - E Q_i)| <= sqrt(3 u n / delta) with chance 1 - 2 delta, u = ``second`` >=
    E|Q|^2. Source: [S] Lemma C.2.

    True, and six times (squared) more than is needed: see ``lemma_c2_sharpened``.
    """
    return np.asarray(np.sqrt(3.0 * second * counts_of(n) / delta), np.float64)


def lemma_c2_sharpened(n: Any, delta: float, second: float) -> Floats:
    """The same with chance 1 - 2 delta from sqrt(u n / (2 delta)) on: Chebyshev's inequality, since
    E|sum|^2 <= n u.

    No truncation as in Bubeck et al. (2013), Lemma 3, is needed for two moments. Derived here.
    """
    return np.asarray(np.sqrt(second * counts_of(n) / (2.0 * delta)), np.float64)


def _mean(bound: Callable[[Any, float, float], Floats], second: float, n: Any) -> Floats:
    return bound(n, DELTA, second) / counts_of(n)


def predictions(setting: Setting) -> list[Prediction]:
    """Lemma C.2 for Q = exp<theta, y> V y of centred tokens, u = exp(4 sigma^2 |theta|^2) (E|V
    y|^4)^{1/2}, divided by n.
    """
    ready = setting.sigma is not None and setting.fourth is not None
    spread = (setting.sigma or 0.0) * setting.tilt
    # infinite beyond float64
    second = float(from_logs(4.0 * spread * spread + 0.5 * log_of(setting.fourth or 0.0)))
    chance = 1.0 - 2.0 * DELTA
    rows = (
        ("s-c2-printed", "[S] Lemma C.2", "sqrt(3 u / (delta n))", lemma_c2_printed),
        (
            "s-c2-sharpened",
            "derived here on [S] Lemma C.2",
            "sqrt(u / (2 delta n))",
            lemma_c2_sharpened,
        ),
    )
    return [
        Prediction(
            name=name,
            statement=(
                f"With chance {chance:g} or more the mean of e V (y - E y) over the tokens, e ="
                " exp<theta, y - E y>, is this close to its expectation."
            ),
            source=source,
            formula=f"{formula}, u = exp(4 sigma^2 |theta|^2) E|V y|^4^{{1/2}}",
            status="proved",
            quantity=f"numerator of attention at one query, with chance {chance:g}",
            conditions=token_conditions(setting),
            exponent=0.5,
            value=partial(_mean, bound, second) if ready else None,
            units="rms" if ready else "none",
            numbers={"tilt": setting.tilt, "delta": DELTA}
            | ({"u": second} if np.isfinite(second) else {}),
        )
        for name, source, formula, bound in rows
    ]

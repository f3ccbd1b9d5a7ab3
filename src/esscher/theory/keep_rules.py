"""Rates and constants of keep rules at one query: what the error of n kept keys tends to.

e = exp<theta, y>, c = V y - Gamma, E_t the tilted law, s the standard deviation of the score, w = V
Sigma theta / s. For N independent tokens that are kept with chance p and counted 1/p times, N MSE
-> E[e^2 |c|^2 / p] / (E e)^2 (the delta method; the proof of ``sharp.delta_bound`` holds with e/p
in place of e). From it

    random        n MSE -> E[e^2 |c|^2] / (E e)^2,  Gaussian: exp(s^2) (tr V Sigma V^T + s^2 |w|^2)
    topk + rest   n MSE -> f (E[e^2 |c|^2; top] + E[e^2 |c|^2; rest] / p) / (E e)^2, f = n/N fixed.

The largest scores alone, at a fixed share, tend to the wrong limit: cut at r, the tilted score N(s,
1) of Gaussian tokens has its mean moved by the hazard phi(r-s) / Q(r-s), and Gamma_keep - Gamma ->
w times it.

Neyman's rule in a context without end draws c_1 .. c_n from the tilted law by their sizes, and

    n MSE -> (E_t|c|)^2 <= tr V Cov_t V^T .

For Gaussian tokens c is N(0, V Sigma V^T) under every tilt: the error is the same number at every
query and every horizon, and with M_k = E_t|c|^k

    MSE <= ((n-1) (M_2/M_1)^2 + M_3/M_1) / n^2        for every n.

Source: derived here; proofs: "Bounds" in the documentation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from esscher.inputs import as_counts
from esscher.measures.line import panels
from esscher.measures.matrices import is_diagonal, product
from esscher.theory.prediction import Conditions, Floats, Prediction, Setting

# of a context, at which the predictions for the largest scores speak; half of it for those with a
# rest
SHARE = 1 / 16
# score deviations beyond which exp(s^2) leaves the floating range whatever it multiplies
STEEP = 1e3


def gaussian_mean_norm(values: Any) -> float:
    """E|c| for c ~ N(0, C) with eigenvalues ``values`` of C.

    E sqrt(Q) = int_0^inf (1 - E exp(-tQ)) t^{-3/2} dt / (2 sqrt(pi)), E exp(-tQ) = prod (1 + 2 t
    lambda)^{-1/2}; in log t the integrand is analytic in a strip of half-width pi, so that a
    trapezoid rule of step 1/2 errs by exp(-39).
    """
    spectrum = np.asarray(values, np.float64)
    largest = float(spectrum.max(initial=0.0))
    if largest <= 0.0:
        return 0.0
    y = np.arange(-90.0, 90.0, 0.5)
    grown = 2.0 * np.exp(y)[:, None] * (spectrum / largest)
    lost = -np.expm1(-0.5 * np.log1p(grown).sum(axis=1))
    integral = 0.5 * float((lost * np.exp(-0.5 * y)).sum())
    return math.sqrt(largest) * integral / (2.0 * math.sqrt(math.pi))


def neyman_bound(n: Any, first: float, second: float, third: float) -> Floats:
    """((n-1) (M_2/M_1)^2 + M_3/M_1) / n^2 from M_1 = E|c| and (numbers above) M_2 and M_3, Gaussian
    tokens.
    """
    counts = as_counts(n, "n").astype(np.float64)
    if first <= 0.0:
        return np.zeros_like(counts)
    return ((counts - 1.0) * (second / first) ** 2 + third / first) / counts**2


def topk_bias(share: float, s: float) -> float:
    """phi(r-s) / Q(r-s), Q(r) = share: |Gamma_keep - Gamma| over |w| for the largest scores of
    Gaussian tokens.
    """
    x = float(scipy.stats.norm.isf(share)) - s
    return math.sqrt(2.0 / math.pi) / float(scipy.special.erfcx(x / math.sqrt(2.0)))


def rest_constant(top: float, rest: float, s: float, along: float, across: float) -> float:
    """E[e^2 |c|^2 / p] / (E e)^2 for Gaussian tokens, p = 1 for a share ``top`` of largest scores
    and ``rest`` for the others.

    Given the score s g, |c|^2 is along (g - s)^2 + across on average, and e^2 / (E e)^2 moves g to
    N(2s, 1) and counts it exp(s^2) times: exp(s^2) (along (1 + s^2) + across), and (1/rest - 1)
    times its part below the cut.
    """
    if s > STEEP:
        return math.inf if along + across > 0.0 else 0.0
    z, lengths = (x.numpy() for x in panels(0.0, 160.0))
    g = float(scipy.stats.norm.isf(top)) - 0.25 * z
    with np.errstate(divide="ignore"):  # no values, no error
        square = np.log(0.25 * lengths * (along * (g - s) ** 2 + across) / math.sqrt(2.0 * math.pi))
        whole = s * s + float(np.log(along * (1.0 + s * s) + across))
    below = float(scipy.special.logsumexp(square - 0.5 * g * g + 2.0 * s * g - s * s))
    return _exp(whole) + (1.0 / rest - 1.0) * _exp(below)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700.0 else math.inf


def predictions(setting: Setting) -> list[Prediction]:
    """At ``setting.query``; the rate of random keys is with ``sharp.delta``, which proves it."""
    theta = setting.head.tilt(setting.query).double()
    V, measure = setting.head.V.double(), setting.measure
    gaussian: Conditions = (("tokens are Gaussian", measure.is_gaussian),)
    sizes: dict[str, float] = {}  # of Neyman's rule
    top: dict[str, float] = {}  # of the largest scores
    rest: dict[str, float] = {}
    if measure.is_gaussian:
        white, spread = measure.root.T @ theta, product(V, measure.root)
        sizes = _sizes(spread)
        s = float(white.norm())
        along = float((spread @ (white / s)).square().sum()) if s > 0.0 else 0.0
        across = max(0.0, float(spread.square().sum()) - along)
        top = {"share": SHARE, "rms": math.sqrt(along) * topk_bias(SHARE, s)}
        constant = rest_constant(SHARE / 2, SHARE / (2.0 - SHARE), s, along, across)
        rest = {"share": SHARE, "constant": SHARE * constant}
    numbers: dict[str, float] = {}
    moments: bool | None = False
    try:
        measure.log_laplace(1.001 * theta)
        if measure.is_gaussian:
            numbers = {"most": sizes.get("second", math.inf)}
            if sizes:
                numbers["constant"] = sizes["first"] * sizes["first"]
        else:
            numbers = {"most": _trace(V, measure.tilted_cov(theta))}
        moments = True if setting.sigma is not None or bool(theta.any()) else None
    except ValueError:  # no limit at this query, or none beyond it
        pass
    return [
        Prediction(
            name="keep-neyman",
            source="derived here",
            formula=(
                "n MSE -> (E_t|c|)^2 <= tr V Cov_t V^T, t the tilted law; Gaussian tokens: one"
                " error for all queries"
            ),
            status="proved (asymptotic)",
            quantity="kept keys at one query: Neyman's",
            conditions=(
                ("the tilted law has moments of every order", moments),
                ("no token's value is the limit", None if measure.as_pool() is not None else True),
            ),
            exponent=0.5,
            numbers=numbers,
        ),
        Prediction(
            name="keep-neyman-bound",
            source="derived here",
            formula=(
                "MSE <= ((n-1) (M_2/M_1)^2 + M_3/M_1)/n^2, M_k = E|c|^k for c ~ N(0, V Sigma V^T)"
            ),
            status="proved",
            quantity="kept keys at one query: Neyman's",
            conditions=gaussian,
            exponent=0.5,
            value=(lambda n: neyman_bound(n, **sizes)) if sizes else None,
            units="squared",
            numbers=sizes,
        ),
        Prediction(
            name="keep-topk",
            source="derived here",
            formula="rms -> |w| phi(r-s)/Q(r-s), Q(r) = share, w = V Sigma theta / s",
            status="proved (asymptotic)",
            quantity="kept keys at one query: largest scores",
            conditions=gaussian,
            exponent=0.0,
            numbers=top,
        ),
        Prediction(
            name="keep-topk-rest",
            source="derived here",
            formula="n MSE -> share E[e^2 |c|^2/p]/(E e)^2, p = 1 for the largest scores",
            status="proved (asymptotic)",
            quantity="kept keys at one query: largest scores and a rest",
            conditions=gaussian,
            exponent=0.5,
            numbers=rest,
        ),
    ]


def _sizes(spread: Tensor) -> dict[str, float]:
    """M_1, and numbers above M_2 and M_3, of N(0, L L^T), L = ``spread``; nothing where they leave
    the floating range.
    """
    if is_diagonal(spread):
        eigenvalues = spread.diagonal().square()
    else:
        narrow = spread if spread.shape[0] < spread.shape[1] else spread.T
        eigenvalues = torch.linalg.eigvalsh(product(narrow, narrow.T)).clamp_min(0.0)
    values = np.asarray(eigenvalues.cpu().numpy(), np.float64)
    second = float(values.sum())
    if not math.isfinite(second):
        return {}
    uneven = 2.0 * float(((values / (second or 1.0)) ** 2).sum())
    third = second * math.sqrt(second) * math.sqrt(1.0 + uneven)  # sqrt(M_2 M_4) >= M_3
    return {"first": gaussian_mean_norm(values), "second": second, "third": third}


def _trace(V: Tensor, cov: Tensor) -> float:
    """tr V C V^T of V over its largest entry, then times its square; infinite beyond float64."""
    size = float(V.abs().max()) or 1.0
    trace = float((product(V / size, cov) * (V / size)).sum())
    return max(0.0, trace) * size * size if math.isfinite(trace) else math.inf

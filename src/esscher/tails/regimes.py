"""Which regime a head is in, by a stated rule, with the reason in words and the failure signatures
by name.

The rule, first match wins:

1. *unknown*: n, the effective tokens or the share of frozen queries is missing.
2. *sink-dominated*: sink tokens hold at least SINK_MASS of the softmax weight.
3. *frozen*: at least FROZEN_SHARE of the queries have s^2 > 2 log n. In the random energy model
   (Derrida 1981) the softmax over n Gaussian scores of deviation s then rests on its few largest:
   the number of effective tokens stays bounded as n grows along with s.
4. *diffuse*: at least DIFFUSE_SHARE of the n tokens are effective; for Gaussian scores that is s^2
   <= log(1/DIFFUSE_SHARE).
5. *selective*: everything between.

Signatures are named after the failures that [B] warns of. *Exploded constants*: convergence much
slower than 1/sqrt(n) where the coupling Psi is far above 1, which is what [B] says to check; or,
our own rule, an error that falls as it should from so high that it is still large at n. *Hardmax
regime*: weights on single tokens; [B, Prop. 5.1] has a logarithmic law for the hardmax of
one-dimensional symmetric Gaussian tokens.
*Distribution mismatch*: tokens that are not sub-Gaussian leave the theory's hypotheses. A head may
show none or several, whatever its regime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from esscher.tails.scores import gaussian_khat

SINK_MASS = 0.5
FROZEN_SHARE = 0.5
DIFFUSE_SHARE = 0.1
# error times sqrt(n) over the constant of a head that weighs all tokens alike
EXPLODED_RATIO = 10.0
LARGE_ERROR = 0.1  # relative root mean square error that still counts as large
SINGLE_TOKENS = 2.0  # effective tokens
KHAT_MARGIN = 0.2  # k-hat above that of Gaussian scores of the same deviation
SLOW = 0.45  # exponent below which an error falls more slowly than 1/sqrt(n)
MUCH_SLOWER = 0.4  # exponent that counts as much slower
LARGE_COUPLING = 10.0  # Psi >> 1

Number = float | int  # counts arrive as whole numbers

LABELS = ("diffuse", "selective", "frozen", "sink-dominated", "unknown")
SIGNATURES = ("exploded constants", "hardmax regime", "distribution mismatch")


@dataclass(frozen=True)
class HeadEvidence:
    """What was measured of one head; NaN or "unknown" where it was not.

    ``s`` and the other per-query numbers are medians over queries. ``constant_ratio`` is rms(n)
    sqrt(n) over sqrt(tr Cov(values)), which is 1 for s -> 0 and about exp(s^2/2) by the delta
    method for Gaussian scores.
    """

    n: Number = math.nan
    s: Number = math.nan
    effective_tokens: Number = math.nan
    share_frozen: Number = math.nan
    sink_mass: Number = math.nan
    khat: Number = math.nan
    khat_threshold: Number = 0.7
    exponent: Number = math.nan
    exponent_low: Number = math.nan
    exponent_high: Number = math.nan
    relative_rms: Number = math.nan
    constant_ratio: Number = math.nan
    coupling: Number = math.nan
    tokens: str = "unknown"  # verdict on the tokens' tails: sub-Gaussian, heavier, ...
    scores: str = "unknown"  # and on the scores'


@dataclass(frozen=True)
class Regime:
    """The label, one sentence with the numbers behind it, and the failure signatures, each with its
    own sentence.
    """

    label: str
    reason: str
    signatures: dict[str, str]


def classify(evidence: HeadEvidence) -> Regime:
    """The regime of a head by the rule at the top of this module."""
    label, reason = _label(evidence)
    found = (_exploded(evidence), _hardmax(evidence), _mismatch(evidence))
    named = zip(SIGNATURES, found, strict=True)
    return Regime(label, reason, {name: why for name, why in named if why})


def _label(e: HeadEvidence) -> tuple[str, str]:
    needed = {
        "the number of tokens": e.n,
        "effective tokens": e.effective_tokens,
        "the share of frozen queries": e.share_frozen,
    }
    missing = " and ".join(name for name, value in needed.items() if not math.isfinite(value))
    if missing:
        why = f"No regime without {missing}: the measurement is missing or not finite."
        return "unknown", why
    share = e.effective_tokens / e.n
    counted = f"{_number(e.effective_tokens)} of {_number(e.n)} tokens are effective"
    deviation = "" if math.isnan(e.s) else f", median s = {e.s:.2f}"
    if e.sink_mass >= SINK_MASS:
        why = f"Sink tokens hold {e.sink_mass:.0%} of the weight (at least {SINK_MASS:.0%})"
        return "sink-dominated", f"{why}; {counted}."
    if e.share_frozen >= FROZEN_SHARE:
        why = (
            f"{e.share_frozen:.0%} of the queries have s^2 > 2 log n = {2 * math.log(e.n):.1f}"
            f"{deviation}, so their few largest scores take the softmax over; {counted}."
        )
        return "frozen", why
    if share >= DIFFUSE_SHARE:
        why = (
            f"{counted}, a share of {share:.2g} (at least {DIFFUSE_SHARE:g}){deviation}, "
            f"and {e.share_frozen:.0%} of the queries are frozen."
        )
        return "diffuse", why
    why = (
        f"{counted}, a share of {share:.2g} (below {DIFFUSE_SHARE:g}){deviation}, yet only"
        f" {e.share_frozen:.0%} of the queries have s^2 > 2 log n = {2 * math.log(e.n):.1f}."
    )
    return "selective", why


def _exploded(e: HeadEvidence) -> str:
    """[B]'s own check, convergence much slower than 1/sqrt(n) at Psi >> 1; else ours, the constant
    and not the rate.
    """
    if e.exponent < MUCH_SLOWER and not e.exponent_high >= SLOW and e.coupling >= LARGE_COUPLING:
        return (
            f"The error falls as n^-{e.exponent:.2f}{_interval(e)}, much more slowly than"
            f" 1/sqrt(n), and the coupling Psi is {e.coupling:.3g}, far above 1: the cause that [B]"
            " names."
        )
    large = e.constant_ratio >= EXPLODED_RATIO and e.relative_rms >= LARGE_ERROR
    if not large or e.share_frozen >= FROZEN_SHARE:
        return ""
    rate = f" although it falls as n^-{e.exponent:.2f}{_interval(e)}"
    rate = "" if math.isnan(e.exponent) else rate
    coupling = "" if math.isnan(e.coupling) else f"; the coupling Psi is {e.coupling:.3g}"
    return (
        f"The error at {_number(e.n)} tokens is still {e.relative_rms:.0%} of the limit{rate}: its"
        f" constant is {e.constant_ratio:.3g} times that of even weights{coupling}."
    )


def _hardmax(e: HeadEvidence) -> str:
    if e.share_frozen >= FROZEN_SHARE:
        why = f"{e.share_frozen:.0%} of the queries are frozen"
    elif e.effective_tokens <= SINGLE_TOKENS:
        why = f"{e.effective_tokens:.2g} tokens carry the softmax"
    else:
        return ""
    rate = f" Its error falls as n^-{e.exponent:.2f}{_interval(e)}."
    return (
        f"Weights concentrate on single tokens ({why}).{'' if math.isnan(e.exponent) else rate} The"
        " logarithmic law of hardmax [B, Prop. 5.1] is of one-dimensional symmetric Gaussian"
        " tokens: it is no prediction for this head."
    )


def _mismatch(e: HeadEvidence) -> str:
    """Heavy k-hat alone is no mismatch: Gaussian scores of large s show it too, so it is compared
    with theirs.
    """
    why = [
        f"{name} have heavier tails than a Gaussian"
        for name in ("tokens", "scores")
        if getattr(e, name) == "heavier"
    ]
    floor, beside, expected = e.khat_threshold, "", math.nan
    if math.isfinite(e.s) and math.isfinite(e.n) and e.s > 0 and e.n >= 1:
        expected = float(gaussian_khat([e.s], round(e.n))[0])
    if not math.isnan(expected):
        floor = max(floor, expected + KHAT_MARGIN)
        beside = f", where Gaussian scores of the same deviation would show {expected:.2f}"
    if e.khat > floor:
        why.append(f"k-hat is {e.khat:.2f} (threshold {e.khat_threshold:.2f}){beside}")
    return f"The theory's hypotheses are in doubt: {'; '.join(why)}." if why else ""


def _interval(e: HeadEvidence) -> str:
    known = not (math.isnan(e.exponent_low) or math.isnan(e.exponent_high))
    return f" ({e.exponent_low:.2f} to {e.exponent_high:.2f})" if known else ""


def _number(value: Number) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}" if value < 1e7 else f"{value:.3g}"

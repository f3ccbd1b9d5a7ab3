"""Which regime a head is in, by a stated rule, with the reason in words and the failure signatures
by name.

The rule, first match wins:

1. *sink-dominated*: sink tokens hold at least SINK_MASS of the softmax weight.
2. *frozen*: at least FROZEN_SHARE of the queries have s^2 > 2 log n. In the random energy model
   (Derrida 1981) the softmax over n Gaussian scores of deviation s then rests on its few largest:
   the number of effective tokens stays bounded as n grows along with s.
3. *diffuse*: at least DIFFUSE_SHARE of the n tokens are effective; for Gaussian scores that is s^2
   <= log(1/DIFFUSE_SHARE).
4. *selective*: everything between.

Signatures are named after the failures that [B] warns of. *Exploded constants*: convergence much
slower than 1/sqrt(n) where the coupling Psi is far above 1. *Hardmax regime*: weights on single
tokens. *Distribution mismatch*: tokens that are not sub-Gaussian leave the theory's hypotheses. A
head may show none or several, whatever its regime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from esscher.tails.scores import gaussian_khat

SINK_MASS = 0.5
FROZEN_SHARE = 0.5
DIFFUSE_SHARE = 0.1
SINGLE_TOKENS = 2.0  # effective tokens
KHAT_MARGIN = 0.2  # k-hat above that of Gaussian scores of the same deviation
SLOW = 0.45  # exponent below which an error falls more slowly than 1/sqrt(n)
MUCH_SLOWER = 0.4  # exponent that counts as much slower
LARGE_COUPLING = 10.0  # Psi >> 1

Number = float | int  # counts arrive as whole numbers

REGIMES = {
    "diffuse": f"weight on {DIFFUSE_SHARE:.0%} of the keys or more",
    "selective": f"weight on fewer than {DIFFUSE_SHARE:.0%} of the keys",
    "frozen": "weight on the few largest scores",
    "sink-dominated": f"{SINK_MASS:.0%} of the weight or more on sink tokens",
    "unknown": "not measured",
}
SIGNATURES = ("exploded constants", "hardmax regime", "distribution mismatch")


@dataclass(frozen=True)
class HeadEvidence:
    """What was measured of one head, by the columns of a probe; NaN or "unknown": it was not."""

    n_keys: Number = math.nan
    score_sd: Number = math.nan
    effective_tokens: Number = math.nan
    share_frozen: Number = math.nan
    sink_mass: Number = math.nan
    khat: Number = math.nan
    beta_fit: Number = math.nan
    beta_low: Number = math.nan
    beta_high: Number = math.nan
    coupling: Number = math.nan
    score_verdict: str = "unknown"
    token_verdict: str = "unknown"  # on the tokens' tails: sub-Gaussian, heavier, ...
    khat_threshold: Number = 0.7


def classify(evidence: HeadEvidence) -> tuple[str, str, dict[str, str]]:
    """The regime of a head by the rule at the top of this module, one sentence with the numbers
    behind it, and the failure signatures, each with its own sentence.
    """
    found = (_exploded(evidence), _hardmax(evidence), _mismatch(evidence))
    named = zip(SIGNATURES, found, strict=True)
    return *_label(evidence), {name: why for name, why in named if why}


def _label(e: HeadEvidence) -> tuple[str, str]:
    share = e.effective_tokens / e.n_keys
    counted = f"{_number(e.effective_tokens)} of {_number(e.n_keys)} tokens are effective"
    deviation = f", median s = {e.score_sd:.2f}"
    if e.sink_mass >= SINK_MASS:
        why = f"Sink tokens hold {e.sink_mass:.0%} of the weight (at least {SINK_MASS:.0%})"
        return "sink-dominated", f"{why}; {counted}."
    if e.share_frozen >= FROZEN_SHARE:
        why = (
            f"{e.share_frozen:.0%} of the queries have s^2 > 2 log n = {2 * math.log(e.n_keys):.1f}"
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
        f" {e.share_frozen:.0%} of the queries have s^2 > 2 log n = {2 * math.log(e.n_keys):.1f}."
    )
    return "selective", why


def _exploded(e: HeadEvidence) -> str:
    """[B]'s check: convergence much slower than 1/sqrt(n) at Psi >> 1."""
    if e.beta_fit < MUCH_SLOWER and not e.beta_high >= SLOW and e.coupling >= LARGE_COUPLING:
        return (
            f"The error falls as n^-{e.beta_fit:.2f}{_interval(e)}, much more slowly than"
            f" 1/sqrt(n), and the coupling Psi is {e.coupling:.3g}, far above 1: the cause that [B]"
            " names."
        )
    return ""


def _hardmax(e: HeadEvidence) -> str:
    if e.share_frozen >= FROZEN_SHARE:
        why = f"{e.share_frozen:.0%} of the queries are frozen"
    elif e.effective_tokens <= SINGLE_TOKENS:
        why = f"{e.effective_tokens:.2g} tokens carry the softmax"
    else:
        return ""
    rate = f" Its error falls as n^-{e.beta_fit:.2f}{_interval(e)}."
    return (
        f"Weights concentrate on single tokens ({why}).{'' if math.isnan(e.beta_fit) else rate} The"
        " logarithmic law of hardmax [B, Prop. 5.1] is of one-dimensional symmetric Gaussian"
        " tokens: it is no prediction for this head."
    )


def _mismatch(e: HeadEvidence) -> str:
    """Heavy k-hat alone is no mismatch: Gaussian scores of large s show it too, so it is compared
    with theirs.
    """
    why = [
        f"{name} have heavier tails than a Gaussian"
        for name, verdict in (("tokens", e.token_verdict), ("scores", e.score_verdict))
        if verdict == "heavier"
    ]
    floor, beside, expected = e.khat_threshold, "", math.nan
    if math.isfinite(e.score_sd) and math.isfinite(e.n_keys) and e.score_sd > 0 and e.n_keys >= 1:
        expected = float(gaussian_khat([e.score_sd], round(e.n_keys))[0])
    if not math.isnan(expected):
        floor = max(floor, expected + KHAT_MARGIN)
        beside = f", where Gaussian scores of the same deviation would show {expected:.2f}"
    if e.khat > floor:
        why.append(f"k-hat is {e.khat:.2f} (threshold {e.khat_threshold:.2f}){beside}")
    return f"The theory's hypotheses are in doubt: {'; '.join(why)}." if why else ""


def _interval(e: HeadEvidence) -> str:
    known = not (math.isnan(e.beta_low) or math.isnan(e.beta_high))
    return f" ({e.beta_low:.2f} to {e.beta_high:.2f})" if known else ""


def _number(value: Number) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}" if value < 1e7 else f"{value:.3g}"

"""What every column of the stored tables means, in one line of plain words."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FIRST", "Column", "describe", "described"]


@dataclass(frozen=True)
class Column:
    """A column as the page shows it."""

    key: str
    label: str
    help: str


_TEXT = """
layer | layer | Layer of the model, counted from 0.
head | head | Head within its layer, counted from 0; -1 is the whole layer.
kv_head | kv head | Head whose keys and values this one reads; several query heads may share one.
status | status | ok, failed or refused.
reason | reason | Why a head was not measured.
n_keys | keys | Number of keys in the pool the head was measured on; where each query has its own context, their mean.
n_keys_least | keys, least | Fewest keys that a query sees.
n_keys_most | keys, most | Most keys that a query sees.
n_queries | queries | Number of queries averaged over.
n_kept_queries | queries, kept keys | Of them, queries that the errors of kept keys and the tails are of.
reach | reach | Largest variance of the tokens in any direction, the norm of their covariance.
horizon | horizon | One-sided horizon: how far the score matrix stretches the tokens' spread.
horizon2 | two-sided horizon | Horizon with the spread of queries and keys both counted: largest typical size of a score.
coupling | coupling Ψ | Attention-reach coupling: reach times the squared horizon. Large means slow convergence.
beta_paper | exponent proved if Gaussian | Exponent 1/(2(1+32Ψ)), proved for moments of Gaussian tokens of this covariance.
beta_paper_experimental | experimental exponent | Exponent 1/(2(1+Ψ)) that experiments of the paper are compared with.
beta_sharp | sharp exponent, typical | Heuristic exponent min(1/2, 1/(1+2h²)) of the error in a typical draw of the tokens.
beta_sharp_rms | sharp exponent, rms | Heuristic exponent min(1/2, (√(1+4/h²)−1)/4) of the root mean square error.
beta_fit | measured exponent | Exponent fitted to the exact error: 0.5 is the usual square-root law, less is slower.
beta_low | exponent, low | Lower end of the measured exponent's interval.
beta_high | exponent, high | Upper end of the measured exponent's interval.
beta_mean | exponent of the mean | Exponent fitted to the sampled error of the mean output.
beta_mean_low | exponent of the mean, low | Lower end of its interval.
beta_mean_high | exponent of the mean, high | Upper end of its interval.
beta_cov | exponent of the covariance | Exponent fitted to the sampled error of the output covariance.
beta_cov_low | exponent of the covariance, low | Lower end of its interval.
beta_cov_high | exponent of the covariance, high | Upper end of its interval.
fit_status | fit | Whether the fit can be trusted, and if not why.
rms_at_n | rms error | Root mean square error when as many keys are drawn as the pool has.
relative_at_n | relative error | The same error divided by the size of the limit.
q95_at_n | 95 % quantile | Error that 95 % of the queries stay below with as many keys as the pool has.
local_slope_at_n | local slope | Slope of log error against log n at the size of the pool; -0.5 is the square-root law.
accuracy | accuracy | Estimated relative error of the numerical integrals behind the exact curve.
asymptotic_from | asymptotic from | Tokens from which the error follows its final square-root law.
effective_tokens | effective tokens | One over the summed squared weights: how many keys share the attention.
entropy | entropy | Entropy of the attention weights in nats; its exponential is another count of keys.
khat | k-hat | Shape of the weights' tail: below 0.5 averages behave, above 0.7 a few keys decide.
khat_low | k-hat, low | Lower end of the interval of k-hat.
khat_high | k-hat, high | Upper end of the interval of k-hat.
khat_label | tail | The usual verdict on k-hat.
sink_mass | sink mass | Share of the attention that goes to first and special tokens.
share_frozen | frozen queries | Share of queries whose scores spread so widely (s² > 2 log n) that a few keys take all.
score_sd | score spread | Median over queries of the standard deviation s of their scores.
delta_constant | delta constant | The error is about this over the square root of n once n is large (delta method).
freezing_tokens | freezing point | Below about this many tokens the softmax of a typical query rests on its few largest scores.
limit_rms | size of the limit | Root mean square of the output on infinitely many tokens; relative errors divide by it.
token_space | token space | Where tokens live: hidden states, or pairs of a query and a key after rotation.
regime | regime | diffuse, selective, frozen or sink-dominated.
regime_reason | why | The rule that gave the regime, with its numbers.
signatures | signatures | Signs of failure by name: exploded constants, hardmax regime, distribution mismatch.
score_verdict | scores | Whether the scores are as light-tailed as theory assumes: sub-Gaussian, heavier or lighter.
token_verdict | tokens' tails | Whether the tokens are as light-tailed as theory assumes: sub-Gaussian, heavier or lighter.
gaussian_z | Gaussian deviation | Largest deviation that as many Gaussian tokens would show.
verdict | verdict | Whether the tokens of the layer are sub-Gaussian, heavier-tailed or lighter-tailed.
point | point | Place in the sweep.
value | value | Value of what the sweep varies.
metric | error of | Which error: l2 the output itself, mean and cov its first two moments, uniform the worst query.
kind | kind | exact (an integral) or montecarlo (sampled).
n | n | Number of tokens; of kept keys, how many are kept on average.
rms | rms error | Root mean square error.
relative | relative error | Error divided by the size of the limit.
stderr | standard error | Standard error of a sampled error; 0 where exact.
q95 | 95 % quantile | Error that 95 % of the queries stay below.
local_slope | local slope | Slope of log error against log n at this n.
sampling | sampling | How keys are drawn: with replacement, or each kept at random.
exponent | measured exponent | The error falls as n to minus this.
low | low | Lower end of the interval.
high | high | Upper end of the interval.
bohbot | proved exponent | Exponent 1/(2(1+32Ψ)) proved for the moments.
bohbot_experimental | experimental exponent | Exponent 1/(2(1+Ψ)).
sharp | sharp exponent | Heuristic exponent of random-energy type.
exact_exponent | exact exponent | Exponent of the exact error over the same token numbers.
preferred_law | law | Whether a power or a logarithm describes the decay better.
repeat | repeat | Number of the draw.
squared | squared error | Squared error of one draw.
limit_squared | squared limit | Squared size of the limit.
epsilon | error allowed | Relative error that is allowed.
rule | rule | How tokens are shared between heads.
tokens | tokens | Number of tokens kept.
ratio | share kept | Share of the cache that is kept.
saved | saved | Share of the cache that is dropped.
squared_error | squared error | Squared error summed over the heads, relative to their summed squared limits.
kurtosis_max | largest kurtosis | Largest fourth standardised moment of a token coordinate; 3 for a Gaussian.
largest_z | largest deviation | Largest token coordinate in standard deviations.
"""

_KNOWN = {
    column.key: column
    for column in (Column(*(part.strip() for part in line.split("|", 2))) for line in _TEXT.strip().splitlines())
}

# Shown in this order before all others
FIRST = (
    "layer",
    "head",
    "status",
    "tokens_needed_5pct",
    "tokens_needed_10pct",
    "tokens_needed_20pct",
    "beta_fit",
    "beta_low",
    "beta_high",
    "coupling",
    "horizon",
    "horizon2",
    "effective_tokens",
    "khat",
    "sink_mass",
    "regime",
)
_NEEDED = re.compile(r"tokens_needed_(\d+(?:[._]\d+)?)pct")


def describe(key: str) -> Column:
    """The label and the explanation of a column; a column nobody described is shown under its own name."""
    if key in _KNOWN:
        return _KNOWN[key]
    needed = _NEEDED.fullmatch(key)
    if needed is not None:
        percent = needed.group(1).replace("_", ".")
        return Column(key, f"tokens for {percent} %", f"Fewest tokens whose relative error is at most {percent} %.")
    return Column(key, key.replace("_", " "), f"Column {key} of the stored table.")


def described(keys: list[str], first: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Descriptions of columns, those named first in front."""
    order = [key for key in first if key in keys]
    return [asdict(describe(key)) for key in [*order, *(key for key in keys if key not in order)]]

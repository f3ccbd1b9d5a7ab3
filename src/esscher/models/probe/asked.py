"""What is asked of a probe against what its text and its model can give, without weights."""

from __future__ import annotations

from esscher.models.probe.context import Mode, ProbeContext
from esscher.models.probe.moments import moment_ladder
from esscher.models.probe.own_context import FEWEST
from esscher.models.probe.spec import check_ladder
from esscher.models.probe.statistics.dispersion import check_spread
from esscher.models.probe.statistics.scales import check_scales
from esscher.models.probe.window import check_rules

__all__ = ["check_asked"]


def check_asked(context: ProbeContext) -> None:
    """Refuse what this text and this model cannot give: too short a text, numbers of keys, rules
    and scales that do not fit.
    """
    spec, own = context.spec, context.mode is Mode.OWN
    most = (
        max(int(context.foreseen(layer).max()) for layer in context.layers) if own else context.keys
    )
    if own and most < FEWEST:
        raise ValueError(
            f"text: no query sees {FEWEST} keys, {most} at most, so nothing can be measured; give"
            " a longer text, or longer windows (--window)"
        )
    check_ladder(spec, most)
    if spec.moments:
        _check_moments(context)
    check_rules(spec, context.cache_keys if own else context.keys)
    check_spread(context)
    check_scales(context)


def _check_moments(context: ProbeContext) -> None:
    """Refuse moments of what is no pool of the whole corpus, and of more tokens than it has."""
    if context.mode is Mode.OWN:
        raise ValueError(
            "moments: they are of tokens of the whole corpus; use --pool corpus, or leave"
            " --moments out"
        )
    moment_ladder(context.spec.moments_n, context.keys)

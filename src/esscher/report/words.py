"""Sentences about heads, from a row of the heads table."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from esscher.report.packing import shortened, text_of

__all__ = [
    "demanding",
    "head_name",
    "model_described",
    "need",
    "need_column",
    "ranked_heads",
    "sentence",
    "text_described",
    "written",
]

KEPT = "cache_kept"


def head_name(row: Mapping[str, Any]) -> str:
    """L3H5, as in the address of a head."""
    return f"L{int(row['layer'])}H{int(row['head'])}"


def written(value: Any, digits: int = 3) -> str:
    """A number as people write it: 16,384, 0.043, 3.1e+09."""
    value = float(value)
    if not math.isfinite(value):
        return "an unknown number of"
    if (value == round(value) and abs(value) < 1e7) or 10**digits <= abs(value) < 1e7:
        return f"{round(value):,}"
    return f"{value:.{digits}g}"


def need_column(heads: Any, percent: str) -> str:
    """What heads are ordered by at an error: keys that the best rule for a cache keeps of a query's
    own context.

    Where no rule was compared, tokens drawn with replacement. In an own context these may be more
    than it has, and most for heads that two keys decide, which are the easiest for any rule.
    """
    kept = _at(KEPT, percent)
    return kept if kept in heads.columns else _at("tokens_needed", percent)


def ranked_heads(heads: Any, column: str) -> Any:
    """Measured heads from the least to the most demanding.

    A head that never came down to the error within what was measured demands most of all; among
    those, the one for which any rule needs most, then the one with the largest error at the end.
    """
    measured = heads[heads["status"] == "ok"]
    if column not in measured.columns:
        return measured.head(0)
    floor = column.replace(KEPT, "floor_kept")
    ties = [
        name for name in (floor, "relative_at_n") if name != column and name in measured.columns
    ]
    order = measured.assign(
        **{f"_{name}": measured[name].fillna(math.inf) for name in (column, *ties)}
    )
    by = [f"_{name}" for name in (column, *ties)]
    return order.sort_values([*by, "layer", "head"], kind="stable").drop(columns=by)


def demanding(
    heads: Any, percent: str, unsettled: Collection[str] = (), count: int = 3, *, own: bool = False
) -> dict[str, list[dict[str, str]]]:
    """The most and the least demanding heads at an error, each with a sentence. ``own``: queries
    have contexts of their own.
    """
    rows = [
        dict(row) for row in ranked_heads(heads, need_column(heads, percent)).to_dict("records")
    ]
    if not rows:
        return {"most": [], "least": []}
    share = min(count, max(1, len(rows) // 2)) if len(rows) > 1 else 1
    told = [
        {"head": head_name(row), "text": sentence(row, percent, unsettled, own=own)} for row in rows
    ]
    return {"most": told[-share:][::-1], "least": told[:share] if len(rows) > 1 else []}


def need(row: Mapping[str, Any], percent: str, *, own: bool = False) -> str:
    """What a head needs for an error, in a few words: keys kept of those a query sees, or draws."""
    if _at(KEPT, percent) in row:
        return _kept(row, percent)
    drawn, keys = _value(row, _at("tokens_needed", percent)), _value(row, "n_keys")
    if not math.isfinite(drawn):
        return "more than was measured"
    if own or drawn > keys:
        return f"{written(drawn)} draws with replacement from {written(keys)} keys"
    return f"{written(drawn)} tokens"


def sentence(
    row: Mapping[str, Any], percent: str, unsettled: Collection[str] = (), *, own: bool = False
) -> str:
    """What a head needs, and why. ``unsettled``: the words of numbers that more text may change."""
    text = _needs(row, percent, own)
    exponent, coupling = (_value(row, key) for key in ("beta_fit", "coupling"))
    facts = []
    if math.isfinite(exponent):
        facts.append(f"its error falls with exponent {exponent:.2f}")
    if math.isfinite(coupling):
        facts.append(f"its coupling is {written(coupling)}")
    effective = _value(row, "effective_tokens")
    if math.isfinite(effective):
        facts.append(f"about {written(effective, 2)} keys share its attention")
    if facts:
        text += "; " + ", ".join(facts)
    regime = text_of(row.get("regime"))
    settled = text_of(row.get("settled"))
    status = (
        f" More text may change these numbers: {shortened(settled, 60)}."
        if settled in unsettled
        else ""
    )
    return f"{text}. It is {shortened(regime, 60)}.{status}" if regime else f"{text}.{status}"


def _needs(row: Mapping[str, Any], percent: str, own: bool) -> str:
    drawn, keys, error = (
        _value(row, key) for key in (_at("tokens_needed", percent), "n_keys", "relative_at_n")
    )
    if _at(KEPT, percent) in row:
        return f"keeps {_kept(row, percent)} for an error of {percent} %"
    if math.isfinite(drawn):
        text = f"needs {need(row, percent, own=own)} for an error of {percent} %"
        return (
            text
            if own or not 0 < drawn <= keys
            else f"{text} ({100 * drawn / keys:.2g} % of the pool)"
        )
    text = f"never came down to {percent} % within what was measured"
    return (
        f"{text} (its error at {written(keys)} tokens is {100 * error:.2g} %)"
        if math.isfinite(error)
        else text
    )


def _kept(row: Mapping[str, Any], percent: str) -> str:
    """Keys that the best rule for a cache keeps, of those that a query sees."""
    kept, keys, rule = (
        row.get(key) for key in (_at(KEPT, percent), "rule_keys", _at("cache_rule", percent))
    )
    of = f" of {written(keys)}" if keys is not None else ""
    if not math.isfinite(_value(row, _at(KEPT, percent))):
        return f"more{of} keys than were tried"
    return f"{written(kept)}{of} keys by {shortened(text_of(rule), 60)}"


def text_described(spec: Mapping[str, Any]) -> str:
    """What text a model was probed on, from the corpus of its spec: files, a dataset, or packaged
    text.
    """
    corpus = spec.get("corpus")
    corpus = corpus if isinstance(corpus, Mapping) else spec
    names = corpus.get("text") or corpus.get("texts") or ()
    names = [shortened(str(name), 120) for name in ([names] if isinstance(names, str) else names)]
    if names:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if corpus.get("dataset"):
        return shortened(f"the {corpus.get('split', 'train')} split of {corpus['dataset']}")
    return f"the packaged {corpus.get('packaged') or 'text'}"


def model_described(spec: Mapping[str, Any]) -> str:
    """The name of the model that was probed."""
    name = str(spec.get("model") or "packaged")
    return "all-MiniLM-L6-v2 (packaged)" if name == "packaged" else name


def _value(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    try:
        return float(value) if value is not None else math.nan
    except (TypeError, ValueError):
        return math.nan


def _at(name: str, percent: str) -> str:
    """The column of a number at an error."""
    return f"{name}_{percent.replace('.', '_')}pct"

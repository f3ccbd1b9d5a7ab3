"""Sentences about heads, from a row of the heads table."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from esscher.report.packing import shortened, text_of

__all__ = ["demanding", "head_name", "model_described", "ranked_heads", "sentence", "text_described", "written"]


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


def ranked_heads(heads: Any, column: str) -> Any:
    """Measured heads from the least to the most demanding.

    A head that never came down to the error within what was measured demands most of all; among those, the one with the
    largest error at the end.
    """
    measured = heads[heads["status"] == "ok"]
    if column not in measured.columns:
        return measured.head(0)
    error = measured["relative_at_n"] if "relative_at_n" in measured.columns else 0.0
    order = measured.assign(_need=measured[column].fillna(math.inf), _error=error)
    order = order.sort_values(["_need", "_error", "layer", "head"], kind="stable")
    return order.drop(columns=["_need", "_error"])


def demanding(
    heads: Any, column: str, percent: str, unsettled: Collection[str] = (), count: int = 3
) -> dict[str, list[dict[str, str]]]:
    """The most and the least demanding heads at an error, each with a sentence."""
    rows = [dict(row) for row in ranked_heads(heads, column).to_dict("records")]
    if not rows:
        return {"most": [], "least": []}
    share = min(count, max(1, len(rows) // 2)) if len(rows) > 1 else 1
    told = [{"head": head_name(row), "text": sentence(row, column, percent, unsettled)} for row in rows]
    return {"most": told[-share:][::-1], "least": told[:share] if len(rows) > 1 else []}


def sentence(row: Mapping[str, Any], column: str, percent: str, unsettled: Collection[str] = ()) -> str:
    """What a head needs, and why. ``unsettled``: the words of numbers that more text may change."""
    need, keys = _value(row, column), _value(row, "n_keys")
    if math.isfinite(need):
        text = f"needs {written(need)} tokens for an error of {percent} %"
        if math.isfinite(keys) and keys > 0:
            text += f" ({need / keys:.2g} times the pool)" if need > keys else f" ({100 * need / keys:.2g} % of the pool)"
    else:
        text = f"never came down to {percent} % within what was measured"
    error, exponent, coupling = (_value(row, key) for key in ("relative_at_n", "beta_fit", "coupling"))
    if not math.isfinite(need) and math.isfinite(error):
        text += f" (its error at {written(keys)} tokens is {100 * error:.2g} %)"
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
    status = f" More text may change these numbers: {shortened(settled, 60)}." if settled in unsettled else ""
    return f"{text}. It is {shortened(regime, 60)}.{status}" if regime else f"{text}.{status}"


def text_described(spec: Mapping[str, Any]) -> str:
    """What text a model was probed on, from the corpus of its spec: files, a dataset, or packaged text."""
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

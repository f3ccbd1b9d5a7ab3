"""What a probe measured, in a few facts: pages set those of runs beside each other, and pair heads
of one model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esscher.report.packing import shortened, text_of
from esscher.report.words import text_described, written
from esscher.runs import Run

__all__ = ["identity_of"]

POOLS = {"corpus": "all tokens of the text", "sequence": "a query's own window"}


def identity_of(run: Run, known: Mapping[str, Any], heads: Any, model: str) -> dict[str, Any]:
    """``known``: the row of the table about, where there is one.

    ``weights`` is the same for runs of one model and no others: the digest of its weights, or its
    name where nobody took that. ``pool`` is the same for runs whose queries see the same kind of
    keys, as many of them.
    """
    measured = heads[heads["status"] == "ok"]
    keys = measured["n_keys"].max() if "n_keys" in measured.columns and len(measured) else None
    pool = text_of(known.get("pool")) or text_of(run.spec.get("pool"))
    facts = {
        "model": shortened(model, 120),
        "text": text_described(run.spec),
        "tokens of text": written(known["tokens"]) if known.get("tokens") else "",
        "keys are": POOLS.get(pool, pool),
        "keys a query sees": "" if keys is None else written(keys),
        "heads measured": f"{len(measured)} of {len(heads)}, {heads['layer'].nunique()} layers",
    }
    return {
        "weights": text_of(known.get("model_sha256")) or model,
        "pool": f"{pool} {keys}",
        "facts": [[name, value] for name, value in facts.items() if value],
    }

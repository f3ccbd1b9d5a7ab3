"""How often vAttention misses: the true probability beside the delta it was asked for, on Gaussian
scores and on real heads.

``python examples/vattention_coverage.py`` (a minute or two). Epsilon and delta are .1, the base
sample is 2 % of the rest.
"""

from __future__ import annotations

import torch

import esscher as es
from esscher.corpus.documents import packaged_documents
from esscher.hf import AttentionCall, capture, load_model
from esscher.keep import AdaptiveRest, Recent, Sinks, TopK

KEYS, CONTEXTS = 16_384, 8
TOP = KEYS // 50
LAYER, TOKENS, QUERIES = 2, 510, 16


def gaussian_scores() -> None:
    """Each context is one draw of Gaussian scores of a given deviation; D is missed or not over
    draws of keys.
    """
    print(
        f"Gaussian scores, {KEYS:,} keys: how often the denominator is missed, mean over {CONTEXTS}"
        " contexts (least, most).\n"
    )
    print(
        f"{'deviation':>9}{'sigma known':>24}{'base sample':>24}{'base sample, top 2 %':>24}{'keys':>8}"  # noqa: E501
    )
    for deviation in (1.0, 1.5, 2.0, 3.0):
        generator = torch.Generator().manual_seed(0)
        k = torch.randn(KEYS, CONTEXTS, generator=generator, dtype=torch.float64)
        q = deviation * torch.eye(CONTEXTS, dtype=torch.float64)
        rules = (AdaptiveRest(base=0), AdaptiveRest(), TopK(TOP) | AdaptiveRest())
        found = [
            es.coverage(q, k, torch.ones(KEYS, 1), rule, scale=1.0, repeats=1000) for rule in rules
        ]
        cells = "".join(
            f"{f'{x.denominator.mean():.2f} ({x.denominator.min():.2f}, {x.denominator.max():.2f})':>24}"  # noqa: E501
            for x in found
        )
        print(f"{deviation:>9}{cells}{found[1].kept.mean():>8.0f}")


def real_heads() -> None:
    """The heads of one layer of the packaged model, the last queries of a window of real text."""
    loaded = load_model()
    ids = loaded.tokenizer(
        " ".join(packaged_documents("prose")),
        return_tensors="pt",
        truncation=True,
        max_length=TOKENS + 2,
    )["input_ids"]
    rule = Sinks(4) | Recent(16) | TopK(TOKENS // 50) | AdaptiveRest()
    print(
        f"\nHeads of layer {LAYER} of {loaded.name}, {rule}: denominator and output beyond 10 %,"
        f" keys of {TOKENS + 2}.\n"
    )
    print(f"{'head':>4}{'denominator':>13}{'output':>18}{'keys':>7}")

    def sink(captured: AttentionCall) -> None:
        if captured.layer != LAYER:
            return
        for head in range(captured.query.shape[1]):
            q, k, v = (
                x[0, head].double()
                for x in (captured.query[:, :, -QUERIES:], captured.key, captured.value)
            )
            found = es.coverage(q, k, v, rule, scale=captured.scale, repeats=1000)
            error = (found.output_stderr**2).sum() ** 0.5 / QUERIES
            output = f"{found.output.mean():.3f} +- {error:.3f}"
            print(
                f"{head:>4}{found.denominator.mean():>13.3f}{output:>18}{found.kept.mean():>7.0f}"
            )

    with capture(loaded.model, sink), torch.no_grad():
        loaded.model(input_ids=ids)


if __name__ == "__main__":
    gaussian_scores()
    real_heads()

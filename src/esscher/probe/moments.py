"""Mean and covariance of self-attention's outputs on n tokens of a pool, by Monte Carlo: the
protocol of [B].

n tokens are drawn with replacement from the pool; they are queries and keys. The mean (L2) and the
covariance (Frobenius) of the n outputs are compared with those of attention on the whole pool, for
each head and for the layer's heads side by side. One draw of the largest n serves every n: its
prefixes are the smaller draws.

The pool is every token of the corpus, or POOL of them, evenly spread, where the corpus has more:
the limit costs as many scores as the square of its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from esscher.attention.state import AttentionState, attention_state, init, merge
from esscher.errors.curve import ErrorCurve
from esscher.errors.rate import fit_rate
from esscher.hf.call import AttentionCall, score
from esscher.inputs import generator_for
from esscher.probe.curves import curve_rows
from esscher.probe.session import Indices, Session
from esscher.probe.statistic import LayerInfo, token_tensors
from esscher.probe.statistics.errors import CURVES, MOMENT_EXPONENTS
from esscher.runs import Unit

Tensors = tuple[Tensor, Tensor, Tensor]  # q (H, N, k), k and v (H_kv or H, N, .)

POOL = 32768
WHOLE_LAYER = -1  # the "head" of a layer's heads side by side
LARGEST = 2048  # n unless told otherwise: pairs grow as its square
SMALLEST = 64
SCORES = 2**22  # capped scores computed at once


def check_moments(session: Session) -> None:
    """Refuse moments of what is no pool of the whole corpus, and of more tokens than it has."""
    if session.own:
        raise ValueError(
            "moments: they are of tokens of the whole corpus; use --pool corpus, or leave"
            " --moments out"
        )
    moment_ladder(session.spec.moments_n, min(session.keys, POOL))


def moment_ladder(given: tuple[int, ...] | None, keys: int) -> Indices:
    """Numbers of tokens: those given, or octaves from 64 up to 2048 and an eighth of the pool."""
    if given is not None:
        if max(given) > keys:
            raise ValueError(
                f"moments_n: the pool has {keys} keys, got n = {max(given)}; give more text or"
                " smaller n"
            )
        return np.array(given, dtype=np.int64)
    largest = min(LARGEST, max(keys // 8, 4))
    ladder = SMALLEST * 2 ** np.arange(0, 8)
    ladder = ladder[ladder <= largest]
    if ladder.size >= 3:
        return ladder
    return np.unique(np.geomspace(4, largest, 6).round().astype(np.int64))


# ---- one layer


def moments_of(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (D,) and covariance (D, D) of heads' outputs (H, n, d), side by side: D = H d."""
    rows = torch.cat(list(outputs), dim=1)
    mean = rows.mean(0)
    centred = rows - mean
    return mean, centred.T @ centred / len(rows)


def block_state(
    info: LayerInfo, q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0
) -> AttentionState:
    """Attention of queries (H, m, k) on keys and values (H, B, .) with scores times ``factor``, by
    the fused kernel where scores are not capped.
    """
    if info.softcap is None:
        return attention_state(q, k, v, factor * info.scale)
    parts = []
    for rows in torch.split(q, max(1, SCORES // max(1, k[..., 0].numel())), dim=-2):
        # a cap keeps them small
        scores = factor * score(rows, k, info.scale, info.softcap).double()
        parts.append(AttentionState(scores.logsumexp(-1), scores.softmax(-1) @ v.double()))
    return AttentionState(
        torch.cat([part.lse for part in parts], -1), torch.cat([part.out for part in parts], -2)
    )


def moment_curves(
    info: LayerInfo,
    tensors: Tensors,
    heads: tuple[int, ...],
    n: Indices,
    repeats: int,
    seed: int,
    factor: float = 1.0,
) -> dict[tuple[int, str], ErrorCurve]:
    """Errors of the mean and of the covariance on n tokens against the whole pool, by head and
    metric, scores times ``factor``; WHOLE_LAYER: all heads side by side.
    """
    read = [info.kv_head(head) for head in heads]  # keys and values of each head
    q, k, v = tensors[0][list(heads)], tensors[1][read], tensors[2][read]
    pool, width = k.shape[1], v.shape[-1]
    limit_mean, limit_cov = moments_of(block_state(info, q, k, v, factor).out)
    columns = {head: slice(i * width, (i + 1) * width) for i, head in enumerate(heads)}
    columns[WHOLE_LAYER] = slice(None)
    squared = {
        (head, metric): np.zeros((repeats, len(n)))
        for head in columns
        for metric in ("mean", "cov")
    }
    for repeat in range(repeats):
        generator = generator_for(f"moments/{info.layer}", seed, "nested", repeat, "tokens")
        drawn = torch.randint(pool, (int(n[-1]),), generator=generator).to(k.device)
        queries, keys, values = q[:, drawn], k[:, drawn], v[:, drawn]
        state = init(queries, width)
        for place, (old, new) in enumerate(itertools.pairwise([0, *n.tolist()])):
            block = block_state(info, queries, keys[:, old:new], values[:, old:new], factor)
            state = merge(state, block)
            mean, cov = moments_of(state.out[:, :new])
            for head, own in columns.items():
                off_mean, off_cov = mean[own] - limit_mean[own], cov[own, own] - limit_cov[own, own]
                squared[head, "mean"][repeat, place] = off_mean.square().sum()
                squared[head, "cov"][repeat, place] = off_cov.square().sum()
    origin = (
        f"Monte Carlo, {repeats} repeats; tokens drawn with replacement from a pool of {pool},"
        " nested prefixes"
    )
    curves = {}
    for (head, metric), samples in squared.items():
        own = columns[head]
        size = limit_cov[own, own].square().sum()
        if metric == "mean":  # it may be 0, so its error is compared with the size of an output
            size = limit_mean[own].square().sum() + limit_cov[own, own].trace()
        curves[head, metric] = ErrorCurve.from_repeats(
            n, samples, metric=metric, scale=math.sqrt(float(size)), origin=origin
        )
    return curves


def moment_row(curves: Mapping[tuple[int, str], ErrorCurve], head: int) -> dict[str, float]:
    """Fitted exponents of a head's moments with their intervals: beta_mean, beta_mean_low, ...,
    beta_cov_high.
    """
    row = {}
    for metric in ("mean", "cov"):
        fit = fit_rate(curves[head, metric], raise_on_failure=False)
        row[f"beta_{metric}"] = fit.exponent
        row[f"beta_{metric}_low"], row[f"beta_{metric}_high"] = fit.interval
    return row


# ---- units of work


def moment_units(session: Session) -> list[Unit]:
    """Layers whose tokens fit into memory together; each unit is a pass over the corpus."""
    blocks = session.layer_blocks(min(session.keys, POOL), with_queries=True)
    return [{"layers": block, "moments": True} for block in blocks]


def unit_moments(session: Session, unit: Unit) -> dict[str, pd.DataFrame]:
    """Curves and exponents of some layers, as tables."""
    places = np.flatnonzero(session.pooled)
    few = np.linspace(0, len(places) - 1, min(POOL, len(places))).round().astype(np.int64)
    chosen = np.zeros_like(session.pooled)  # (W, T): which tokens are the pool
    chosen.flat[places[few]] = True
    held: dict[int, list[Tensors]] = {layer: [] for layer in unit["layers"]}
    info: dict[int, LayerInfo] = {}

    def sink(captured: AttentionCall, batch: Indices) -> None:
        info[captured.layer] = LayerInfo.of(captured)
        some = torch.from_numpy(chosen[batch]).to(captured.query.device)
        held[captured.layer].append(token_tensors(captured, some))

    session.run(np.flatnonzero(chosen.any(axis=1)), unit["layers"], sink)
    curves, exponents, scaled = list[pd.DataFrame](), list[dict[str, Any]](), list[dict[str, Any]]()
    spec, n = session.spec, moment_ladder(session.spec.moments_n, int(chosen.sum()))
    for layer in unit["layers"]:
        q, k, v = (torch.cat(parts, dim=1) for parts in zip(*held.pop(layer), strict=True))
        heads = session.heads(layer)
        found = moment_curves(info[layer], (q, k, v), heads, n, spec.moments, spec.seed)
        for head in (*heads, WHOLE_LAYER):
            exponents.append({"layer": layer, "head": head, **moment_row(found, head)})
        for (head, _), curve in found.items():
            curves.append(curve_rows(curve).assign(layer=layer, head=head))
        for scale in spec.scales:
            told = (info[layer], (q, k, v), heads, n, spec.moments, spec.seed, scale)
            again = found if scale == 1 else moment_curves(*told)
            scaled += [
                {"layer": layer, "head": head, "scale": scale, **moment_row(again, head)}
                for head in heads
            ]
    together = pd.concat(curves, ignore_index=True)
    return {
        "curves": together[[column.key for column in CURVES]],
        "moments": pd.DataFrame(exponents),
        **({"scaled_moments": pd.DataFrame(scaled)} if scaled else {}),
    }


def with_moments(
    tables: dict[str, pd.DataFrame], sampled: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """The tables of a probe with the exponents and curves that units of moments found; what failed
    stays empty.
    """
    exponents, place = [column.key for column in MOMENT_EXPONENTS], ["layer", "head", "scale"]
    known, scaled = (
        sampled.get(name, pd.DataFrame(columns=[*place, *exponents], dtype=float))
        for name in ("moments", "scaled_moments")
    )
    known = known.drop(columns="scale", errors="ignore")
    layers = known[known["head"] == WHOLE_LAYER].drop(columns="head")
    found = dict(tables)
    for name, rows, on in (
        ("heads", known, place[:2]),
        ("layers", layers, place[:1]),
        ("scales", scaled, place),
    ):
        if len(tables.get(name, ())):
            frame = tables[name].drop(columns=exponents, errors="ignore")
            found[name] = frame.merge(rows, how="left", on=on)
    curves = [each["curves"] for each in (tables, sampled) if "curves" in each]
    if curves:
        found["curves"] = pd.concat(curves, ignore_index=True)
    return found

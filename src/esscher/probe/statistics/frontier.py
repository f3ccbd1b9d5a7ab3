"""The exact error of every keep rule against the keys it keeps, in the queries' own contexts.

Rules that choose one set for all queries choose by other queries than those that are judged
(:class:`esscher.probe.session.RuleQueries`). Whether a head streams, retrieves or averages
follows from three of them: streamingllm, random, and the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from esscher.errors.curve import CURVE
from esscher.errors.keep_curve import KeepErrors, low_rank_curve, square_root
from esscher.hf.call import AttentionCall
from esscher.hf.gradients import DRAWS, FisherMetric, drawn_gradients, fisher_metric
from esscher.hf.interventions import prefill
from esscher.hf.loading import task_of
from esscher.intervals import mean_interval
from esscher.keep import Impact, LowRank, Recent, Sinks, parse
from esscher.keep.context import Context
from esscher.keep.rule import ANY_CACHE, Chance, Ranked, Rule, ranking
from esscher.probe.budget import per_query
from esscher.probe.curves import at_error, percent
from esscher.probe.session import FEWEST, RuleQueries, Session
from esscher.probe.spec import FLOOR, SHARES, ProbeSpec, kept_sizes
from esscher.probe.statistic import (
    ACCURACY,
    HEAD,
    KV_HEAD,
    LAYER,
    HeadEnd,
    HeadView,
    Numbers,
    Result,
    Statistic,
)
from esscher.runs.columns import Column, with_ends

KINDS = {
    "streams": "sinks and recent keys suffice",
    "retrieves": "needs chosen keys",
    "averages": "choosing keys saves little",
}
STREAM, CHANCE = "streamingllm", "random"  # they and the best rule tell a head's kind
STREAMS, AVERAGES = 0.25, 4.0
ERROR = 0.1  # relative, at which kinds are told
NONE = "none"  # in place of a rule, where none reaches an error
FITTED = (0.02, 0.25)  # shares of the keys that the rate of a rule is fitted between
RANK = 64  # directions of a head's Fisher metric that are stored
PLACES = 64  # last places of a window, a quarter of it at most, where gradients are taken
QUARTER = 4
FIRST = 0  # the head whose keys are counted where a number is for all


class Frontier(Statistic):
    """Errors of the judged queries of some windows, and the Fisher metric F of the head there:
    an error e of its output costs 1/2 e'F e nats.
    """

    name = "frontier"

    def check(self, session: Session) -> None:
        """Refuse rules where the pool is the corpus, and those that keep more keys surely than the
        ladder of the largest cache has.
        """
        rules = session.spec.rules
        if rules and not session.own:
            raise ValueError(
                "rules: they are of a query's own context; use --pool sequence, or leave --rules"
                " out"
            )
        if not rules:
            return
        windows = session.query_windows.tolist()
        cuts = {window: session.rule_queries(window).cut for window in windows}
        keys = max(int(session.pooled[window, :cut].sum()) for window, cut in cuts.items())
        one = torch.ones(keys, 1, dtype=torch.float64)
        context = Context(one[:1], one, one, 1.0, torch.tensor([keys - 1]))
        most = int(kept_sizes(keys).max())
        for text in rules:
            rule = parse(text)
            if isinstance(rule, LowRank):
                if any(session.loaded.shapes[layer].causal for layer in session.layers):
                    raise ValueError(
                        f"rules: {text} needs every query to see every key; use an encoder, or"
                        " leave it out"
                    )
                continue
            rule.check(context, None if rule.free is None else most)
            if most < rule.least(context):
                raise ValueError(
                    f"rules: {text} keeps more keys surely than {most}, {SHARES[-1]:.0%} of the"
                    f" {keys} that the cache of a window has; use smaller numbers or a larger"
                    " --window"
                )

    def columns(self, spec: ProbeSpec) -> tuple[Column, ...]:
        if not spec.compared:
            return ()
        reached = (column for epsilon in spec.epsilons for column in _reached(epsilon))
        return (*KIND, *reached, GRADIENT)

    def tables(self, spec: ProbeSpec) -> dict[str, tuple[Column, ...]]:
        if not spec.compared:
            return {}
        return {"frontier": FRONTIER, "rule_rates": RATES, "fisher": FISHER, "order": ORDER}

    def before(
        self, session: Session, window: int
    ) -> tuple[FisherMetric | None, Mapping[int, Tensor]]:
        """The Fisher metric of a window where rules are compared, and W_O of each layer for rules
        that ask what lies behind a head.
        """
        if window not in session.rule_windows:
            return None, {}
        rules = [parse(text) for text in session.spec.compared]
        behind = any(isinstance(part, Impact) for rule in rules for part in rule.parts)
        return window_metric(session, window), session.projections if behind else {}

    def measure(self, head: HeadView) -> Numbers:
        window = head.window
        if window is None or window.number not in window.session.rule_windows:
            return {}
        session, layer = window.session, head.info.layer
        fisher, projections = window.before[self.name]
        compared, asked = head.notes.setdefault("rules", {}), session.rule_queries(window.number)
        first = head.kv_head not in compared
        if first:  # heads that share keys are compared together
            call, rules = window.captured, [parse(text) for text in head.spec.compared]
            seen = call.visible(torch.from_numpy(asked.judged).to(call.key.device))[0, FIRST].sum(1)
            metric = None if fisher is None else fisher.of_layer[layer]
            compared[head.kv_head] = {}
            if len(seen) and bool((seen >= FEWEST).all()):
                arguments = call, asked, head.kv_head, rules, projections.get(layer), metric
                compared[head.kv_head] = compare_rules(*arguments)
        found = dict(compared[head.kv_head].get(head.head, {}))
        if first and found and fisher is not None and window.number == min(session.rule_windows):
            found["order"] = kept_first(*arguments)
        if "mse" in found:
            found["window_mse"] = found["mse"].mean(0, keepdim=True)
            found["window_kept"] = found["kept"].mean(0, keepdim=True)
        for name in found.keys() & {"nats", "cut"}:  # one number for the window
            found[name] = found[name].mean(0, keepdim=True)
        if fisher is not None:
            metric = fisher.of_layer[layer][head.head]
            stderr = float(fisher.stderr[layer][head.head])
            trace = float(metric.double().trace())
            found["trace"] = torch.tensor([[trace, stderr * trace]], dtype=torch.float64)
            found["fisher"] = square_root(metric)[:, :RANK].mT.float()
        return found

    def finish(self, found: Numbers, end: HeadEnd) -> Result:
        spec = end.spec
        if not spec.compared:
            return Result({}, {})
        gradient, tables = math.nan, {}
        if "fisher" in found:
            row = _fisher(found)
            gradient = math.sqrt(row["trace"] / row["width"])
            tables = {"fisher": pd.DataFrame([row])}
        if "mse" not in found:  # no window has enough keys
            words = {c.key: "" if c.kind == "word" else math.nan for c in self.columns(spec)}
            return Result(words | {"gradient": gradient}, tables)
        keys = float(found["keys"].double().mean())
        if len(found.get("order", ())):
            tables["order"] = pd.DataFrame(
                {"kv_head": end.kv_head, "rule": rule, "positions": row.tolist()}
                for rule, row in zip(filter(ranks, spec.compared), found["order"], strict=True)
            )
        rows = _rows(found, spec.compared).assign(
            kv_head=end.kv_head, keys=keys, queries=len(found["keys"])
        )
        curves = {str(rule): own for rule, own in rows.groupby("rule", sort=False)}
        columns = _kind(curves, keys) | {"gradient": gradient}
        for epsilon in spec.epsilons:
            needed = {rule: _needed(own, epsilon) for rule, own in curves.items()}
            columns |= {at_error(name, epsilon): value for name, value in _fewest(needed).items()}
        return Result(
            columns, tables | {"frontier": rows, "rule_rates": _rates(found, spec.compared)}
        )


def _fisher(found: Numbers) -> dict[str, Any]:
    """The mean of the windows' metrics, of which the largest directions are stored."""
    trace = float(found["trace"][:, 0].mean())
    windows, rows = len(found["trace"]), found["fisher"].double()
    factor = square_root(rows.mT @ rows / windows)[:, :RANK]
    return {
        "width": rows.shape[1],
        "rank": factor.shape[1],
        "windows": windows,
        "trace": trace,
        "stderr": float(found["trace"][:, 1].norm()) / windows,
        "share": float(factor.square().sum()) / trace if trace > 0 else 1.0,
        "factor": factor.mT.flatten().float().tolist(),
    }


def _rows(found: Numbers, rules: tuple[str, ...]) -> pd.DataFrame:
    """A row for each rule and share that every query's window has keys enough for; the same sizes
    once.
    """
    mse, kept = found["mse"].numpy(), found["kept"].numpy()
    again = np.zeros(mse.shape[1:], dtype=bool)
    again[:, 1:] = ((mse[..., 1:] == mse[..., :-1]) & (kept[..., 1:] == kept[..., :-1])).all(0)
    rms = np.sqrt(mse.mean(0))
    rule, share = np.nonzero(np.isfinite(rms) & ~again)
    limit = np.sqrt(found["limit"].double().mean().numpy())
    shares, keys = np.array(SHARES), float(found["keys"].double().mean())
    fixed = np.array([parse(text).free is None for text in rules])
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(rms == 0, 0.0, rms / limit)
    names = ("nats", "nats_low", "nats_high")
    nats: dict[str, Any] = dict.fromkeys(names, math.nan) | {"nats_windows": [[] for _ in rule]}
    if "nats" in found:
        windows = found["nats"].numpy()[:, rule, share].T
        ends = np.array([mean_interval(own, least=0.0) for own in windows]).reshape(-1, 3)
        nats = dict(zip(names, ends.T, strict=True)) | {"nats_windows": windows.tolist()}
    return pd.DataFrame(
        {
            "rule": np.array(rules, dtype=object)[rule],
            "share": np.where(fixed[rule], kept.mean(0)[rule, share] / keys, shares[share]),
            "kept": kept.mean(0)[rule, share],
            "rms": rms[rule, share],
            "relative": relative[rule, share],
            "q95": np.sqrt(np.quantile(mse, 0.95, axis=0))[rule, share],
            "accuracy": found["accuracy"].numpy().max(0)[rule],
            "cut": found["cut"].numpy().mean(0)[rule, share],
            **nats,
        }
    )


def _rates(found: Numbers, rules: tuple[str, ...]) -> pd.DataFrame:
    """b of error ~ keys^-b by rule, over the sizes of FITTED, with its interval over windows; a
    rule of fewer than three sizes, or without error there, has none.
    """
    mse, kept = found["window_mse"].numpy(), found["window_kept"].numpy()
    inside = (np.array(SHARES) >= FITTED[0]) & (np.array(SHARES) <= FITTED[1])
    rows = []
    for i, rule in enumerate(rules):
        slopes = []
        for error, keys in zip(mse[:, i], kept[:, i], strict=True):
            used = inside & (error > 0) & np.append(True, np.diff(keys) > 0)
            if used.sum() > 2:
                slopes.append(-np.polyfit(np.log(keys[used]), np.log(error[used]) / 2, 1)[0])
        if slopes:
            mean, low, high = mean_interval(slopes)
            rows.append({"rule": rule, "exponent": mean, "low": low, "high": high})
    return pd.DataFrame(rows, columns=[column.key for column in RATES[2:]])


def _needed(rows: pd.DataFrame, epsilon: float, keys: float = math.inf) -> float:
    """Fewest keys with a relative error of at most epsilon, log error linear in log keys; infinite
    where none is enough.

    Where the error is 0 there is no logarithm: then it is the first size on the ladder. ``keys``:
    all there are. With them no error is left, and beyond the ladder it falls as that of random keys
    does at last, as sqrt(1/n - 1/keys).
    """
    kept, error = rows["kept"].to_numpy(), rows["relative"].to_numpy()
    below = np.flatnonzero(error <= epsilon)
    if below.size == 0 and math.isinf(keys):
        return math.inf
    if below.size == 0:
        rest = (epsilon / error[-1]) ** 2 * max(1 / kept[-1] - 1 / keys, 0.0)
        return float(1 / (1 / keys + rest))
    i = int(below[0])
    if i == 0 or error[i] == 0 or not math.isfinite(error[i - 1]):
        return float(kept[i])
    share = math.log(error[i - 1] / epsilon) / math.log(error[i - 1] / error[i])
    return float(kept[i - 1] * (kept[i] / kept[i - 1]) ** share)


def _fewest(needed: Mapping[str, float]) -> dict[str, Any]:
    """The rule that needs the fewest keys, the floor left out; the same of rules for a cache; and
    the floor.
    """
    rules = {rule: keys for rule, keys in needed.items() if rule != FLOOR and math.isfinite(keys)}
    cached = {rule: keys for rule, keys in rules.items() if not per_query(rule)}
    best, cache = (min(each, key=each.__getitem__, default=NONE) for each in (rules, cached))
    floor = needed.get(FLOOR, math.nan)
    return {
        "best_rule": best,
        "best_kept": rules.get(best, math.nan),
        "cache_rule": cache,
        "cache_kept": cached.get(cache, math.nan),
        "floor_kept": floor if math.isfinite(floor) else math.nan,
    }


def _kind(curves: Mapping[str, pd.DataFrame], keys: float) -> dict[str, Any]:
    """The kind of a head, as its column says; empty where one of the two rules, or the floor, was
    not measured.
    """
    if not {STREAM, CHANCE, FLOOR} <= curves.keys():
        return {"kind": "", "kind_reason": ""}
    shares = {rule: _needed(own, ERROR, keys) / keys for rule, own in curves.items()}
    stream, chance, best = shares[STREAM], shares[CHANCE], min(shares, key=shares.__getitem__)
    kind = "retrieves"
    if stream <= min(STREAMS, chance):
        kind = "streams"
    elif chance <= AVERAGES * shares[best]:
        kind = "averages"
    told = dict.fromkeys((STREAM, CHANCE, best))
    needs = ", ".join(f"{rule} {shares[rule]:.1%}" for rule in told)
    reason = f"{KINDS[kind]}; of the keys, for an error of {percent(ERROR)} %: {needs}"
    return {"kind": kind, "kind_reason": reason}


# ---- exact errors of keep rules in one window: all heads that share its keys, found together


def window_metric(session: Session, window: int) -> FisherMetric | None:
    """The Fisher metric of every head at the last places of a window.

    The window is prefilled but for these places, where all heads are tapped at once: memory is that
    of a few tokens. None for a model without a language head, or without a cache.
    """
    model = session.loaded.model
    if task_of(model) != "language":
        return None
    real = session.windows.ids[window][~session.windows.padding[window]].astype(np.int64)
    ids = torch.from_numpy(real)[None].to(session.loaded.device)
    places = min(PLACES, ids.shape[1] // QUARTER)
    try:
        held = prefill(model, ids[:, :-places])
    except ValueError:  # the run then has no losses in nats, and says so
        return None
    generator = torch.Generator().manual_seed(session.spec.unit_seed({"window": window}))
    return fisher_metric(drawn_gradients(held, ids[:, -places:], DRAWS, generator))


def compare_rules(
    call: AttentionCall,
    asked: RuleQueries,
    kv_head: int,
    rules: Sequence[Rule],
    output: Tensor | None = None,
    metric: Tensor | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Errors of the judged queries, by head.

    ``output``: W_O of the layer, (heads, width, d), for rules that ask what lies behind a head.
    ``metric``: the Fisher metric of each head, (heads, width, width), for errors in nats. The
    numbers are those of :func:`_errors`.
    """
    context, size = cache_context(call, asked, kv_head, output, metric), len(asked.judged)
    found = _errors(context, rules)
    return {
        head: {name: x[i * size : (i + 1) * size] for name, x in found.items()}
        for i, head in enumerate(range(kv_head * call.shared, (kv_head + 1) * call.shared))
    }


def cache_context(
    call: AttentionCall,
    asked: RuleQueries,
    kv_head: int,
    output: Tensor | None = None,
    metric: Tensor | None = None,
) -> Context:
    """The judged queries of all heads that share keys, over the keys of the cache, with those that
    choose.
    """
    at = [torch.from_numpy(x).to(call.key.device) for x in (asked.choosing, asked.judged)]
    heads = range(kv_head * call.shared, (kv_head + 1) * call.shared)
    output, metric = (None if x is None else x[list(heads)] for x in (output, metric))
    choosers, judged = (
        replace(call.context(kv_head, rows), output=output, metric=metric) for rows in at
    )
    cached = judged.visible.any(0)  # what no judged query sees is no key of theirs
    if asked.cut is not None:
        cached[asked.cut :] = False
    if not bool(cached.all()):
        columns = cached.nonzero()[:, 0]
        choosers, judged = choosers.restrict(columns), judged.restrict(columns)
    return replace(judged, choosers=choosers)


def ranks(text: str) -> bool:
    """Whether a rule ranks keys once for all queries, and draws none."""
    rule = parse(text)
    drawn = any(isinstance(part, Chance) for part in rule.parts)
    return isinstance(rule.free, Ranked) and rule.where == ANY_CACHE and not drawn


def kept_first(
    call: AttentionCall, asked: RuleQueries, kv_head: int, rules: Sequence[Rule], *behind: Any
) -> Tensor:
    """(R, N) int32: positions of the cached keys in the window, those that are dropped last first,
    for each rule that ranks keys once.
    """
    context, rows = cache_context(call, asked, kv_head, *behind), []
    for rule in rules:
        if ranks(str(rule)):
            assert isinstance(rule.free, Ranked)
            order, sure = rule.free.order(context).double(), rule.held(context)[:1]
            first = ranking(order.view(-1, context.keys)[:1].masked_fill(sure, torch.inf))[0]
            rows.append(context.inside[first])
    return torch.stack(rows).to(torch.int32).cpu() if rows else torch.empty(0, context.keys)


def _errors(context: Context, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Of m judged queries, R rules and S shares of the cached keys; NaN where the window has too
    few keys for what a rule keeps surely.

    ``mse`` (m, R, S): E|output - limit|^2; ``kept`` (m, R, S): keys, the mean over all heads that
    share them; ``keys`` (m,): of the cache; ``limit`` (m,): |limit|^2; ``accuracy`` (m, R);
    ``nats`` (m, R, S), where heads have a metric: half of E e'F e, e = output - limit; ``cut`` (m,
    R, S): the score of the last key kept, where a rule ranks keys once for all queries.
    """
    n, place = np.unique(kept_sizes(context.keys), return_inverse=True)
    shape = (len(context.q), len(rules), len(n))
    mse, kept, nats, cut = (np.full(shape, np.nan) for _ in range(4))
    priced, accuracy = context.metric is not None, np.full(shape[:2], np.nan)
    errors = KeepErrors(context)
    for i, rule in enumerate(rules):
        possible = n >= _least(rule, context)
        if not possible.any():
            continue
        if rule.free is None:  # one point, at the first size that has so many keys
            possible = np.arange(len(n)) == possible.argmax()
        sizes = None if rule.free is None else n[possible]
        if isinstance(rule, LowRank):
            curve = low_rank_curve(context, rule, sizes)
        else:
            curve = errors.curve(rule, sizes, nats=priced)
        assert curve.queries is not None
        assert curve.kept is not None
        if curve.queries.nats is not None:
            nats[:, i, possible] = curve.queries.nats
        if isinstance(rule, Ranked) and not (rule.per_query or isinstance(rule, Sinks | Recent)):
            order = rule.order(errors.asked).double().sort(descending=True).values.cpu().numpy()
            cut[:, i, possible] = order[n[possible] - 1]
        mse[:, i, possible], kept[:, i, possible] = curve.queries.mse, curve.kept
        accuracy[:, i] = curve.accuracy
    found = {"mse": mse, "kept": kept, "cut": cut} | ({"nats": nats} if priced else {})
    return {
        **{name: torch.from_numpy(x[..., place]) for name, x in found.items()},
        "accuracy": torch.from_numpy(accuracy),
        "keys": context.visible.sum(1).cpu(),
        "limit": context.limit.square().sum(1).cpu(),
    }


def _least(rule: Rule, context: Context) -> float:
    if isinstance(rule, LowRank):
        return float(rule.rank or 1) if bool(context.visible.all()) else math.inf
    try:
        rule.check(context, None if rule.free is None else context.keys)
        return float(rule.least(context) if rule.free else rule.include(context).size.mean())
    except ValueError:  # a number of the rule is larger than the number of keys
        return math.inf


# ---- columns

KIND = (
    Column(
        "kind",
        "word",
        "kind of head",
        f"For a relative error of {percent(ERROR)} %, on this text and window: streams if {STREAM}"
        f" needs at most {STREAMS:.0%} of the keys and no more than random; averages if random"
        f" needs at most {AVERAGES:g} times the keys of the best rule; else retrieves.",
        scale="words",
        first=16,
        short="kind",
        words=tuple(KINDS),
        meanings=tuple(KINDS.values()),
    ),
    Column(
        "kind_reason", "word", "why this kind", "Keys that the rules which decide the kind need."
    ),
)
GRADIENT = Column(
    "gradient",
    "float",
    "gradient of log p",
    "Root mean square gradient of the log probability of next tokens, drawn from the model, at the"
    " head's output: what its errors count in the best split.",
    scale="log",
)


def _reached(epsilon: float) -> tuple[Column, ...]:
    error = f"{percent(epsilon)} %"

    def column(name: str, kind: Any, label: str, what: str, **more: Any) -> Column:
        return Column(at_error(name, epsilon), kind, f"{label}, {error}", what, **more)

    fewest = (
        f"Rule that reaches a relative error of {error} with the fewest keys; none if no rule does."
    )
    cache = f"Best rule for {error} among those that drop keys for good."
    kept = f"Keys that the best rule for a cache keeps at {error}."
    floor = f"Keys of the rule neyman for {error}: about the fewest of any rule."
    short = {"scale": "log", "short": f"best {error}"}
    first = {"scale": "log", "first": 17, "short": f"cache {error}"}
    return (
        column("best_rule", "word", "best rule", fewest),
        column(
            "best_kept", "float", "keys of the best rule", f"Keys it keeps at {error}.", **short
        ),
        column("cache_rule", "word", "best rule for a cache", cache, short=f"cache rule {error}"),
        column("cache_kept", "float", "keys of the cache", kept, **first),
        column(
            "floor_kept", "float", "keys of the floor", floor, scale="log", short=f"floor {error}"
        ),
    )


LOSS = (
    "Predicted divergence of next tokens when this head loses its keys, nats per token: half the"
    " mean of e'F e, e the exact error of its output under the rule, F its Fisher metric. It is"
    " measured at queries after the cut, which did not choose the keys. Losses of heads add up."
)
FRONTIER = (
    LAYER,
    HEAD,
    KV_HEAD,
    Column("rule", "word", "keep rule", "Which keys are kept, as esscher.keep writes it."),
    Column("share", "float", "share", "Share of the cache's keys that the rule was given.", "log"),
    Column("kept", "float", "keys kept", "Keys of the cache that are kept, on average.", "log"),
    Column(
        "keys",
        "float",
        "keys in the cache",
        "Keys of the cache that a query sees, on average; of a causal model those before the judged"
        " queries, as later ones are all kept.",
    ),
    *(column for column in CURVE if column.key in ("rms", "relative", "q95")),
    Column(
        "queries", "int", "queries judged", "Number of queries that the error is the mean over."
    ),
    ACCURACY,
    Column(
        "cut",
        "float",
        "score of the last key",
        "Score of the last key kept, where a rule ranks keys once for all queries: one cut over all"
        " heads keeps the keys above one score.",
    ),
    *with_ends(Column("nats", "float", "predicted KL", LOSS, "log"), "interval over windows"),
    Column("nats_windows", "list", "predicted KL, windows", "The same of every window."),
)
RATES = (
    LAYER,
    HEAD,
    FRONTIER[3],
    Column(
        "exponent",
        "float",
        "exponent",
        f"b of error ~ keys^-b from {FITTED[0]:.0%} to {FITTED[1]:.0%} of the keys, mean over"
        " windows.",
        ends=("low", "high"),
    ),
    Column("low", "float", "exponent, low", "Lower end of its interval over windows."),
    Column("high", "float", "exponent, high", "Upper end of its interval over windows."),
)
ORDER = (
    LAYER,
    HEAD,
    KV_HEAD,
    FRONTIER[3],
    Column("positions", "list", "positions", "Keys of the first window, the last dropped first."),
)
FISHER = (
    LAYER,
    HEAD,
    Column("width", "int", "width", "Width of the head's output."),
    Column("rank", "int", "rank", "Directions of the Fisher metric that are stored."),
    Column("windows", "int", "windows", "Windows that the metric is the mean of."),
    Column(
        "trace",
        "float",
        "trace F",
        "Trace of F = E g g', g the gradient of log p of drawn next tokens at the head's output.",
        "log",
    ),
    Column("stderr", "float", "standard error", "Of the trace, over draws of next tokens.", "log"),
    Column("share", "float", "share stored", "Share of the trace that the stored directions have."),
    Column(
        "factor",
        "list",
        "factor",
        "R of F = R'R, rank x width, row by row: nats of an error e are half of |R e|^2.",
    ),
)

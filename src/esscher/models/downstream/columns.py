"""What the columns of a downstream run's tables are, in words."""

from __future__ import annotations

from esscher.models.downstream.readings import READINGS
from esscher.models.downstream.sensitivity import PREDICTORS
from esscher.models.downstream.spec import DownstreamSpec
from esscher.models.probe.cache import SHARE
from esscher.runs.columns import Column, Declared

__all__ = ["columns"]

RULE = Column(
    "rule",
    "word",
    "keep rule",
    "Keep rule, as esscher.keep writes it; full: the model on all keys.",
)
SPLIT = Column(
    "split",
    "word",
    "split",
    "How many keys each head keeps: the same share of its cache (uniform), by one cut over all"
    " heads, or by a budget.",
)
SIZE = Column(
    "size",
    "float",
    "size asked",
    "What was asked for: a share of the cache, or keys of a key-value head on average.",
    "log",
)
LOW = Column("low", "float", "lower end", "Lower end of the 95 % interval over texts.")
HIGH = Column("high", "float", "upper end", "Upper end of the 95 % interval over texts.")
TEXTS = Column("texts", "int", "texts", "Number of texts.")
TEXT = Column("text", "int", "text", "Number of the text, from 0.")
LAYER = Column("layer", "int", "layer", "Layer, from 0; -1: keys are dropped in all layers.")
ENDS = ("low", "high")
READ = Column(
    "reading",
    "word",
    "reading",
    "What is read off the model.",
    words=tuple(reading.name for reading in READINGS),
    meanings=tuple(reading.help for reading in READINGS),
)
KL = Column(
    "kl",
    "float",
    "divergence",
    "Divergence of the next token when only this head, or layer, drops keys, in nats.",
    "log",
)
CELL = (RULE, SPLIT, SIZE)

TABLES: Declared = {
    "draws": (
        TEXT,
        Column(
            "horizon",
            "float",
            "horizon of the text",
            "Median over heads of the two-sided horizon on this text.",
        ),
        *CELL,
        Column("draw", "int", "draw", "Number of the draw, where chance decides."),
        Column(
            "kept",
            "float",
            "keys kept",
            "Keys kept of a key-value head, on average; where every query keeps a few, by a query.",
            "log",
        ),
        Column(
            "keys",
            "float",
            "keys held",
            "Keys that the cache of a key-value head holds, on average; where every query keeps a"
            " few, keys that a query sees.",
        ),
        READ,
        Column("value", "float", "value", "What was read on this text, of this draw alone."),
    ),
    "downstream": (
        *CELL,
        Column("share", "float", "share of the cache", SHARE, "log"),
        Column(
            "horizon",
            "word",
            "horizon third",
            "Texts of which third, by their horizon on the full model; all: every text.",
        ),
        READ,
        Column(
            "value",
            "float",
            "mean",
            "Mean over the texts, draws of a text averaged before.",
            ends=ENDS,
        ),
        LOW,
        HIGH,
        Column(
            "added",
            "float",
            "added",
            "Loss or divergence, less the full model's on the same text; mean over the texts, in"
            " nats.",
            ends=("added_low", "added_high"),
        ),
        Column("added_low", "float", "its lower end", "Lower end of its 95 % interval."),
        Column("added_high", "float", "its upper end", "Upper end of its 95 % interval."),
        Column(
            "behind",
            "float",
            "behind the best",
            "Loss or divergence, less that of the best rule at this size on the same text; mean"
            " over the texts, in nats. Best: the smallest mean on these texts, so that rules close"
            " to it look slightly worse than they are.",
            ends=("behind_low", "behind_high"),
        ),
        Column("behind_low", "float", "its lower end", "Lower end of its 95 % interval."),
        Column("behind_high", "float", "its upper end", "Upper end of its 95 % interval."),
        TEXTS,
        Column("draws", "int", "draws", "Draws of each text."),
    ),
    "layers": (
        *CELL,
        LAYER,
        Column(
            "fixed",
            "float",
            "error of attention",
            "Relative error of a layer at the full model's inputs, behind W_O.",
            ends=ENDS,
        ),
        Column(
            "independent",
            "float",
            "if heads were independent",
            "The same from the summed squares of its heads' errors.",
        ),
        Column(
            "inputs",
            "float",
            "error of inputs",
            "Relative error of what enters the layer's attention.",
        ),
        LOW,
        HIGH,
        TEXTS,
    ),
    "depth": (
        RULE,
        SPLIT,
        Column(
            "layer",
            "word",
            "layer of the error",
            "Layer whose attention error it is of; output: the model's last word.",
        ),
        Column(
            "exponent",
            "float",
            "exponent",
            "b of error ~ keys^-b over the sizes, mean over texts.",
            ends=ENDS,
        ),
        LOW,
        HIGH,
        TEXTS,
    ),
    "propagation": (
        RULE,
        SIZE,
        LAYER,
        Column(
            "error",
            "float",
            "change of the logits",
            "Relative change of the logits when this layer drops keys.",
            "log",
            ends=ENDS,
        ),
        Column(
            "first_order",
            "float",
            "first order",
            "The same by Jacobian-vector products of its heads' errors.",
            "log",
        ),
        KL,
        LOW,
        HIGH,
        TEXTS,
    ),
    "sensitivity": (
        LAYER,
        Column("head", "int", "head", "Query head, from 0: it alone drops keys."),
        Column("kv_head", "int", "key-value head", "Key-value head that it reads."),
        RULE,
        SIZE,
        KL,
        *(
            Column(name, "float", name.replace("_", " "), text, "log")
            for name, text in PREDICTORS.items()
        ),
        LOW,
        HIGH,
        TEXTS,
    ),
    "together": (
        TEXT,
        RULE,
        SIZE,
        LAYER,
        Column(
            "subset",
            "word",
            "sets of keys",
            "Whether all heads of the layer keep one random set of keys, or each its own.",
        ),
        Column(
            "exact",
            "float",
            "exact error",
            "Relative error of what the layer adds to the stream, by integrals over pairs of"
            " heads.",
        ),
        Column("first_order", "float", "small errors", "The same to first order in the sums."),
        Column(
            "independent",
            "float",
            "independent heads",
            "Root of the summed mean squares of the heads alone.",
        ),
        Column(
            "measured",
            "float",
            "drawn",
            "Root mean square over draws at the same inputs.",
            ends=ENDS,
        ),
        Column("low", "float", "lower end", "Lower end of its 95 % interval over draws."),
        Column("high", "float", "upper end", "Upper end of its 95 % interval over draws."),
    ),
    "fixed": (
        TEXT,
        RULE,
        SIZE,
        LAYER,
        Column(
            "draws", "int", "draws", "Draws that were measured; a rule without chance needs one."
        ),
        Column(
            "predicted",
            "float",
            "predicted error",
            "Relative error of what the layer adds to the stream for two queries at the full"
            " model's inputs, by integrals over which keys are kept.",
        ),
        Column(
            "measured",
            "float",
            "measured error",
            "The same in the running model, where layers hand on full outputs.",
            ends=ENDS,
        ),
        Column("low", "float", "lower end", "Lower end of its 95 % interval over draws."),
        Column("high", "float", "upper end", "Upper end of its 95 % interval over draws."),
        Column(
            "common",
            "float",
            "predicted covariance",
            "Summed products of the errors of different heads behind W_O, over the squared size of"
            " what the layer adds.",
        ),
        Column(
            "common_measured",
            "float",
            "measured covariance",
            "The same in the running model, mean over draws.",
            ends=("common_low", "common_high"),
        ),
        Column(
            "common_low", "float", "its lower end", "Lower end of its 95 % interval over draws."
        ),
        Column(
            "common_high", "float", "its upper end", "Upper end of its 95 % interval over draws."
        ),
    ),
    "agreement": (
        RULE,
        SIZE,
        Column("layers", "int", "layers", "Layers, of every text."),
        Column(
            "inside",
            "int",
            "errors inside",
            "Of how many the predicted error lies in the interval of the measured one; without"
            " chance, differs by rounding.",
        ),
        Column("common", "int", "covariances inside", "The same of the heads' covariance."),
        Column(
            "apart",
            "float",
            "largest difference",
            "Largest relative difference of a predicted and a measured error.",
        ),
        Column("draws", "int", "draws", "Draws that were measured."),
    ),
    "correlations": (
        RULE,
        SIZE,
        Column(
            "predictor",
            "word",
            "predictor",
            "Column of the table sensitivity.",
            words=tuple(PREDICTORS),
        ),
        Column(
            "rho",
            "float",
            "rank correlation",
            "Spearman's, over heads, with the measured divergence.",
            ends=ENDS,
        ),
        Column("low", "float", "lower end", "Lower end of its 95 % interval, by resampling heads."),
        Column(
            "high", "float", "upper end", "Upper end of its 95 % interval, by resampling heads."
        ),
        Column("heads", "int", "heads", "Number of heads."),
    ),
}


def columns(spec: DownstreamSpec) -> Declared:
    """By table."""
    return TABLES

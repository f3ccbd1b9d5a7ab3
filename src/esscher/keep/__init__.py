"""Which keys a query keeps: rules give inclusion probabilities and weights, and combine with |."""

from esscher.keep.chance import AdaptiveRest, MagicPIG, Neyman, Random
from esscher.keep.context import Context
from esscher.keep.named import (
    H2O,
    TOVA,
    BigBird,
    Longformer,
    LowRank,
    RestKV,
    SnapKV,
    StreamingLLM,
    VAttention,
)
from esscher.keep.position import Global, Recent, Sinks, Strided, Window
from esscher.keep.ranked import (
    CriticalKV,
    ExpectedAttention,
    Fisher,
    Heavy,
    Impact,
    KeyNorm,
    KVgrad,
    KVzip,
    KVzipPlus,
    Observed,
    TopK,
)
from esscher.keep.rule import (
    Chance,
    Inclusion,
    Pattern,
    Ranked,
    Rule,
    Union,
    parse,
    register,
    rules,
)

__all__ = [
    "H2O",
    "TOVA",
    "AdaptiveRest",
    "BigBird",
    "Chance",
    "Context",
    "CriticalKV",
    "ExpectedAttention",
    "Fisher",
    "Global",
    "Heavy",
    "Impact",
    "Inclusion",
    "KVgrad",
    "KVzip",
    "KVzipPlus",
    "KeyNorm",
    "Longformer",
    "LowRank",
    "MagicPIG",
    "Neyman",
    "Observed",
    "Pattern",
    "Random",
    "Ranked",
    "Recent",
    "RestKV",
    "Rule",
    "Sinks",
    "SnapKV",
    "StreamingLLM",
    "Strided",
    "TopK",
    "Union",
    "VAttention",
    "Window",
    "parse",
    "register",
    "rules",
]

for _rule in (
    *(Random, Neyman, MagicPIG, AdaptiveRest, LowRank),
    *(Sinks, Recent, Window, Strided, Global),
    *(
        TopK,
        KeyNorm,
        Heavy,
        CriticalKV,
        Impact,
        ExpectedAttention,
        Fisher,
        KVzip,
        KVzipPlus,
        KVgrad,
    ),
):
    register(_rule.name, _rule)
for _named in (BigBird, H2O, Longformer, RestKV, SnapKV, StreamingLLM, TOVA, VAttention):
    register(_named.__name__.lower(), _named)

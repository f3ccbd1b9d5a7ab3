"""Which keys a query keeps: rules give inclusion probabilities and weights, one rule a file, and
combine with |.
"""

from esscher.keep.chance import Importance, MagicPIG, Neyman, Random
from esscher.keep.context import Context
from esscher.keep.named import AdaptiveRest, BigBird, Longformer, LowRank, StreamingLLM, VAttention
from esscher.keep.position import Global, Recent, Sinks, Strided, Window
from esscher.keep.ranked import ExpectedAttention, Heavy, Impact, KeyNorm, TopK
from esscher.keep.rule import Chance, Inclusion, Pattern, Ranked, Rule, Union, register, rules
from esscher.keep.text import parse

__all__ = [
    "AdaptiveRest",
    "BigBird",
    "Chance",
    "Context",
    "ExpectedAttention",
    "Global",
    "Heavy",
    "Impact",
    "Importance",
    "Inclusion",
    "KeyNorm",
    "Longformer",
    "LowRank",
    "MagicPIG",
    "Neyman",
    "Pattern",
    "Random",
    "Ranked",
    "Recent",
    "Rule",
    "Sinks",
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
    *(
        Random,
        Sinks,
        Recent,
        Window,
        Strided,
        Global,
        TopK,
        Heavy,
        Impact,
        KeyNorm,
        ExpectedAttention,
    ),
    *(Neyman, MagicPIG, AdaptiveRest, LowRank),
):
    register(_rule.name, _rule)
register("bigbird", BigBird)
register("longformer", Longformer)
register("streamingllm", StreamingLLM)
register("vattention", VAttention)

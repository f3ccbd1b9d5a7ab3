"""Which keys a query keeps: rules give inclusion probabilities and weights, one rule a file, and
combine with |.
"""

from esscher.keep.chosen import Global
from esscher.keep.context import Context
from esscher.keep.expected_attention import ExpectedAttention
from esscher.keep.heavy import Heavy
from esscher.keep.impact import Impact
from esscher.keep.importance import Importance, MagicPIG
from esscher.keep.key_norm import KeyNorm
from esscher.keep.low_rank import LowRank
from esscher.keep.named import BigBird, Longformer, StreamingLLM
from esscher.keep.neyman import Neyman
from esscher.keep.random import Random
from esscher.keep.recent import Recent
from esscher.keep.registry import register, rules
from esscher.keep.rule import Chance, Inclusion, Pattern, Ranked, Rule, Union
from esscher.keep.sinks import Sinks
from esscher.keep.strided import Strided
from esscher.keep.text import parse
from esscher.keep.topk import TopK
from esscher.keep.vattention import AdaptiveRest, VAttention
from esscher.keep.window import Window

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

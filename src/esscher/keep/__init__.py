"""Which keys a query keeps: rules give inclusion probabilities and weights, and combine with |."""

import lazy_loader

from esscher.keep import chance, named, position, ranked
from esscher.keep.rule import register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

for _rule in (
    *(chance.AdaptiveRest, chance.MagicPIG, chance.Neyman, chance.Random, named.LowRank),
    *(position.Global, position.Recent, position.Sinks, position.Strided, position.Window),
    *(ranked.CriticalKV, ranked.ExpectedAttention, ranked.Fisher, ranked.Heavy, ranked.Impact),
    *(ranked.KeyNorm, ranked.KVgrad, ranked.KVzip, ranked.KVzipPlus, ranked.TopK),
):
    register(_rule.name, _rule)
for _named in named.RULES:
    register(_named.__name__.lower(), _named)

"""Which keys a query keeps: rules give inclusion probabilities and weights, and combine with |."""

import lazy_loader

from esscher.keep import chance, named, position, ranked
from esscher.keep.rule import Part, register

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

for _module in (chance, position, ranked, named):
    for _rule in vars(_module).values():
        if isinstance(_rule, type) and issubclass(_rule, Part) and "name" in vars(_rule):
            register(_rule.name, _rule)
for _named in named.RULES:
    register(_named.__name__.lower(), _named)

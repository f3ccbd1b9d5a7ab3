"""The papers' claims as data: each with the experiment that tests it, the rule that decides, and
the verdict.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

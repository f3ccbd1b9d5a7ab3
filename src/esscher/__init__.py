"""How many tokens does attention need? Limits, exact errors, rates and budgets of attention heads.

Names are imported when they are first used, so that reading a stored run does not wait for torch:
the list is the stub beside this file, which type checkers and editors read too.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

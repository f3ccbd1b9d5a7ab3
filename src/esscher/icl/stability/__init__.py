"""Flows of (O, V, K, Q) from the first weights of training: which of them get stuck, where, and how
far the two models part.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Hugging Face models as a source of tokens: load, capture q, k, v, prove parity, read off linear
maps, describe.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Exact risks of softmax and linear attention at any prompt length, and sampled ones of any
task.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Text to measure on: where it comes from, and how it becomes windows of token ids."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

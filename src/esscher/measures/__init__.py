"""Where tokens come from: laws whose infinite-token limit is known."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""In-context learning by one attention layer: tasks, risks, gradient flow."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

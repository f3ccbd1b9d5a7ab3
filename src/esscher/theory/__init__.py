"""What is known about the error in closed form: proved bounds, rates, heuristics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

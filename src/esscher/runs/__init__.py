"""Runs that survive and spread: units of work, in one process, in many or on a Dask cluster, stored
as they finish.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

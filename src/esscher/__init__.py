"""How many tokens does attention need? Limits, exact errors, rates and budgets of attention heads.

Names are imported when they are first used, so that reading a stored run does not wait for torch:
the list is the stub beside this file, which type checkers and editors read too.

Idle threads sleep, unless OMP_WAIT_POLICY says otherwise: by default they spin while they wait, and
where other processes want the cores too, small tensor operations on two threads took six times the
processor time of one thread.
"""

import os

import lazy_loader

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

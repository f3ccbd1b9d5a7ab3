"""A head on n tokens, or on infinitely many."""

from esscher.attention.finite import (
    attend,
    attend_hardmax,
    attend_linear,
    attend_prefixes,
    attend_tokens,
)
from esscher.attention.head import Head, horizon_of_covariances
from esscher.attention.limit import hardmax_limit, limit, linear_limit

__all__ = [
    "Head",
    "attend",
    "attend_hardmax",
    "attend_linear",
    "attend_prefixes",
    "attend_tokens",
    "hardmax_limit",
    "horizon_of_covariances",
    "limit",
    "linear_limit",
]

"""Queries that come from a law: the exact error integrated over it."""

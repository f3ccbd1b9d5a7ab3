"""The integrals that give the exact error at n tokens."""

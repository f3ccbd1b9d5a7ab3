"""A head on n tokens, or on infinitely many."""

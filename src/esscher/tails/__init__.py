"""Tails of tokens, scores and softmax weights, and the regime of a head."""

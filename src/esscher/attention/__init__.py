"""A head on n tokens, or on infinitely many. Attention of loaded models: esscher.hf.call."""

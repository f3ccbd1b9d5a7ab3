"""A smaller KV cache: which keys each head keeps, their refitted values, the predicted loss in
nats, and the measured loss of next tokens, embeddings, labels and planted facts.
"""

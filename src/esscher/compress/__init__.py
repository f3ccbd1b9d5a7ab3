"""What a reader of a model sees when its attention keeps a few keys: next tokens, embeddings,
labels, a needle.
"""

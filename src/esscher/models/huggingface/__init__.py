"""Hugging Face models: loading, and what their attention is given."""

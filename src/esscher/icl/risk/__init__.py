"""Exact risks of softmax and linear attention at any prompt length."""

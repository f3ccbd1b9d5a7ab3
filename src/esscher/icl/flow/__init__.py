"""Gradient flow at any prompt length, and where it ends."""

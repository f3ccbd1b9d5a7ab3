"""Paired training by SGD."""

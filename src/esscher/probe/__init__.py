"""Every head of a model measured on text."""

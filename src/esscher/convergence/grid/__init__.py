"""Keys deposited on score grids: the streaming state of the exact error."""

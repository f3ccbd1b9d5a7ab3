"""From an error curve to its rate."""

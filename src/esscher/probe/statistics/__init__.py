"""Statistics of a head, each one class; ``registry`` lists them."""

"""From results to pictures; computes nothing."""

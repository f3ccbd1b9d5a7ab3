"""Monte Carlo on laws: sampled prompts against the limit."""

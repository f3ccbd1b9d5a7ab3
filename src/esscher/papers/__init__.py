"""The papers' claims, each with its experiment, the rule that decides it, and the verdict."""

"""The papers' claims and numbered statements, each with what decides it and the verdict."""

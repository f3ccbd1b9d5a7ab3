"""The bounds of Boursier and Boyer [S]."""

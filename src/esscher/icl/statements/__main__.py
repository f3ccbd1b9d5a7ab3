"""The page "what [S] says and what we find": ``python -m esscher.icl.statements >
docs/theory/statements.md``.
"""

from __future__ import annotations

from esscher.icl.statements.table import page

if __name__ == "__main__":
    print(page(), end="")

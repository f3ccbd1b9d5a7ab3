"""Every numbered statement of [S] with a number and a verdict, and the page they make: ``python -m
esscher.papers.statements > docs/theory/statements.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from esscher.papers import statements_attention, statements_training
from esscher.papers.statements_attention import Statement

KNOWN = (*statements_attention.STATEMENTS, *statements_training.STATEMENTS)


def place(statement: Statement) -> tuple[int, str]:
    """The body of the paper, then its appendices by letter; equations and appendices without a
    lemma with theirs.
    """
    where = {"Appendix B.2": "B.2", "Appendix F.3": "F.3", "Equation (20)": "C.99"}.get(
        statement.number
    )
    number = where or statement.number.split()[-1]
    return (0 if number[0].isdigit() else 1, number)


STATEMENTS: tuple[Statement, ...] = tuple(sorted(KNOWN, key=place))

HEAD = r"""# What [S] says and what we find

Every numbered statement of {cite:t}`boursier2025softmax`, as printed, as mended where it has to be, with a number computed here
and a verdict. The page is written by `python -m esscher.papers.statements` from the table that the tests run
(`tests/papers/test_statements.py`): each number comes from a check that would contradict the verdict if it came out otherwise.
Proofs and counterexamples are on {doc}`bounds`. Letters: $x = \sigma^2|Uz|^2$, F the root of $\mathbb{E}|f|^4$, C as there.

*Holds*: as printed. *Holds, mended*: true once a hypothesis, a constant or a step of the proof is put right. *False as printed,
mended*: a counterexample is given, and what is true instead. Bounds that are proved are mostly far above what they bound.

"""  # noqa: E501


def measured(statement: Statement) -> str:
    finding = statement.check()
    if not finding.agrees:
        raise RuntimeError(
            f"{statement.number}: what is found contradicts the verdict {statement.verdict!r}:"
            f" {finding.measured}"
        )
    return finding.measured


def page(found: Callable[[Statement], str] = measured) -> str:
    """The page as Markdown; ``found`` says what we find."""
    counted = Counter(statement.verdict for statement in STATEMENTS)
    lines = [
        HEAD,
        "; ".join(f"*{verdict}*: {count}" for verdict, count in counted.most_common()) + ".\n\n",
    ]
    lines += ["| statement | verdict |\n|---|---|\n"]
    lines += [f"| {statement.number} | {statement.verdict} |\n" for statement in STATEMENTS]
    for statement in STATEMENTS:
        lines += [
            f"\n## {statement.number}: {statement.verdict}\n\n",
            f"{statement.says[:1].upper()}{statement.says[1:]}.\n\n",
            f"- Printed: `{statement.printed}`\n",
            f"- Mended: {statement.mended}\n",
            f"- Found: {found(statement)}\n",
        ]
    return "".join(lines)


if __name__ == "__main__":
    print(page(), end="")

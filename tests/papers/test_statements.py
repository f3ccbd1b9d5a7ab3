"""Every numbered statement of [S]: its check runs and agrees with the verdict, and the page is what
the table makes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esscher.papers.statements import STATEMENTS, page
from esscher.papers.statements_attention import Statement

PAGE = Path(__file__).parents[2] / "docs" / "theory" / "statements.md"
REMEDY = "run python -m esscher.papers.statements > docs/theory/statements.md"
PAPER = [
    *(
        "Lemma 2.1",
        "Proposition 3.1",
        "Remark 3.2",
        "Assumption 3.3",
        "Proposition 3.4",
        "Remark 4.1",
        "Assumption 4.2",
    ),
    *(
        "Theorem 4.3",
        "Assumption 5.1",
        "Theorem 5.2",
        "Remark 5.3",
        "Lemma C.1",
        "Lemma C.2",
        "Corollary C.3",
        "Lemma C.4",
    ),
    *(
        "Assumption C.5",
        "Lemma C.6",
        "Lemma C.7",
        "Assumption C.8",
        "Lemma C.9",
        "Lemma D.1",
        "Lemma D.2",
        "Lemma E.1",
    ),
    *("Lemma E.2", "Corollary E.3", "Lemma E.4", "Corollary E.5", "Lemma F.1"),
]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.number)
def test_what_is_found_agrees_with_the_verdict_and_stands_on_the_page(statement: Statement) -> None:
    finding = statement.check()
    assert finding.agrees, finding.measured
    assert f"- Found: {finding.measured}\n" in PAGE.read_text("utf-8"), REMEDY


def test_every_numbered_statement_of_the_paper_is_there_once() -> None:
    numbers = [statement.number for statement in STATEMENTS]
    assert [number for number in numbers if number in PAPER] == PAPER
    assert sorted(set(numbers) - set(PAPER)) == ["Appendix B.2", "Appendix F.3", "Equation (20)"]


def test_the_page_is_what_the_table_makes() -> None:
    """But for the numbers found, which the first test compares."""
    kept = re.sub(r"- Found: .*", "- Found: ", PAGE.read_text("utf-8"))
    assert kept == page(lambda _: ""), REMEDY

"""Every numbered statement of [S]: its check runs, agrees with the verdict, and what it finds
stands on the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esscher.papers.statements import CHECKS, fill, found

PAGE = (Path(__file__).parents[2] / "docs" / "theory" / "statements.md").read_text("utf-8")
REMEDY = "run python -m esscher.papers.statements docs/theory/statements.md"
PAPER = """Lemma 2.1, Proposition 3.1, Remark 3.2, Assumption 3.3, Proposition 3.4, Remark 4.1,
Assumption 4.2, Theorem 4.3, Assumption 5.1, Theorem 5.2, Remark 5.3, Lemma C.1, Lemma C.2,
Corollary C.3, Lemma C.4, Assumption C.5, Lemma C.6, Lemma C.7, Assumption C.8, Lemma C.9,
Lemma D.1, Lemma D.2, Lemma E.1, Lemma E.2, Corollary E.3, Lemma E.4, Corollary E.5, Lemma F.1"""


@pytest.mark.parametrize("number", CHECKS)
def test_what_is_found_agrees_with_the_verdict_and_stands_on_the_page(number: str) -> None:
    section = PAGE.split(f"\n## {number}: ")[1].split("\n## ")[0]
    assert f"- Found: {found(number)}\n" in section + "\n", REMEDY


def test_every_numbered_statement_of_the_paper_is_there_once() -> None:
    sections = re.findall(r"\n## ([^:]+): (.*)", PAGE)
    numbers = [number for number, _ in sections]
    assert sorted(numbers) == sorted(CHECKS)
    paper = [" ".join(number.split()) for number in PAPER.split(",")]
    assert [number for number in numbers if number in paper] == paper
    assert sorted(set(numbers) - set(paper)) == ["Appendix B.2", "Appendix F.3", "Equation (20)"]
    assert re.findall(r"\n\| (\w+ \S+) \| (.*) \|", PAGE) == sections  # the table above them


def test_the_page_is_filled_with_what_is_found() -> None:
    filled = fill(PAGE, lambda number: f"<{number}>")
    assert re.findall(r"- Found: <(.*)>", filled) == re.findall(r"\n## ([^:]+):", PAGE)

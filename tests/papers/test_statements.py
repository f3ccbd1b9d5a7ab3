"""Every numbered statement of [S]: its check runs, agrees with the verdict, and what it finds
stands on the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.theory.statements import CHECKS, fill

PAGE = (Path(__file__).parents[2] / "docs" / "theory" / "statements.md").read_text("utf-8")
REMEDY = "run python docs/theory/statements.py"
PAPER = """Lemma 2.1, Proposition 3.1, Remark 3.2, Assumption 3.3, Proposition 3.4, Remark 4.1,
Assumption 4.2, Theorem 4.3, Assumption 5.1, Theorem 5.2, Remark 5.3, Lemma C.1, Lemma C.2,
Corollary C.3, Lemma C.4, Assumption C.5, Lemma C.6, Lemma C.7, Assumption C.8, Lemma C.9,
Lemma D.1, Lemma D.2, Lemma E.1, Lemma E.2, Corollary E.3, Lemma E.4, Corollary E.5, Lemma F.1"""


@pytest.mark.parametrize("number", CHECKS)
def test_what_is_found_agrees_with_the_verdict_and_stands_on_the_page(number: str) -> None:
    section = next(own for own in PAGE.split("\n## ") if own.startswith(f"{number}: "))
    assert fill(f"\n## {section}") == f"\n## {section}", REMEDY


def test_a_check_that_contradicts_the_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ((False, "1 2"), (True, "1 2 3")):
        monkeypatch.setitem(CHECKS, "Lemma 2.1", lambda found=found: found)
        with pytest.raises(RuntimeError, match=r"Lemma 2.1: expected what the page says"):
            fill("\n## Lemma 2.1: holds\n\n- Found: **3** below **4**\n")
    monkeypatch.setitem(CHECKS, "Lemma 2.1", lambda: (True, "1 2"))
    filled = fill("# Top\n## Lemma 2.1: holds\n\n- Found: **3** below **4**.\n")
    assert filled == "# Top\n## Lemma 2.1: holds\n\n- Found: **1** below **2**.\n"


def test_every_numbered_statement_of_the_paper_is_there_once() -> None:
    sections = re.findall(r"\n## ([^:]+): (.*)", PAGE)
    numbers = [number for number, _ in sections]
    assert sorted(numbers) == sorted(CHECKS)
    paper = [" ".join(number.split()) for number in PAPER.split(",")]
    assert [number for number in numbers if number in paper] == paper
    assert sorted(set(numbers) - set(paper)) == [
        *("Appendix B.2", "Appendix F.2", "Appendix F.3", "Equation (14)", "Equation (20)"),
    ]

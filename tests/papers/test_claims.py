"""Every claim: what is said of it is whole, its rule decides made-up data rightly, its runs are
specs that exist.
"""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from esscher.papers import claims_laws
from esscher.papers.claim import Claim, EvidenceSpec, Tables
from esscher.papers.judge import all_claims, compute, find_claim, register
from esscher.runs import RunSpec, find_job
from tests.papers.made import (
    made_false,
    made_hardmax_beyond,
    made_neyman,
    made_prose,
    made_slopes,
    made_sweep,
    made_true,
    made_uniform,
)

CLAIMS = all_claims()


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rule_tells_true_from_false(name: str, seed: int) -> None:
    decide = CLAIMS[name].decide
    assert decide(made_true(name, seed)).verdict == "supported"
    assert decide(made_false(name, seed)).verdict == "refuted"


def test_every_entry_of_the_file_of_claims_has_a_rule() -> None:
    file = Path(claims_laws.__file__).with_name("claims.yaml")
    entries = yaml.safe_load(file.read_text("utf-8"))
    assert list(entries) == list(CLAIMS)
    assert {key for entry in entries.values() for key in entry} == {
        *("source", "statement", "hypothesis", "rule", "refuted_by", "seen", "thresholds", "runs")
    }


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_said_of_a_claim_is_whole(name: str) -> None:
    claim = CLAIMS[name]
    said = claim.described()
    assert all(value for key, value in said.items() if key != "seen")
    assert json.loads(json.dumps(said)) == said
    assert name == claim.id
    assert name.split("-")[1] == str(claim.number)  # b-1-...: paper, number, what
    assert find_claim(str(claim.number)) is claim


@pytest.mark.parametrize("name", CLAIMS)
def test_runs_are_specs_of_jobs_and_follow_the_seed(name: str) -> None:
    for scale in ("quick", "full"):
        first, other = CLAIMS[name].runs(scale, 0), CLAIMS[name].runs(scale, 1)
        assert first.keys() == other.keys()
        assert first
        for run, spec in first.items():
            assert isinstance(spec, find_job(spec.job).spec)
            assert spec == CLAIMS[name].runs(scale, 0)[run]
            assert spec.seed != other[run].seed


SMALL = {
    "repeats": 80,
    "draws": 20,
    "pools": 1,
    "cases": 1,
    "dim": 2,
    "rank": 2,
    "tokens": 50,
    "square": 1,
    "lengths": [100],
}


@pytest.mark.parametrize("name", CLAIMS)
def test_made_up_tables_have_no_column_that_runs_lack(name: str) -> None:
    """A rule that reads a column of its made-up tables alone passes every test of it, and fails
    when it is run.
    """
    claim = CLAIMS[name]
    known = {run: known_columns(spec) for run, spec in claim.runs("quick", 0).items()}
    for made in (made_true(name, 0), made_false(name, 0)):
        for run, tables in made.items():
            for table, frame in tables.items():
                assert set(frame.columns) <= known[run][table], f"{run}, {table}"


def known_columns(spec: RunSpec) -> dict[str, set[str]]:
    """The columns of every table of a run: as its job declares them, or, of evidence, as a part of
    each kind measures them at its smallest size.
    """
    if not isinstance(spec, EvidenceSpec):
        return {
            table: {column.key for column in columns}
            for table, columns in find_job(spec.job).columns(spec).items()
        }
    kinds = {tuple(part): (i, part) for i, part in enumerate(spec.parts)}  # by their settings
    found: set[str] = set()
    for i, part in kinds.values():
        small = {key: SMALL.get(key, value) for key, value in part.items()}
        found.update(*compute(spec, {"part": i, **small})["evidence"])
    return {"evidence": found}


def test_errors_that_fall_like_the_root_do_not_support_claim_1() -> None:
    decided = find_claim("1").decide(made_sweep((0.5, 0.5), 3))
    assert decided.verdict != "supported"


@pytest.mark.parametrize(
    ("name", "false"),
    [
        ("b-2-proved-rate", made_sweep((0.45, 0.27), 0)),  # all below the bound, by a tenth
        ("b-4-uniform", made_uniform(0.0, 0)),  # C(R) like a power of R
        ("o-32-sharp", made_slopes(0.1, 0)),
        ("o-34-neyman", made_neyman((0.3, 1.0), 0)),
        ("b-39-hardmax-beyond", made_hardmax_beyond((0.06, 0.3), 0)),  # in heads alone
    ],
)
def test_each_part_of_a_rule_refutes(name: str, false: Tables) -> None:
    assert CLAIMS[name].decide(false).verdict == "refuted"


def test_heads_within_their_intervals_of_one_half_decide_nothing() -> None:
    """Point estimates of the covariance, all above 1/2, refuted it before."""
    tables = made_prose((0.4, 0.2, 0.51, 0.505), 0)
    assert find_claim("7").decide(tables).verdict == "undecided"


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^claim: expected an id or a number that .*got 'b-99'$"):
        find_claim("b-99")


def test_an_id_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"id: expected paper, number and name.*got 'half'"):
        replace(find_claim("1"), id="half").described()


def test_a_claim_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From outside: a module with a Claim, named as module:NAME."""
    source = Path(__file__).with_name("outside_claim.py").read_text("utf-8")
    (tmp_path / "my_claim.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    claim = register("my_claim:TAIL")
    assert isinstance(claim, Claim)
    assert all_claims()["my_claim:TAIL"] is claim


DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_verdicts_is_current() -> None:
    """docs/verdicts.csv, which ``python docs/what_holds.py`` writes from the stored verdicts."""
    what_holds = runpy.run_path(str(DOCS / "what_holds.py"))
    assert (DOCS / "verdicts.csv").read_text("utf-8") == what_holds["table"]()


def test_the_printed_verdicts_are_of_these_claims_and_no_seed_turns_one_round() -> None:
    """What the documentation is made of: every claim as it stands now, and of each no two runs that
    contradict.
    """
    found: dict[str, set[str]] = {name: set() for name in CLAIMS}
    for file in ("reproduce.json", "reproduce_quick_seed0.json", "reproduce_quick_seed1.json"):
        records = json.loads((DOCS / file).read_text("utf-8"))["claims"]
        names = {record["id"] for record in records}
        assert [record["id"] for record in records] == [name for name in CLAIMS if name in names]
        assert file != "reproduce.json" or names == {*CLAIMS}
        for record in records:
            said = CLAIMS[record["id"]].described()
            assert {key: record[key] for key in said} == said, (
                f"{file}: esscher reproduce {record['id']} was not run since"
            )
            found[record["id"]].add(record["verdict"])
    assert [name for name, verdicts in found.items() if {"supported", "refuted"} <= verdicts] == []

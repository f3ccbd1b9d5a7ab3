"""A spec is the same as an object, as a YAML file and as flags, and its hash is what it says."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from esscher.runs import JOBS, Job, RunSpec, find_job, read_spec, register
from esscher.runs import spec as spec_module
from tests.runs.job import WALK, WalkSpec


def test_hash_is_sha256_of_sorted_json() -> None:
    text = (
        '{"corpus":"","deaths":99,"device":"cpu","dtype":"float64","dying":[],"job":"walk","memory":"",'
        '"open_steps":false,"raising":[2],"seconds":0.1,"seed":7,"steps":5,"telling":0,"threads":1,"uneven":false,'
        '"walks":6,"work":0}'
    )
    assert (
        WalkSpec(seed=7, seconds=0.1, raising=(2,)).hash
        == hashlib.sha256(text.encode()).hexdigest()
    )


def test_object_file_and_flags_are_one(tmp_path: Path) -> None:
    spec = WalkSpec(walks=9, seconds=1e-3, raising=(1, 4))
    file = tmp_path / "spec.yaml"
    file.write_text(
        "job: walk\nwalks: 9\nseconds: 1e-3  # YAML 1.1 calls this a string\nraising: [1, 4]\n",
        "utf-8",
    )
    flags = {"walks": "9", "seconds": "0.001", "raising": ["1", "4"]}
    assert (
        read_spec(file) == read_spec({"job": "walk"}, **flags) == WalkSpec.read({}, **flags) == spec
    )
    file.write_text(yaml.safe_dump(spec.as_dict()), "utf-8")
    assert read_spec(file) == spec
    assert read_spec(file, walks=10) == WalkSpec(walks=10, seconds=1e-3, raising=(1, 4))
    assert read_spec(file).hash == spec.hash != read_spec(file, walks=10).hash


@given(st.integers(0, 2**40), st.floats(0, 1e300), st.lists(st.integers(), max_size=3))
def test_hash_survives_the_way_through_yaml(seed: int, seconds: float, raising: list[int]) -> None:
    spec = WalkSpec(seed=seed, seconds=seconds, raising=tuple(raising))
    assert WalkSpec.read(yaml.safe_load(yaml.safe_dump(spec.as_dict()))).hash == spec.hash


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        WalkSpec().walks = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"walsk": 3}, "walsk: no such field"),
        ({"walks": "many"}, "walks: .*integer.*'many'"),
        ({"seed": -1}, "seed: .*greater than or equal to 0"),
        ({"threads": 0}, "threads"),
        ({"seconds": float("nan")}, "^seconds: expected finite numbers, .* got nan$"),
        ({"seconds": object()}, "^seconds: expected finite numbers"),
        ({"job": "other"}, "job"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        WalkSpec.read(fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "'name: value' lines, got list"),
        ("a: [\n", "not YAML"),
        ("1: 2\n", "'name: value'"),
        ("", "NoneType"),
    ],
)
def test_bad_files_are_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=words):
        read_spec(file)
    with pytest.raises(ValueError, match="No such file"):
        read_spec(tmp_path / "none.yaml")


def test_units_have_seeds_of_their_own() -> None:
    seeds = {WalkSpec(seed=s).unit_seed({"walk": w}) for s in range(20) for w in range(20)}
    assert len(seeds) == 400
    assert max(seeds) < 2**60
    assert WalkSpec(steps=3).unit_seed({"a": 1, "b": 2}) == WalkSpec(steps=4).unit_seed(
        {"b": 2, "a": 1}
    )


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The table of jobs, put back afterwards."""
    monkeypatch.setattr(spec_module, "JOBS", dict(JOBS))
    return spec_module.JOBS


def test_only_registered_names_are_jobs(registry: dict[str, str]) -> None:
    assert find_job("walk") is WALK
    for name in ("os:system", "tests.runs.job:WALK", "nothing", ""):
        with pytest.raises(ValueError, match=r"not registered.*walk"):
            read_spec({"job": name})
    with pytest.raises(ValueError, match="name of a job, got None"):
        read_spec({})


def test_registering(registry: dict[str, str]) -> None:
    register("walk", "tests.runs.job:WALK")
    with pytest.raises(ValueError, match="already registered"):
        register("walk", "elsewhere:WALK")
    with pytest.raises(ValueError, match="module:attribute"):
        register("other", "elsewhere")
    for entry in ("tests.runs.job:units", "tests.runs.job:WALK", "tests.runs.job:NONE"):
        registry["other"] = entry
        with pytest.raises(ValueError, match="is not a Job of that name"):
            find_job("other")


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ([], "no unit of work"),
        ([{"a": 1}, {"a": 1}], "two units are the same"),
        ([{"a": {1}}], "JSON"),
    ],
)
def test_units_are_plain_and_distinct(units: list[Any], words: str) -> None:
    def listed(spec: RunSpec) -> list[Any]:
        return units

    with pytest.raises(ValueError, match=words):
        spec_module.units_of(Job("walk", WalkSpec, listed, WALK.compute), WalkSpec())


def test_units_are_as_any_process_gets_them() -> None:
    """A tuple would come back from JSON as a list, and a number as a name as a string."""

    def listed(spec: RunSpec) -> list[Any]:
        return [{"pair": (1, 2), "at": {3: 0.1}}]

    assert spec_module.units_of(Job("walk", WalkSpec, listed, WALK.compute), WalkSpec()) == [
        {"pair": [1, 2], "at": {"3": 0.1}}
    ]

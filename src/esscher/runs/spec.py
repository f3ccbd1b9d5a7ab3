"""The spec of a run: frozen, the same as a YAML file, as flags and as a Python object; its hash is
its identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from esscher.runs.errors import field_lines
from esscher.runs.files import read_yaml

_S = TypeVar("_S", bound="RunSpec")
MOST_THREADS = 1024
Seed = Annotated[int, Field(ge=0, lt=2**63, description="seed of everything random")]
Unit = dict[str, Any]  # names one piece of work; whatever JSON can hold


def canonical_json(value: Any) -> str:
    """One text per value: keys sorted, no spaces, shortest floats that read back the same, no
    NaN.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


class Plain(BaseModel):
    """A part of a spec: frozen, and a misspelt field is an error that names the allowed ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSpec(BaseModel):
    """Base of every job's spec. A subclass fixes ``job`` by a Literal and adds its own fields
    (tuples, not lists).

    Everything that can change a bit of the result belongs here, ``threads`` included: each unit is
    computed with exactly that many threads in whichever process, since the order of a parallel sum
    depends on it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    job: str
    seed: Seed = 0
    device: str = Field(
        default="cpu", description="where tensors live, such as cpu, cuda or cuda:1"
    )
    dtype: str = Field(default="float64", description="floating-point type of the computation")
    threads: int = Field(default=1, ge=1, le=MOST_THREADS, description="threads of each unit")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, defaults included."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return str(yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True))

    @property
    def hash(self) -> str:
        """sha256 of the canonical JSON of all fields: two specs of one hash are the same run."""
        return digest(self.as_dict())

    def unit_seed(self, unit: Unit) -> int:
        """A seed for one unit, from the spec's seed and the unit alone: the order of units does not
        matter.
        """
        return int(digest([self.seed, unit])[:15], 16)

    @classmethod
    def read(cls: type[_S], source: str | Path | Mapping[str, Any], **changes: Any) -> _S:
        """The spec from a YAML file or a mapping; ``changes`` (flags) replace fields. Bad input is
        a ValueError.
        """
        origin = str(source) if isinstance(source, str | Path) else cls.__name__
        fields = {**read_mapping(source), **changes}
        try:
            return cls.model_validate_json(canonical_json(fields))
        except ValidationError as cause:
            raise ValueError(f"{origin}: {field_lines(cause)}") from cause
        except (TypeError, ValueError, RecursionError) as cause:
            raise ValueError(
                f"{origin}: expected plain values (numbers, strings, lists): {cause}"
            ) from cause


def read_mapping(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Fields from a YAML file (or a mapping, as it is)."""
    if isinstance(source, Mapping):
        return dict(source)
    fields = read_yaml(source)
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError(f"{source}: expected 'name: value' lines, got {type(fields).__name__}")
    return fields

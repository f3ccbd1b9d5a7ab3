"""A law written as plain data, as in a YAML file: its name there, its fields, and the law they
build.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import torch
from pydantic import BeforeValidator, Field, PositiveFloat, SerializeAsAny, create_model

from esscher.runs.spec import Plain

if TYPE_CHECKING:  # laws declare their fields, so these cannot import laws
    from esscher.measures.base import Measure

MOST_DIM = 16_384  # a covariance of this size is 2 GB in float64

Dim = Annotated[int, Field(ge=1, le=MOST_DIM)]


class LawFields(Plain):
    """The fields of one law. ``fields_of`` makes them for a law of ``dim`` and numbers above 0;
    other laws subclass this with ``law: Literal[<name>]``, their arguments, and ``build``. A law
    can be built from data once Python has read its file.
    """

    measure: ClassVar[type[Measure]]
    size: ClassVar[str] = "scale"  # the field that says how wide the law is

    law: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        (name,) = get_args(cls.model_fields["law"].annotation)
        LAWS[name] = cls

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        """The law itself."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "law"}
        return self.measure(**given, dtype=dtype, device=device)


LAWS: dict[str, type[LawFields]] = {}
"""Name -> fields of every law that Python has read."""


def fields_of(measure: type[Measure], size: str = "scale") -> type[LawFields]:
    """The fields of a law whose positional arguments are ``dim`` and numbers above 0, read off its
    constructor; bind them to ``<Law>Fields`` beside the law, whose name in small letters they have.
    """
    fields: dict[str, Any] = {"law": (Literal[measure.__name__.lower()], ...)}
    for name, argument in inspect.signature(measure).parameters.items():
        if argument.kind is argument.POSITIONAL_OR_KEYWORD:
            kind = Dim if name == "dim" else PositiveFloat
            fields[name] = (kind, ... if argument.default is argument.empty else argument.default)
    made: type[LawFields] = create_model(
        f"{measure.__name__}Fields", __base__=LawFields, __module__=measure.__module__, **fields
    )
    made.measure, made.size = measure, size
    return made


def read_law(value: Any) -> Any:
    """Check data as the fields of the law it names."""
    if isinstance(value, LawFields):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping of fields, got {type(value).__name__}")
    name, known = value.get("law"), all_laws()
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"law: expected one of {', '.join(map(repr, sorted(known)))}, got {name!r}"
        )
    return known[name].model_validate(value)


def all_laws() -> dict[str, type[LawFields]]:
    """LAWS, once those of this package are read too."""
    from esscher import measures  # laws import this file

    for name in dir(measures):
        getattr(measures, name)
    return LAWS


LawSpec = Annotated[SerializeAsAny[LawFields], BeforeValidator(read_law)]

"""A law written as plain data, as in a YAML file: its name there, its fields, and the law they
build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError

from esscher.runs.spec import Plain

if TYPE_CHECKING:  # laws declare their fields, so these cannot import laws
    from esscher.measures.base import Measure

MOST_DIM = 16_384  # a covariance of this size is 2 GB in float64

Dim = Annotated[int, Field(ge=1, le=MOST_DIM)]


class LawFields(Plain):
    """The fields of one law. A law's file subclasses this with ``law: Literal[<its name>]``, the
    arguments of the law as fields, and the class of the law as ``measure``.

    A law can be built from data once Python has read its file: nothing else lists it, and no file
    of a run can add one.
    """

    measure: ClassVar[type[Measure]]
    size: ClassVar[str] = "scale"  # the field that says how wide the law is

    law: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        names = get_args(cls.model_fields["law"].annotation)
        if len(names) != 1 or not isinstance(names[0], str):
            raise ValueError(
                f"{cls.__name__}.law: expected Literal[name], got"
                f" {cls.model_fields['law'].annotation}"
            )
        name = names[0]
        known = LAWS.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"law {name}: already declared, by {known.__module__}.{known.__qualname__}"
            )
        LAWS[name] = cls

    def build(self, dtype: torch.dtype, device: str) -> Measure:
        """The law itself."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "law"}
        return self.measure(**given, dtype=dtype, device=device)


LAWS: dict[str, type[LawFields]] = {}
"""Name -> fields of every law that Python has read."""


def read_law(value: Any) -> Any:
    """Check data as the fields of the law it names; what is wrong is said with the law's name
    before the field's.
    """
    if isinstance(value, LawFields):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping of fields, got {type(value).__name__}")
    name = value.get("law")
    if not isinstance(name, str) or name not in LAWS:
        raise ValueError(f"law: expected one of {', '.join(map(repr, sorted(LAWS)))}, got {name!r}")
    try:
        return LAWS[name].model_validate(value)
    except ValidationError as wrong:
        details: Any = [
            {
                "type": error["type"],
                "loc": (name, *error["loc"]),
                "input": error["input"],
                "ctx": error.get("ctx", {}),
            }
            for error in wrong.errors()
        ]
        raise ValidationError.from_exception_data(wrong.title, details) from wrong


LawSpec = Annotated[SerializeAsAny[LawFields], BeforeValidator(read_law)]

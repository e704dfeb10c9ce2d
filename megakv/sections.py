"""What all sections of the JSON that are MegaKV's own have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


@dataclass(frozen=True)
class OneOf:
    """Marks a setting whose values come from a registry, which is looked up when a JSON is read."""

    names: Callable[[], tuple[str, ...]]

    def check(self, value: Any) -> None:
        """Refuse what is not among them."""
        *names, last = map(repr, self.names())
        if value not in self.names():
            raise ValueError(f"allowed: {', '.join(names)} or {last}")


class Section(DeepSpeedConfigModel):
    """A section of the JSON: unknown keys are refused, numbers are finite, and values are of their own JSON type."""

    model_config = ConfigDict(allow_inf_nan=False)

    def __init__(self, **data: Any):
        # DeepSpeed's own class drops what is "auto", whatever the key.
        BaseModel.__init__(self, **data)

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_own_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Neither is true a number, nor 1 a boolean, nor "2" either of them."""
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        for mark in field.metadata:
            if isinstance(mark, OneOf):
                mark.check(value)
        kinds = set(_kinds(field.annotation))
        if isinstance(value, bool | int | float | str) and kinds <= {bool, int, float, NoneType}:
            numbers = bool(kinds & {int, float})
            if isinstance(value, bool):
                fits = bool in kinds
            else:
                fits = numbers and not isinstance(value, str)
            if not fits:
                null = " or null" if NoneType in kinds else ""
                raise ValueError(f"allowed: {'a number' if numbers else 'true or false'}{null}")
        return value


def registered(section: type[BaseModel], key: str) -> dict[str, list[str]]:
    """By key, the values of all settings of a section, and of those within it, that come from registries."""
    found: dict[str, list[str]] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= registered(field.annotation, f"{key}.{name}")
        found |= {f"{key}.{name}": list(mark.names()) for mark in field.metadata if isinstance(mark, OneOf)}
    return found


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types that an annotation allows; anything else as it is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from map(type, arguments)
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _kinds(argument)
    else:
        yield origin or annotation

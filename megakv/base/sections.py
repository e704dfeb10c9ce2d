"""What all sections of the JSON that are MegaKV's own have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class OneOf:
    """Marks a setting whose values come from a registry, which is looked up when a JSON is read."""

    names: Callable[[], tuple[str, ...]]

    def check(self, value: Any) -> Any:
        """Refuse what is not among them."""
        *names, last = map(repr, self.names())
        if value not in self.names():
            raise ValueError(f"allowed: {', '.join(names)}, {last}, or what a module of megakv.plugins registers")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))


class Section(DeepSpeedConfigModel):
    """A section of the JSON: unknown keys are refused, numbers are finite, and values are of their own JSON type."""

    # Docstrings of settings are their descriptions: what docs/config.md says of them.
    model_config = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __init__(self, **data: Any):
        # DeepSpeed's own class drops what is "auto", whatever the key.
        BaseModel.__init__(self, **data)

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """What may be given."""
        return dict(cls.model_fields)


def registered(section: type[BaseModel], key: str) -> dict[str, list[str]]:
    """By key, the values of all settings of a section, and of those within it, that come from registries."""
    found: dict[str, list[str]] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= registered(field.annotation, f"{key}.{name}")
        found |= {f"{key}.{name}": list(mark.names()) for mark in field.metadata if isinstance(mark, OneOf)}
    return found

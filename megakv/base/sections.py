"""Sections of the JSON that are MegaKV's own, and what to say of a value that was refused, by key and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
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


SHOWN = 60
"""Characters of a value that a message shows."""

TYPES = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a section: {...}"),
    "string_type": "text",
}


def _allowed(error: Any, config: type[BaseModel]) -> str:
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"unknown key; {_known_keys(config, error['loc'])}"
    if kind in TYPES:
        return f"allowed: {TYPES[kind]}"
    if "expected" in context:
        # As in a JSON.
        return f"allowed: {context['expected'].replace('True', 'true').replace('False', 'false')}"
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should be ", "allowed: ")


def refusal(error: Any, config: type[BaseModel]) -> str:
    """What is wrong by an entry of pydantic's about a configuration: the key, its value and what is allowed."""
    key, allowed = ".".join(map(str, error["loc"])), _allowed(error, config)
    # What a section says of several of its keys names them itself.
    return allowed if allowed.startswith(f"{key}.") else f"{key} = {shown(error['input'])}: {allowed}"


def shown(value: Any) -> str:
    """A value for a message, whose point it must not bury."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def _known_keys(config: type[BaseModel], path: Sequence[int | str]) -> str:
    """What the last key of a path could have been: any of MegaKV's own section, or similar ones of DeepSpeed's."""
    model: Any = config
    for part in path[:-1]:
        fields = getattr(model, "model_fields", {})
        model = fields[part].annotation if part in fields else None
    ours = isinstance(model, type) and issubclass(model, Section)
    keys = sorted(model.settings() if ours else getattr(model, "model_fields", {}))
    similar = get_close_matches(str(path[-1]), keys, n=3)
    if similar:
        return f"did you mean {' or '.join(map(repr, similar))}?"
    own = keys if ours else ["megakv"]
    return f"allowed: {', '.join(own)}" + ("" if own == keys else " and those of DeepSpeed's inference config")

"""What to say of a configuration that was refused: the key, its value and what would work."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

from megakv.base.sections import Section

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

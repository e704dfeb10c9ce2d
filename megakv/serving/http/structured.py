"""What answers are held to by vLLM's fields, under the names that they have now and had before."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from llguidance import LLTokenizer

from megakv.serving.form import Form
from megakv.serving.http.errors import ApiError
from megakv.serving.http.schemas import SamplingBody

Make = Callable[[LLTokenizer], Form]
MAKES: dict[str, Callable[..., Form]] = {
    "json": Form.json,
    "regex": Form.regex,
    "choice": Form.choice,
    "grammar": Form.lark,
}


def structured(body: SamplingBody) -> dict[str, Make]:
    """Forms that a body asks for, by the field of each."""
    given, asked = body.structured_outputs, dict[str, Make]()
    for name, make in MAKES.items():
        values = {
            f"guided_{name}": getattr(body, f"guided_{name}"),
            f"structured_outputs.{name}": getattr(given, "json_" if name == "json" else name, None),
        }
        for field, value in values.items():
            if value is not None:
                asked[field] = partial(make, _schema(field, value) if name == "json" else value)
    if given is not None and given.json_object:
        asked["structured_outputs.json_object"] = partial(Form.json, {"type": "object"})
    if given is not None and not asked:
        allowed = ", ".join((*MAKES, "json_object"))
        raise ApiError(400, f"structured_outputs: says nothing; allowed: one of {allowed}", param="structured_outputs")
    return asked


def _schema(field: str, given: dict[str, Any] | str) -> dict[str, Any]:
    """A schema, which may come as a text."""
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{field}: is no JSON object; allowed: a schema", param=field)
    return schema

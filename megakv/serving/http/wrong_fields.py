"""From what pydantic says of a body: which field is wrong, as its author wrote it, and what is allowed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megakv.serving.http.errors import ApiError, shown

MOST_NAME = 64
"""Letters of a name in a path, which may be a stranger's."""
IN_JSON = {"True": "true", "False": "false", "None": "null"}
ALLOWED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "bool_type": lambda _: "true or false",
    "dict_type": lambda _: "an object",
    "finite_number": lambda _: "a finite number",
    "float_type": lambda _: "a number",
    "greater_than_equal": lambda bound: f"{bound['ge']} or more",
    "int_from_float": lambda _: "a whole number",
    "int_type": lambda _: "a whole number",
    "less_than": lambda bound: f"less than {bound['lt']}",
    "less_than_equal": lambda bound: f"{bound['le']} or less",
    "list_type": lambda _: "an array",
    "literal_error": lambda bound: IN_JSON.get(bound["expected"], bound["expected"]),
    "model_attributes_type": lambda _: "an object",
    "model_type": lambda _: "an object",
    "none_required": lambda _: "null",
    "string_too_long": lambda bound: f"text of up to {bound['max_length']} letters",
    "string_too_short": lambda bound: f"text of {bound['min_length']} letters or more",
    "string_type": lambda _: "text",
    "string_unicode": lambda _: "text of whole letters, no halves of pairs",
    "too_long": lambda bound: f"{bound['max_length']} entries at most",
    "too_short": lambda bound: f"{bound['min_length']} entries or more",
}
"""What is allowed, by the kind of an error and its bounds."""
Path = tuple[str | int, ...]


def wrong_fields(error: ValidationError, given: Any) -> ApiError:
    """An error that names the first field that is wrong in the body `given`."""
    found = [(_path(each, given), each) for each in error.errors(include_url=False)]
    # A sentence written for a value says most; else of all kinds that a value may be of, the one that fits furthest.
    chosen = next((pair for pair in found if pair[1]["type"] == "value_error"), None)
    if chosen is None:
        same = [pair for pair in found if pair[0][:1] == found[0][0][:1]]
        chosen = max(same, key=lambda pair: (len(pair[0]), pair[1]["type"] != "missing"))
    path, first = chosen
    said = first["msg"].removeprefix("Value error, ")
    field, _, rest = said.partition(": ")
    if first["type"] == "value_error" and rest and _has(given, (*path, field)):
        # What is said of an object as a whole begins with the field that it is about.
        path, said = (*path, field), rest
    name = path_text(path)
    more = len({other[:1] for other, _ in found} - {chosen[0][:1]})
    others = f" ({more} more fields are wrong)" if more > 1 else " (one more field is wrong)" if more else ""
    if first["type"] == "missing":
        message = f"{name}: it is required, and is not there"
        return ApiError(400, message + others, code="missing_required_parameter", param=name or None)
    if first["type"] != "value_error":
        kinds = [_allowed(each) for other, each in found if other == path and each["type"] != "missing"]
        said = f"{shown(first['input'])} is not allowed; allowed: {' or '.join(dict.fromkeys(kinds))}"
    return ApiError(400, f"{name or 'body'}: {said}{others}", code="invalid_value", param=name or None)


def _allowed(error: ErrorDetails) -> str:
    known = ALLOWED.get(error["type"])
    return error["msg"] if known is None else known(error.get("ctx", {}))


def _path(error: ErrorDetails, given: Any) -> Path:
    """Those parts of an error's place that are in the body: pydantic puts names of its own types between."""
    found: list[str | int] = []
    here, missing = given, error["type"] == "missing"
    for number, part in enumerate(error["loc"], 1):
        inside = part in here if isinstance(here, dict) else isinstance(here, list) and part in range(len(here))
        if inside:
            here = here[part]
            found.append(part)
        elif missing and number == len(error["loc"]):
            found.append(part)
    return tuple(found)


def _has(given: Any, path: Path) -> bool:
    """Whether a field is in the body, by its path."""
    for part in path[:-1]:
        given = given[part]
    return isinstance(given, dict) and path[-1] in given


def path_text(path: Path) -> str:
    """A path as JavaScript and OpenAI write it: ``messages[0].content``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:MOST_NAME]}" for part in path)
    return text.removeprefix(".")

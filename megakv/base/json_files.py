"""JSON that users write or bring: read whole, or refused by name. A key given twice is refused: the last would win."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any


def read_json(path: str | Path, source: str) -> Any:
    """The value of a file; a `ValueError` begins with `source`, which names the file and where it was asked for."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return parse_json(text, source)


def parse_json(text: str, source: str) -> Any:
    """The value of a text, with errors as of `read_json`."""
    try:
        return json.loads(text, object_pairs_hook=partial(_without_duplicates, source))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}" if "\n" in text else f"column {error.colno}"
        raise ValueError(f"{source} is not valid JSON: {place}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error


def _without_duplicates(source: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{source}: the key {key!r} is given twice in one object; leave one out")
        values[key] = value
    return values

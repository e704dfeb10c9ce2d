"""JSON files that MegaKV writes and reads back: checked on load, in words that name the setting and the remedy."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from megakv.base.json_files import read_json
from megakv.tracking.files import write_whole


class Record(BaseModel):
    """A value that lives in a JSON file; the field ``format`` of each kind says what the file is."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: str

    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the JSON, whole or not at all."""
        write_whole(path, (self.model_dump_json(indent=1) + "\n").encode())


R = TypeVar("R", bound=Record)
MOST_BYTES = 1 << 26
"""Far above any of them: a huge file would only keep its reader busy."""


def load_record(kind: type[R], path: str | Path, *, setting: str, remedy: str, by_hand: bool = False) -> R:
    """Read and check a record.

    setting, remedy: for messages: the setting that named the file, and what makes a good one.
    by_hand: people write such files too, and may leave the format out.
    Raises ValueError if it cannot be read, is cut short, is something else or holds an impossible value: names the
        setting, the file, the field and the remedy.
    """
    source = f"{setting} = {str(path)!r}"
    if (length := Path(path).stat().st_size if Path(path).exists() else 0) > MOST_BYTES:
        raise ValueError(f"{source} has {length} bytes, more than the {MOST_BYTES} that it may have; {remedy}")
    wanted = kind.model_fields["format"].default
    try:
        values = read_json(path, source)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from error
    if not isinstance(values, dict) or values.get("format", wanted if by_hand else None) != wanted:
        raise ValueError(f"{source} is not a {wanted}; {remedy}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        entry = error.errors()[0]
        # What a validator of the record says names the field itself.
        where = "".join(f"{part}." for part in entry["loc"])[:-1]
        message = entry["msg"].removeprefix("Value error, ")
        raise ValueError(f"{source}: {where and f'{where}: '}{message}; {remedy}") from None

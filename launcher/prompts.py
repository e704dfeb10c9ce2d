"""A user's texts: questions about a document, and data sets that are files or folders."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megakv.base.json_files import parse_json


@dataclass(frozen=True)
class Question:
    """What is asked in a turn of a conversation."""

    text: str
    prompt: str  # Of the whole turn: in the first one the document too.


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments for `questions`."""
    parser.add_argument("--prompt-file", metavar="FILE", help="a document: UTF-8 text")
    parser.add_argument(
        "--question",
        action="append",
        default=[],
        help="what to ask about the document, or the whole prompt without one; several are asked in turn, and the "
        "document is read once",
    )
    parser.add_argument("--no-chat-template", action="store_true", help="feed the text as it is")


def questions(document: str | None, asked: Sequence[str]) -> list[Question]:
    """The turns of a conversation about a document."""
    for text in asked:
        if not text.strip():
            raise ValueError(f"--question {text!r} is empty: leave it out, or ask something")
    if document is None and not asked:
        raise ValueError("the prompt is empty: give --prompt-file, --question or both")
    first = "\n\n".join(part for part in (document, *asked[:1]) if part is not None)
    return [Question("".join(asked[:1]), first), *(Question(text, text) for text in asked[1:])]


def read_document(arguments: argparse.Namespace) -> str | None:
    """That of --prompt-file."""
    return None if arguments.prompt_file is None else read_text(arguments.prompt_file, "--prompt-file")


def read_text(path: str, setting: str) -> str:
    """A user's text file."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{setting} {path} cannot be read: {error.strerror}") from error
    return decoded(content, f"{setting} {path}")


def decoded(content: bytes, source: str) -> str:
    """A user's text."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise ValueError(f"{source} is empty: the prompt is empty")
    return text


@dataclass(frozen=True)
class Prompt:
    """One text of a data set."""

    data_set: str
    source: str  # File, and line where there are several, for messages.
    text: str


def read_prompts(paths: Sequence[str], *, field: str, setting: str = "--prompts") -> list[Prompt]:
    """All prompts of some data sets, each named by its file.

    A path is a ``.jsonl`` file with a prompt in every line (text, or an object with this field), a folder with a prompt
    in every text file, or one text file.
    """
    found: list[Prompt] = []
    names: dict[str, str] = {}
    for path in paths:
        name = Path(path).stem
        if name in names:
            raise ValueError(f"{setting} {names[name]} {path}: two data sets of the name {name!r}; rename one")
        names[name] = path
        prompts = _read(Path(path), name, field, setting)
        if not prompts:
            raise ValueError(f"{setting} {path} holds no prompt: allowed: a text file, a folder of them, a .jsonl file")
        found += prompts
    return found


def _read(path: Path, name: str, field: str, setting: str) -> list[Prompt]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        return [Prompt(name, str(file), read_text(str(file), setting)) for file in files]
    text = read_text(str(path), setting)
    if path.suffix != ".jsonl":
        return [Prompt(name, str(path), text)]
    lines = enumerate(text.split("\n"), start=1)
    return [_line(path, number, line, name, field, setting) for number, line in lines if line.strip()]


def _line(path: Path, number: int, line: str, name: str, field: str, setting: str) -> Prompt:
    source = f"{path} line {number}"
    value = parse_json(line, f"{setting} {source}")
    if isinstance(value, dict):
        if field not in value:
            raise ValueError(f"{setting} {source} has no {field!r} among {sorted(value)}: --field names the prompt's")
        value = value[field]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{setting} {source}: the prompt must be text, not {json.dumps(value)[:40]}")
    return Prompt(name, source, value)

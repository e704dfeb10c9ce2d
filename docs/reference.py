"""The tables of the documentation that come from the code alone: the JSON's settings, the methods, the commands."""

from __future__ import annotations

import ast
import json
import re
import types
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megakv.attention.methods import METHODS as ATTENTION
from megakv.base.errors import LAWS, CombinationError, Law
from megakv.base.sections import OneOf, Section
from megakv.engine.config import REFUSED_KEYS, REFUSED_TP_KEYS, MegaKVSection
from megakv.fairkv.methods import METHODS as COMPRESSION
from megakv.launcher.commands import SUMMARIES
from megakv.offload.method import AUTO
from megakv.offload.method import METHODS as OFFLOAD
from megakv.weights.formats import FORMATS
from megakv.weights.formats.sizes import KNOWN

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def keys_of(model: type[BaseModel], prefix: str) -> dict[str, FieldInfo]:
    """Every key of a section of the JSON, with its field; nested sections are walked."""
    found: dict[str, FieldInfo] = {}
    for name, field in (model.settings() if issubclass(model, Section) else model.model_fields).items():
        key = f"{prefix}.{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys_of(field.annotation, key)
        else:
            found[key] = field
    return found


def options(annotation: Any) -> list[Any]:
    """The types or values that an annotation allows, None left out."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in options(part)]
    return [] if annotation is type(None) else [annotation]


def weight_formats_table() -> str:
    """Formats of weights, what is lost where they are made at load, and their sizes."""
    rows = []
    for name, kind in FORMATS.items():
        bits = KNOWN.get(name)
        size = "8 in feed-forward layers" if name == "fp8" else "as stored"
        if bits is not None:
            outside = "" if bits.layers == bits.outside else f"; {bits.outside:g} outside of layers"
            size = f"{bits.layers:g}{outside}"
        source = f'`"weights": {{"format": "{name}"}}`' if kind.at_load else "the model"
        rows.append(f"| `{name}` | {source} | {kind.loses or 'nothing'} | {size} |\n")
    return "".join(rows)


def _values(field: FieldInfo) -> list[Any]:
    """The values that a setting allows, where they can be listed."""
    for mark in field.metadata:
        if isinstance(mark, OneOf):
            return list(mark.names())
    kind, *_ = options(field.annotation)
    return list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else []


def _number(value: Any) -> str:
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].strip("+"), f"{value:g}")


def _bounds(field: FieldInfo) -> str:
    """What a number must be, or that a string may not be empty."""
    marks = {type(mark): mark for mark in field.metadata}
    if MinLen in marks:
        return "not empty"
    high = f"{_number(marks[Le].le)}" if Le in marks else ""
    if Gt in marks:
        return f"above {_number(marks[Gt].gt)}" + (f", up to {high}" if high else "")
    if Ge in marks:
        return f"{_number(marks[Ge].ge)} {f'to {high}' if high else 'or more'}"
    return ""


def _sentence(text: str | None) -> str:
    """A docstring as Markdown: names of pages become links, and the last full stop goes."""
    text = " ".join((text or "").split()).replace("``", "`").rstrip(".")
    return re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", lambda page: f"[{page[1]}]({page[1]}{page[2] or ''})", text)


def settings_table() -> str:
    """Every key of the section ``megakv``."""
    lines = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for key, field in keys_of(MegaKVSection, "megakv").items():
        values = _values(field)
        kinds = (
            [*dict.fromkeys(map(type, values))]
            if values
            else [typing.get_origin(kind) or kind for kind in options(field.annotation)]
        )
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in values) or _bounds(field)
        name = key.rpartition(".")[2]
        owners = [f"`{method}`" for method, kind in COMPRESSION.items() if name in kind.model_fields]
        of = f" ({', '.join(owners)})" if key.startswith("megakv.fairkv.") and owners else ""
        cells = [f"`{key}`", " or ".join(JSON_TYPES[kind] for kind in kinds), f"`{json.dumps(field.default)}`", allowed]
        lines.append(f"| {' | '.join(cells)} | {_sentence(field.description)}{of} |")
    return "\n".join(lines) + "\n"


def _first_line(thing: Any) -> str:
    return _sentence((thing.__doc__ or "").strip().partition("\n\n")[0])


def attention_table() -> str:
    """How tokens attend across context-parallel ranks."""
    lines = ["| method | for | tokens of a rank | what it does |", "|---|---|---|---|"]
    for name, entry in ATTENTION.items():
        uses = [use for use, given in (("prompts", entry.prefill), ("decoding", entry.decode)) if given]
        if uses:
            tokens = "consecutive" if entry.contiguous else "2 chunks of 2N" if entry.prefill else "one by one"
            slices = ", and each multiplies with its slice of all weights" * entry.slices_linears
            does = _first_line(entry.make) + slices
            lines.append(f"| `{name}` | {', '.join(uses)} | {tokens} | {does} |")
    return "\n".join(lines) + "\n"


def offload_table() -> str:
    """What becomes of offloaded tokens."""
    lines = ["| method | what it does, and what it makes least |", "|---|---|"]
    lines += [f"| `{name}` | {_first_line(method)} |" for name, method in OFFLOAD.items()]
    return "\n".join([*lines, f"| `{AUTO}` | what is predicted, then measured, to be the fastest of these |"]) + "\n"


def compression_methods_table() -> str:
    """What a cache keeps."""
    lines = ["| method | what it keeps | heads of a layer keep |", "|---|---|---|"]
    for name, kind in COMPRESSION.items():
        lines.append(f"| `{name}` | {_first_line(kind)} | {'unequally' if kind.uneven else 'equally'} many tokens |")
    return "\n".join(lines) + "\n"


def commands_table() -> str:
    """The subcommands of ``megakv``."""
    lines = ["| command | what it does |", "|---|---|"]
    lines += [f"| `megakv {name}` | {_sentence(summary)} |" for name, summary in SUMMARIES.items()]
    return "\n".join(lines) + "\n"


def refused_table() -> str:
    """DeepSpeed's settings that MegaKV refuses, and why."""
    reasons: dict[str, list[str]] = {}
    for key, reason in REFUSED_KEYS.items():
        reasons.setdefault(reason, []).append(f"`{key}`")
    reasons["groups and shards follow `tp_size`"] = [f"`tensor_parallel.{key}`" for key in REFUSED_TP_KEYS]
    lines = ["| refused | because |", "|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(keys)} | {reason} |" for reason, keys in reasons.items())]) + "\n"


NAMED = re.compile(r"(?:megakv|tensor_parallel)(?:\.[a-z_*]+)+")


def combination_errors() -> Iterator[tuple[Law, str]]:
    """Law and message of every refusal of a combination; what a message is given stands in it as ``*``."""
    root = Path(__file__).parents[1]
    for path in sorted((root / "megakv").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == CombinationError.__name__ and name != "megakv.base.errors":
                law, text = node.args
                assert isinstance(law, ast.Constant)
                yield law.value, _literal(text, vars(import_module(name)))


def _literal(text: ast.AST, names: dict[str, Any]) -> str:
    if isinstance(text, ast.JoinedStr):
        return "".join(_literal(part, names) for part in text.values)
    if isinstance(text, ast.FormattedValue):
        return _literal(text.value, names)
    return str(text.value if isinstance(text, ast.Constant) else names.get(getattr(text, "id", ""), "*"))


def laws_table() -> str:
    """Why settings that are right each for itself cannot be had together, and which they are."""
    found: dict[Law, set[str]] = {law: set() for law in LAWS}
    for law, text in combination_errors():
        found[law].add(" and ".join(f"`{name}`" for name in dict.fromkeys(NAMED.findall(text))))
    lines = ["| because | what is refused names |", "|---|---|"]
    lines += [f"| {LAWS[law]} | {'; '.join(sorted(names - {''}))} |" for law, names in found.items()]
    return "\n".join(lines) + "\n"

"""The documentation says what is there: every key, every link, every figure, and JSON that can be read."""

import ast
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from docs.figures import DRAWINGS
from docs.generated import ROOT, TABLES, documents, figure, refresh
from megakv.config import REFUSED_KEYS, MegaKVConfig, MegaKVSection, load_config
from megakv.sections import OneOf, Section

README = (ROOT / "README.md").read_text()
DOCUMENTS = documents()
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def keys_of(model: type[BaseModel], prefix: str) -> dict[str, Any]:
    """Every key of a section of the JSON, with its field; nested sections are walked."""
    found: dict[str, Any] = {}
    for name, field in (model.settings() if issubclass(model, Section) else model.model_fields).items():
        key = f"{prefix}.{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys_of(field.annotation, key)
        else:
            found[key] = field
    return found


def reference() -> dict[str, list[str]]:
    """The rows of the README's reference: key -> type, default, allowed, meaning."""
    block = README.partition("<!-- reference -->")[2].partition("<!-- end of reference -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.strip().splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def options(annotation: Any) -> list[Any]:
    """The types or values that an annotation allows, None left out."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(annotation) for option in options(part)]
    return [] if annotation is type(None) else [annotation]


FIELDS = keys_of(MegaKVSection, "megakv")


def test_reference_has_every_key_and_no_other() -> None:
    assert list(reference()) == list(FIELDS)


@pytest.mark.parametrize("key", FIELDS)
def test_reference_gives_type_default_and_values(key: str) -> None:
    kind, default, allowed, meaning = reference()[key]
    field = FIELDS[key]
    annotation, *others = options(field.annotation)
    assert field.default is not PydanticUndefined, f"{key} has no plain default: say in this test how it is written"
    assert default == f"`{json.dumps(field.default)}`"
    registries = [mark for mark in field.metadata if isinstance(mark, OneOf)]
    if registries or typing.get_origin(annotation) is typing.Literal:
        values = registries[0].names() if registries else typing.get_args(annotation)
        assert kind == JSON_TYPES[type(values[0])]
        assert re.findall(r"`([^`]*)`", allowed) == [json.dumps(value) for value in values]
    else:
        assert kind == " or ".join(JSON_TYPES[typing.get_origin(each) or each] for each in (annotation, *others))
    assert meaning


def test_keys_of_deepspeed_are_known() -> None:
    block = README.partition("these keys of DeepSpeed count:")[2].partition("**Reports.**")[0]
    named = {key.split(".")[0] for key in re.findall(r"^\| `([a-z_.]+)`", block, re.MULTILINE)}
    assert named == {"dtype", "tensor_parallel", "max_out_tokens"}
    refused = re.findall(r"`(\w+)`", block.partition("such as")[2].partition("is refused")[0])
    assert len(refused) > 2
    assert set(refused) <= REFUSED_KEYS.keys() & MegaKVConfig.model_fields.keys()


def code_blocks(language: str) -> list[Any]:
    """The code blocks of a language in all documents, each a test case named by its document."""
    blocks = []
    for path in DOCUMENTS:
        for found in re.finditer(rf"^( *)```{language}\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line.removeprefix(found[1]) for line in found[2].splitlines()]
            blocks.append(pytest.param("\n".join(lines), id=f"{path.relative_to(ROOT)}-{len(blocks)}"))
    return blocks


@pytest.mark.parametrize("text", code_blocks("json"))
def test_json_examples_are_configurations(text: str) -> None:
    load_config(json.loads(text))


@pytest.mark.parametrize("text", code_blocks("python"))
def test_python_examples_compile(text: str) -> None:
    ast.parse(text)


def anchors(path: Path) -> set[str]:
    """What a link into a document may name after ``#``, by GitHub's rule."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = [title.lower() for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in LINK.findall(text):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_computed_parts_are_fresh(path: Path) -> None:
    text = path.read_text()
    assert refresh(text) == text, f"python docs/generated.py writes {path.name} anew"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_files(path: Path) -> None:
    for script in re.findall(
        r"(?:bash|python|source|deepspeed|torchrun)(?: --?\S+(?: \d+)?)* ([\w/]+\.(?:py|sh))", path.read_text()
    ):
        assert (ROOT / script).is_file(), f"{path.name} runs {script}"


def test_every_benchmark_has_its_command() -> None:
    results = README.partition("\n## Results")[2].partition("\n## Limits")[0]
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert f"python benchmarks/{script.name}" in results, "a row of the table in the README's Results"


def test_every_drawing_is_there() -> None:
    for name in DRAWINGS:
        assert f"docs/images/{name}.png" in README
        assert (ROOT / "docs" / "images" / f"{name}.png").is_file()


def test_figures_are_read_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    rows = [{"method": "a", "seconds": [9.0, 1.0, 2.5]}, {"method": "b", "seconds": [4.0], "bytes": 3 << 20}]
    (folder / "x.json").write_text(json.dumps({"rows": rows, "summary": {"share": 0.978, "ok": True}}))
    monkeypatch.setattr("docs.generated.ROOT", tmp_path)
    assert figure("x.json", "rows.method=a.seconds.median") == 2.5
    stale = "1.0 s<!-- x --> 7.1<!-- figure: x.json rows.1.seconds.0 --> 1 %<!-- figure: x.json summary.share -->"
    stale += " 0.00 MiB<!-- figure: benchmarks/results/x.json rows.method=b.bytes -->"
    fresh = "1.0 s<!-- x --> 4.0<!-- figure: x.json rows.1.seconds.0 --> 98 %<!-- figure: x.json summary.share -->"
    fresh += " 3.00 MiB<!-- figure: benchmarks/results/x.json rows.method=b.bytes -->"
    assert refresh(stale) == fresh
    with pytest.raises(ValueError, match="summary.ok is True, no number"):
        figure("x.json", "summary.ok")


def test_table_of_the_chain_takes_the_largest_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    place = {"rate": "free", "ranks": 4, "context": 8192, "kv_heads": 16}
    smaller, slower = {**place, "context": 4096}, {**place, "rate": "1gbit", "context": 16384}
    speedup = {"kvr_s/tsp": {"value": 1.5, "low": 1.4, "high": 1.62}}
    cells = {str(index): {**where, "speedup": speedup} for index, where in enumerate((smaller, place, slower))}
    rows = [
        {
            **where,
            "noise": noise,
            "method": method,
            "seconds": [2.0, 9.0, 3.0],
            "bytes_sent": [{"a": 1 << 20}, {"a": 1 << 21}],
        }
        for where in (smaller, place, slower)
        for noise in ("quiet", "link")
        for method in ("tsp", "kvr_s")
    ]
    (folder / "runahead.json").write_text(json.dumps({"rows": rows, "summary": {"cells": cells}}))
    monkeypatch.setattr("docs.generated.ROOT", tmp_path)
    _, _, *lines = TABLES["runahead"]().splitlines()
    assert lines == [
        "| MegaKV, TSP, the whole rectangle under a mask | 3.0 | 1.50 (1.40 to 1.62) | 3 |",
        "| MegaKV, KV-Runahead, searched parts | 3.0 |  | 3 |",
    ]

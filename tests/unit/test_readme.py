"""The documentation says what is there: every key, every link, every figure, and JSON that can be read."""

import ast
import json
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from docs.figures import DRAWINGS
from docs.generated import FIGURE, ROOT, TABLES, documents, figure, refresh
from docs.reference import JSON_TYPES, keys_of, options
from megakv.attention.methods import decode_methods, prefill_methods
from megakv.base.sections import OneOf
from megakv.engine.config import REFUSED_KEYS, MegaKVConfig, MegaKVSection, load_config
from megakv.launcher import run
from megakv.launcher.command import _parser

README = (ROOT / "README.md").read_text()
CONFIG = (ROOT / "docs" / "config.md").read_text()
DOCUMENTS = documents()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def reference() -> dict[str, list[str]]:
    """The rows of the reference of settings: key -> type, default, allowed, meaning."""
    block = CONFIG.partition("<!-- generated: settings -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.strip().splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


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
        assert kind == " or ".join(dict.fromkeys(JSON_TYPES[type(value)] for value in values))
        assert re.findall(r"`([^`]*)`", allowed) == [json.dumps(value) for value in values]
    else:
        assert kind == " or ".join(JSON_TYPES[typing.get_origin(each) or each] for each in (annotation, *others))
    assert meaning


def test_keys_of_deepspeed_are_known() -> None:
    taken, _, refused = CONFIG.partition("## Keys of DeepSpeed")[2].partition("<!-- generated: refused -->")
    named = {key.split(".")[0] for key in re.findall(r"^\| `([a-z_.]+)`", taken, re.MULTILINE)}
    assert named == {"dtype", "tensor_parallel", "max_out_tokens", "enable_cuda_graph", "injection_policy"}
    keys = set(re.findall(r"`(\w+)`", re.sub(r"\| [^|`]*`tp_size` \|", "", refused)))
    assert keys == REFUSED_KEYS.keys() & MegaKVConfig.model_fields.keys()


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


def shell_lines(path: Path) -> list[str]:
    """The lines of a document's code blocks without a language, continued ones joined."""
    fenced = re.split(r"^ *```(.*)$", path.read_text(), flags=re.MULTILINE)
    blocks = [text for language, text in zip(fenced[1::4], fenced[2::4], strict=True) if not language]
    return [line.strip() for text in blocks for line in re.sub(r"\\\n\s*", "", text).splitlines()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_take_their_arguments(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (each.rpartition(" | ")[2] for each in shell_lines(path)):
        parse, words = None, shlex.split(line, comments=True) if line.startswith(("megakv ", "deepspeed ")) else []
        if words[:1] == ["megakv"]:
            parse, words = _parser(words[1:2]).parse_args, words[1:]
        elif "launcher/run.py" in words and "..." not in words:
            parse, words = run.parse_arguments, words[words.index("launcher/run.py") + 1 :]
        if parse is not None:
            try:
                parse(words)
            except SystemExit:
                pytest.fail(f"{path.name}: {line}: {capsys.readouterr().err}")


def test_every_benchmark_has_its_command() -> None:
    results = (ROOT / "docs" / "results.md").read_text()
    for script in (ROOT / "benchmarks").glob("*.py"):
        assert f"python benchmarks/{script.name}" in results, "a row of the first table of docs/results.md"


def test_every_page_is_in_the_index() -> None:
    index = README.partition("\n## Where everything else is")[2]
    assert set(LINK.findall(index)) >= {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


def test_the_readme_stays_short() -> None:
    assert len(re.sub(r"<!--.*?-->", "", README).split()) < 1700, "more belongs into docs/"


def test_every_method_has_a_section() -> None:
    titles = re.findall(r"^## (.*)", (ROOT / "docs" / "methods.md").read_text(), re.MULTILINE)
    for name in {"auto", *prefill_methods(), *decode_methods()}:
        assert any(f"`{name}`" in title for title in titles), f"docs/methods.md says nothing of {name}"


def test_every_drawing_is_there() -> None:
    methods = (ROOT / "docs" / "methods.md").read_text()
    for name in DRAWINGS:
        assert f"images/{name}.png" in methods
        assert (ROOT / "docs" / "images" / f"{name}.png").is_file()


def test_figures_are_read_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    rows = [{"method": "a", "seconds": [9.0, 1.0, 2.5]}, {"method": "b", "seconds": [4.0], "bytes": 3 << 20}]
    (folder / "x.json").write_text(json.dumps({"rows": rows, "summary": {"share": 0.978, "ok": True}}))
    monkeypatch.setattr("docs.generated.ROOT", tmp_path)
    assert figure("x.json", "rows.method=a.seconds.median") == 2.5
    assert figure("x.json", "rows.*.seconds.0.min") == 4.0
    assert figure("x.json", "rows.*.seconds.0.count") == 2
    with pytest.raises(ValueError, match=r"rows.\*.seconds.0 is 2 numbers"):
        figure("x.json", "rows.*.seconds.0")
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


STANDS_BESIDE = (
    (r"summary\.attention\..*speedup", r"summary\.(engine|whole)\..*speedup"),
    (r"summary\.attention_gain\.", r"summary\.measured_gain\."),
    (r"summary\.speedup_over_transformers\.", r"summary\.speedup_over_stream\."),
    (r"summary\.cells\..*\.kvr_s/tsp\.", r"summary\.cells\..*\.kvr_s/pass_kv\."),
    (r"summary\.time_ratio\..*\.single\b", r"summary\.time_ratio\..*\.in_place"),
    (r"summary\.longest_gap_over_prefill", r"summary\.reading_over_alone"),
    (r"summary\.guidellm_over_vllm\..*tokens_per_second", r"summary\.guidellm_over_vllm\..*ttft"),
)
"""What is quoted of a results file, and what of the same file stands in the same section, if it has that: the whole
beside its part, the stronger rival beside the weaker, the price beside the gain."""


def leaves(value: Any, path: str) -> Iterator[str]:
    """The paths to all numbers of a results file's part."""
    for key, entry in value.items() if isinstance(value, dict) else []:
        yield from leaves(entry, f"{path}.{key}")
    if not isinstance(value, dict):
        yield path


def alone(text: str) -> list[str]:
    """Figures of a section that stand without what belongs beside them."""
    quoted = [(found["file"], found["path"]) for found in FIGURE.finditer(text)]
    found = []
    for file, path in quoted:
        for one, other in STANDS_BESIDE:
            if not re.match(one, path) or any(name == file and re.match(other, beside) for name, beside in quoted):
                continue
            summary = json.loads((ROOT / "benchmarks" / "results" / file).read_text())["summary"]
            if any(re.match(other, each) for each in leaves(summary, "summary")):
                found.append(f"{file} {path} stands without {other}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_part_is_quoted_without_its_whole(path: Path) -> None:
    assert not [each for section in re.split(r"^##+ ", path.read_text(), flags=re.MULTILINE) for each in alone(section)]


def test_a_part_without_its_whole_is_found() -> None:
    part = "1.56<!-- figure: fairkv.json summary.attention.speedup.dp1.value -->"
    whole = "1.38<!-- figure: fairkv.json summary.engine.speedup.dp1.value -->"
    assert alone(part) and not alone(part + whole)
    assert not alone(part.replace("fairkv", "fairkv_2ranks")), "whose results have no step"

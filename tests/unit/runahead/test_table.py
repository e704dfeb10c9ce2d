"""The lookup table: what it says between entries, what it refuses, and whose it is."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakv.base.partition import from_fractions
from megakv.costmodel.records import MOST_BYTES
from megakv.costmodel.shape import LayerShape
from megakv.runahead.table import LookupTable, ModelIdentity, load_table
from tests.unit.costmodel.profiles import fingerprint
from tests.unit.runahead.tables import MODEL, any_table, chain, entry, table


@pytest.mark.parametrize("trial", range(20))
def test_between_two_entries_shares_are_on_a_line(trial: int) -> None:
    ranks, contexts = random.randint(2, 9), random.randint(1, 6)
    some = any_table(ranks, contexts)
    lengths = [each.context for each in some.entries]
    for each in some.entries:
        assert some.fractions(each.context) == each.fractions
    assert some.fractions(lengths[0] - 1) is None and some.fractions(lengths[-1] + 1) is None
    for low, high in zip(some.entries, some.entries[1:], strict=False):
        tokens = random.randint(low.context, high.context)
        found = some.fractions(tokens)
        assert found is not None
        for rank in range(ranks):
            line = np.interp(tokens, lengths, [each.fractions[rank] for each in some.entries])
            assert found[rank] == pytest.approx(line)
        assert sum(from_fractions(found, tokens)) == tokens


def test_the_papers_kind_of_case() -> None:
    some = table({8192: (40, 30, 20, 10), 12288: (36, 28, 22, 14)})
    assert some.fractions(10240) == pytest.approx((0.38, 0.29, 0.21, 0.12))
    assert some.nearest(3).context == 8192 and some.nearest(11000).context == 12288


def test_it_is_written_and_read_back(tmp_path: Path) -> None:
    some = any_table(4, 5)
    some.save(tmp_path / "table.json")
    assert load_table(tmp_path / "table.json") == some
    values = json.loads((tmp_path / "table.json").read_text())
    assert set(values["chain"]) == {"model", "fingerprint", "ranks", "tp", "kv", "chunk_tokens"}
    assert set(values["entries"][0]) == {"context", "fractions", "ttft_s", "even_ttft_s", "evaluations"}


def test_entries_are_added_and_replaced() -> None:
    some = table({100: (60, 40), 300: (180, 120)})
    more = some.with_entry(entry(200, (1, 1))).with_entry(entry(100, (3, 1)))
    assert [each.context for each in more.entries] == [100, 200, 300]
    assert more.fractions(100) == (0.75, 0.25) and some.fractions(100) == (0.6, 0.4)
    assert LookupTable.model_validate(json.loads(more.model_dump_json())) == more


def test_what_belongs_elsewhere_is_named() -> None:
    here = chain()
    assert here.differences(here) == []
    assert chain(2).differences(here) == ["ranks 2, here 3", "ranks 2, here 3"]
    other = ModelIdentity.of(MODEL).model_copy(update={"kv_heads": 4, "dtype": "bfloat16"})
    assert chain(model=other).differences(here) == [
        "model's kv_heads 4, here 2",
        "model's dtype 'bfloat16', here 'float32'",
    ]
    assert chain(kv="last", tp=2).differences(here) == ["tp 2, here 1", "kv 'last', here 'sharded'"]
    machine = fingerprint(ranks=3, threads=7)
    assert chain(fingerprint=machine).differences(here) == ["threads 7, here 1"]


def test_windows_are_part_of_a_model() -> None:
    layers = (LayerShape(1000, window=64), LayerShape(1000))
    values = {name: getattr(MODEL, name) for name in MODEL.__dataclass_fields__}
    assert ModelIdentity.of(MODEL).windows == ()
    assert ModelIdentity.of(type(MODEL)(**{**values, "layers": layers})).windows == (64, None)


def broken(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update(changes)


def change_entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["entries"][1].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken(format="megakv policy fit"), "is not a megakv partition table"),
        (broken(version=2), "version: "),
        (broken(entries=[]), "entries: "),
        (broken(entries="none"), "entries: "),
        (broken(surprise=1), "surprise: Extra inputs"),
        (change_entry(fractions=[0.5, 0.5]), "2 fractions for 3 ranks"),
        (change_entry(fractions=[0.5, 0.3, 0.1]), "sum to 0.9, not 1"),
        (change_entry(fractions=[1.2, -0.1, -0.1]), "entries.1.fractions.0: "),
        (change_entry(fractions=[float("nan"), 0.5, 0.5]), "entries.1.fractions.0: "),
        (change_entry(ttft_s=0), "entries.1.ttft_s: "),
        (change_entry(ttft_s=float("inf")), "entries.1.ttft_s: "),
        (change_entry(context=100), "ascending contexts, each once"),
        (change_entry(context=10**30), "entries.1.context: "),
        (change_entry(context="many"), "entries.1.context: "),
        (lambda values: values["chain"].pop("kv"), "chain.kv: Field required"),
        (lambda values: values["chain"].update(kv="first"), "chain.kv: "),
        (lambda values: values["chain"]["fingerprint"].pop("cores"), "chain.fingerprint.cores: Field required"),
    ],
)
def test_impossible_tables_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    values = json.loads(table({100: (5, 3, 2), 200: (5, 3, 2)}).model_dump_json())
    change(values)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        load_table(path)
    text = str(caught.value)
    assert text.startswith(f"megakv.runahead.table = {str(path)!r}") and message in text
    assert "write a new one with megakv search-partition --table FILE" in text


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    good = table({100: (5, 3, 2), 200: (5, 3, 2)}).model_dump_json()
    for content in (
        b"",
        good[: random.randrange(1, len(good))].encode(),
        b"[1, 2]",
        b"null",
        b"\xff\xfe",
        b"[" * 10**5,
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"megakv.runahead.table = .*megakv search-partition"):
            load_table(path)
    with open(path, "wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ValueError, match=f"has {MOST_BYTES + 1} bytes, more than the {MOST_BYTES} that it may have"):
        load_table(path)
    for absent in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match="cannot be read: "):
            load_table(absent, setting="--table")

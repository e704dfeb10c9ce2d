"""Where partitions come from: the table, between its entries, the cost model, or the user."""

import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megakv.base.errors import MegaKVError
from megakv.base.partition import even, from_fractions
from megakv.costmodel.hardware import Fingerprint
from megakv.runahead.config import RunaheadConfig
from megakv.runahead.source import PartitionSource
from megakv.runahead.table import LookupTable
from tests.unit.runahead.tables import MODEL, any_table, table


class Ranks:
    """As much of a communicator as one rank of several looks like; the last may hold another file, or have failed."""

    def __init__(self, size: int, *, digest: str | None = None, failure: str | None = None, tp: int = 1):
        self.mesh = SimpleNamespace(rank=0, world_size=size * tp, cp_size=size, tp_size=tp)
        self._digest = digest
        self._failure = failure

    def gather_objects(self, value: Any) -> list[Any]:
        everyone = [value] * self.mesh.world_size
        if self._digest is not None and isinstance(value, str):
            everyone[-1] = self._digest
        if self._failure is not None and value is None:
            everyone[-1] = self._failure
        return everyone


def here(some: LookupTable, ranks: int) -> LookupTable:
    """A table of this machine, for one host."""
    ours = Fingerprint.of_this_process(hosts=1, ranks=ranks, dtype=MODEL.dtype)
    return some.model_copy(update={"chain": some.chain.model_copy(update={"fingerprint": ours})})


def source(path: Path, some: LookupTable, *, comm: Any = None, model: Any = MODEL, **settings: Any) -> PartitionSource:
    """What an engine would have with this table."""
    some.save(path)
    size = some.chain.ranks
    return PartitionSource.from_config(
        RunaheadConfig(table=str(path), **settings), comm=comm or Ranks(size), model=model
    )


def test_searched_interpolated_and_outside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = here(table({1000: (500, 300, 200), 2000: (900, 600, 500)}), 3)
    found = source(tmp_path / "table.json", some)
    assert found.sizes(1000) == (500, 300, 200)
    assert found.sizes(2000) == (900, 600, 500)
    parts = found.sizes(1500)
    assert parts == from_fractions((0.475, 0.3, 0.225), 1500) and sum(parts) == 1500
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert found.sizes(999) == from_fractions((0.5, 0.3, 0.2), 999)
        assert found.sizes(4001) == from_fractions((0.45, 0.3, 0.25), 4001)
    assert len(caplog.records) == 1
    assert "megakv.runahead.table covers 1000 to 2000 tokens, the prompt has 999" in caplog.text
    found = source(tmp_path / "table.json", some)
    found.predict = lambda new, cached: (new - 2, 1, 1)
    with caplog.at_level(logging.WARNING):
        assert found.sizes(999) == (997, 1, 1)
    assert "the cost model's partition is used for such prompts" in caplog.text
    assert found.sizes(1000) == (500, 300, 200)
    # The table knows nothing of prompts behind cached tokens.
    assert found.sizes(1000, 5000) == (998, 1, 1)
    found.predict = None


def test_only_rank_0_speaks(caplog: pytest.LogCaptureFixture) -> None:
    some = table({1000: (1, 1)})
    with caplog.at_level(logging.WARNING):
        PartitionSource(2, "auto", some).sizes(1)
        assert not caplog.records
        PartitionSource(2, "auto", some, speaks=True).sizes(1)
    assert len(caplog.records) == 1


def test_without_a_table() -> None:
    tokens, size = random.randint(1, 10**5), random.randint(2, 9)
    assert PartitionSource(size).sizes(tokens) == even(tokens, size)
    assert PartitionSource(size, "even", any_table(size, 3)).sizes(tokens) == even(tokens, size)
    asked = []

    def predict(new: int, cached: int) -> tuple[int, ...]:
        asked.append((new, cached))
        return (new, *[0] * (size - 1))

    some = PartitionSource(size, predict=predict)
    assert some.sizes(tokens, 7) == some.sizes(tokens, 7) == (tokens, *[0] * (size - 1))
    assert asked == [(tokens, 7)], "a prediction is made once"
    assert PartitionSource(1, predict=predict).sizes(tokens) == (tokens,)


def test_a_users_own_and_one_in_use_for_a_while() -> None:
    some = PartitionSource.from_config(RunaheadConfig(partition=[0.5, 0.25, 0.25]), comm=Ranks(3), model=None)
    assert some.sizes(8) == (4, 2, 2)
    some.use([1, 1, 6])
    assert some.sizes(8) == (1, 1, 6)
    with pytest.raises(ValueError, match="sums to 8 tokens, but a sequence of the prompt has 9 new ones"):
        some.sizes(9)
    some.use("even")
    assert some.sizes(9) == (3, 3, 3)
    for wrong in ([1, 2], [0.5, 0.5, 0.5]):
        with pytest.raises(ValueError, match=r"megakv.runahead.partition = \["):
            some.use(wrong)
        with pytest.raises(ValueError, match=r"megakv.runahead.partition = \["):
            PartitionSource.from_config(RunaheadConfig(partition=wrong), comm=Ranks(3), model=None)


@pytest.mark.parametrize(
    ("ranks", "settings", "changes", "message"),
    [
        (3, {}, {"fingerprint": {"processor": "another"}}, "processor 'another', here "),
        (3, {}, {"fingerprint": {"threads": 99}}, "threads 99, here "),
        (3, {}, {"model": {"layers": 7}}, "model's layers 7, here 2"),
        (3, {}, {"model": {"dtype": "bfloat16"}}, "model's dtype 'bfloat16', here 'float32'"),
        (3, {}, {"tp": 2}, "tp 2, here 1"),
        (3, {"kv": "last"}, {}, "kv 'sharded', here 'last'"),
        (3, {"chunk_tokens": 99}, {}, "chunk_tokens 1024, here 99"),
    ],
)
def test_foreign_tables_are_refused_unless_accepted(
    tmp_path: Path, ranks: int, settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    some = here(any_table(ranks, 3), ranks)
    for name, values in changes.items():
        part = getattr(some.chain, name)
        changed = part.model_copy(update=values) if isinstance(values, dict) else values
        some = some.model_copy(update={"chain": some.chain.model_copy(update={name: changed})})
    path = tmp_path / "table.json"
    with pytest.raises(ValueError) as caught:
        source(path, some, **settings)
    text = str(caught.value)
    assert text.startswith(f"megakv.runahead.table = {str(path)!r} was searched elsewhere: ") and message in text
    assert "or set megakv.runahead.accept_foreign_table = true" in text
    accepted = source(path, some, accept_foreign_table=True, **settings)
    first = some.entries[0]
    assert accepted.sizes(first.context) == from_fractions(first.fractions, first.context)


def test_another_number_of_ranks_is_never_accepted(tmp_path: Path) -> None:
    some = here(any_table(3, 2), 4)
    for accepted in (False, True):
        with pytest.raises(ValueError, match="has partitions for 3 context-parallel ranks, here are 4; search here"):
            source(tmp_path / "t", some, comm=Ranks(4), accept_foreign_table=accepted)


def test_a_model_without_sizes_needs_permission(tmp_path: Path) -> None:
    some = here(any_table(2, 2), 2)
    with pytest.raises(ValueError, match="whether it is of this model is not known"):
        source(tmp_path / "t", some, model=None)
    source(tmp_path / "t", some, model=None, accept_foreign_table=True)


def test_ranks_with_other_files_or_none(tmp_path: Path) -> None:
    some = here(any_table(2, 2), 2)
    with pytest.raises(ValueError, match="megakv.runahead.table: the file of rank 1 differs from that of rank 0"):
        source(tmp_path / "t", some, comm=Ranks(2, digest="other"))
    with pytest.raises(MegaKVError, match="rank 1 failed"):
        source(tmp_path / "t", some, comm=Ranks(2, failure="no such file"))
    with pytest.raises(ValueError, match=r"megakv.runahead.table = .* cannot be read"):
        PartitionSource.from_config(RunaheadConfig(table=str(tmp_path / "none")), comm=Ranks(2), model=MODEL)

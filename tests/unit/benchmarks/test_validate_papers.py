"""benchmarks/validate_papers.py: data are whole, halves do not mix, and fits find the constants of known times."""

import random
from dataclasses import replace

import pytest

from benchmarks.papers import context_parallel, fairkv, offload
from benchmarks.papers.fit import Constant, Constants, fitted
from benchmarks.papers.published import Cell, Table, cells_of, load_tables, pairs_of
from benchmarks.papers.runahead import CONSTANTS, NAMES, RunaheadTables

TABLES = load_tables()


def test_half_of_every_table_is_held_out() -> None:
    for table in TABLES.values():
        uses = [cell.use for cell in cells_of(table)]
        if set(uses) != {"reported"}:
            assert abs(uses.count("fitted") - uses.count("held_out")) <= 2
            neighbours = [cell for cell in cells_of(table) if cell.row == 0 and cell.use != "reported"]
            assert len(neighbours) == 1 or len({cell.use for cell in neighbours}) == 2 or len(neighbours) == 2


def test_a_few_numbers_are_as_printed() -> None:
    def value(table: str, **setting: object) -> float:
        (found,) = [cell.value for cell in cells_of(TABLES[table]) if setting.items() <= cell.setting.items()]
        return found

    assert value("runahead_table_1", model="falcon_7b", context=8192, ranks=8, method="kvr_s") == 0.29
    assert value("runahead_table_3", context=12288, ranks=4, link="1GB/s") == 2.30
    assert value("kvpr_table_4", prompt=256, generated=128, method="streaming") == 104.115
    assert value("fairkv_table_2", model="llama3_8b", budget=512, tp=8) == 0.688
    assert value("context_parallel_table_4", new=6400, method="pass_q") == 1.30201
    assert value("context_parallel_table_7", hosts=4, read_by="tp") == 19.841


def test_tables_are_whole() -> None:
    for table in TABLES.values():
        assert [len(row) for row in table.values] == [len(table.columns)] * len(table.rows)
        assert all(cell.value > 0 for cell in cells_of(table))


def test_pairs_differ_by_the_compared_key_alone() -> None:
    for table in TABLES.values():
        for one, other in pairs_of(table):
            assert table.compared is not None and one.row == other.row
            assert one.setting[table.compared] != other.setting[table.compared]
            assert "reported" not in (one.use, other.use)
    assert len(pairs_of(TABLES["runahead_table_1"])) == 44
    # One GPU is compared with 2 and 4 on either link; links not with each other.
    assert all(one.setting.get("link", "") in ("", other.setting["link"]) for one, other in pairs_of(TABLES[NAMES[2]]))


def test_a_fit_finds_the_constants_and_looks_at_no_held_out_cell() -> None:
    truth = {"a": random.uniform(0.5, 2), "b": random.uniform(0.5, 2)}

    def predict(cell: Cell, constants: Constants) -> float:
        return constants["a"] * (cell.row + 1) + constants["b"] * (cell.column + 1) ** 2

    rows, columns = tuple({"row": i} for i in range(4)), tuple({"column": i} for i in range(4))
    blank = Table(
        name="t", paper="p", source="s", quantity="q", unit="u", rows=rows, columns=columns, values=((1.0,) * 4,) * 4
    )
    values = tuple(
        tuple(predict(cell, truth) * (1 if cell.use == "fitted" else 7) for cell in cells_of(blank) if cell.row == row)
        for row in range(4)
    )
    table = replace(blank, values=values)
    start = {name: Constant(1.0, 0.1, 10.0) for name in truth}
    assert fitted(cells_of(table), start, predict) == pytest.approx(truth, rel=1e-3)


def test_predictions_of_every_kind_are_near_the_published_numbers() -> None:
    """Constants as they are fitted; the whole fit takes a minute."""
    chain = {name: each.start for name, each in CONSTANTS.items()} | {"matmul_efficiency": 0.49, "score_bytes": 25.0}
    cells = [cell for cell in cells_of(TABLES["runahead_table_1"]) if cell.setting["model"] == "llama_7b"]
    cells = [cell for cell in cells if cell.setting["context"] in (1024, 8192) and cell.setting["ranks"] == 4]
    tables = RunaheadTables()
    tables.search(cells, chain)
    for cell in cells:
        assert tables.predict(cell, chain) == pytest.approx(cell.value, rel=0.15)

    cells = [c for name in context_parallel.NAMES for c in cells_of(TABLES[name])]
    rings = fitted(cells, context_parallel.CONSTANTS, context_parallel.predict)
    headlines = context_parallel.headlines(rings, TABLES[context_parallel.WHOLE_PROMPTS])
    for name in ("ttft_128k_16_hosts_s", "ttft_1m_16_hosts_s", "flops_per_gpu"):
        assert headlines[name].predicted == pytest.approx(headlines[name].published, rel=0.15)
    # Of the three whole prompts the fit has seen two.
    uses = {name: headlines[name].use for name in list(headlines)[:3]}
    assert uses == {
        "ttft_128k_16_hosts_s": "held_out",
        "ttft_128k_8_hosts_s": "fitted",
        "ttft_1m_16_hosts_s": "fitted",
    }
    # What only the paper's partial prefill takes: as much as the same prompt differs by between Tables 4 and 7.
    assert rings[context_parallel.PARTIAL] == pytest.approx((11.46215 - 10.95) / 126, rel=0.15)

    known = cells_of(TABLES["kvpr_table_5"])
    link = fitted(known, offload.SMALL_CONSTANTS, offload.predict)
    assert all(offload.predict(cell, link) == pytest.approx(cell.value, rel=0.15) for cell in known)
    kept = fairkv.kept_tokens(256, random.uniform(0.5, 5))
    assert kept.mean() == pytest.approx(256) and kept.min() >= 32
    even = replace(known[0], table=TABLES["fairkv_table_2"])
    assert fairkv.predict(even, {"evenness": 1e5}) == pytest.approx(1.0, abs=0.01)

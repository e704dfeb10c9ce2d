"""Bytes on the wire equal the closed forms (context parallelism, Tables 2 and 3), in every layer."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "traffic.py"
FLOAT = 4
GATHERING = ("all_gather", "tsp", "tsp_causal")


def sent(row: dict[str, Any], operation: str, layer: int | None) -> int:
    return sum(
        t["bytes_sent"] for rank in row["ranks"] for t in rank if (t["operation"], t["layer"]) == (operation, layer)
    )


def judge(row: dict[str, Any], cp: int, tp: int) -> None:
    config = llama()
    head_dim = config.hidden_size // config.num_attention_heads
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    new, context, decoded = row["new"], row["new"] + row["cached"], row["decoded"]
    # Sums over the tensor-parallel ranks are those of the whole model: each passes its own heads.
    hops, partial = cp - 1, query + config.num_attention_heads

    # Each step of decoding has one more cached token, but one query only.
    def expected(queries: int, *, method: str) -> dict[str, int]:
        found = {"pass_kv": 0, "pass_q": 0, "pass_q_return": 0, "replicated": 0, "all_gather": 0}
        if method == "pass_kv":
            found["pass_kv"] += hops * 2 * context * key_value * FLOAT
        elif method not in GATHERING:
            found["pass_q"] += hops * queries * query * FLOAT
            found["pass_q_return"] += hops * queries * partial * FLOAT
        if row["decode"] == "pass_q":
            found["pass_q"] += hops * decoded * query * FLOAT
            found["pass_q_return"] += hops * decoded * partial * FLOAT
        else:
            found["replicated"] += cp * hops * decoded * partial * FLOAT
        return found

    for layer in range(config.num_hidden_layers):
        # The last layer is asked for one token: its query travels, instead of all keys and values.
        last = layer == config.num_hidden_layers - 1
        method = "pass_q" if last and row["prefill"] == "pass_kv" else row["prefill"]
        for operation, nbytes in (wanted := expected(1 if last else new, method=method)).items():
            if operation == "all_gather" and row["prefill"] in GATHERING:
                # (p - 1) C, KV-Runahead's Equations 4 and 5. The collective wants equal sizes: the shorter shards are
                # filled up, by a token and turn at most.
                exact = hops * 2 * context * key_value * FLOAT
                assert exact <= sent(row, operation, layer) <= exact + 2 * cp * hops * 2 * key_value * FLOAT
            else:
                assert sent(row, operation, layer) == nbytes, (row["prefill"], operation, layer)
        # Nothing but keys, values, queries and results travels: no coordinates.
        named = {t["operation"] for rank in row["ranks"] for t in rank if t["layer"] == layer and t["bytes_sent"]}
        assert named <= wanted.keys() | {"tp_all_reduce"}
    everything = [t for rank in row["ranks"] for t in rank]
    assert all(0 <= t["seconds_exposed"] <= t["seconds"] for t in everything)
    reduced = sum(t["bytes_sent"] for t in everything if t["operation"] == "tp_all_reduce")
    assert (reduced > 0) == (tp > 1)


@pytest.mark.parametrize(
    "mesh", ["2x1", *(pytest.param(mesh, marks=pytest.mark.full) for mesh in ("2x2", "4x1", "3x1"))]
)
def test_bytes_are_those_of_the_paper(tmp_path: Path, mesh: str) -> None:
    cp, tp = (int(part) for part in mesh.split("x"))
    out = tmp_path / "out.json"
    run_ranks(SCRIPT, out, mesh, ranks=cp * tp, timeout=120).check()
    rows = json.loads(out.read_text())
    assert len(rows) == 10
    for row in rows:
        judge(row, cp, tp)

"""What the chain of KV-Runahead sends, keeps and takes, against the papers' equations and ring pass-KV."""

from pathlib import Path
from typing import Any

import pytest

from megakv.base.partition import even
from megakv.costmodel.context_parallel import chain_tokens, tsp_tokens
from tests.distributed.test_runahead import launch
from tests.families import llama


def test_the_last_rank_decodes_alone(tmp_path: Path) -> None:
    """With ``kv = last`` nothing but logits and control travels once the prompt was read."""
    plan = {
        "check": "traffic", "mesh": "4x1", "tokens": 100, "decoded": 6, "methods": ["runahead"],
        "runahead": {"kv": "last", "partition": "even"},
    }  # fmt: skip
    (found,) = launch(tmp_path, [plan], 4, 120)
    rows = found["runahead"]["rows"]
    assert {operation for operation, _, nbytes in rows if nbytes} == {"runahead", "logits", "control"}
    config = llama()
    row_bytes = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads * 4
    for layer in range(config.num_hidden_layers):
        assert kv_bytes(rows, "runahead", layer) == chain_tokens(even(100, 4)) * row_bytes


def kv_bytes(rows: list[tuple[str, int, int]], operation: str, layer: int) -> int:
    return sum(nbytes for name, index, nbytes in rows if (name, index) == (operation, layer))


@pytest.mark.parametrize(
    ("ranks", "tokens", "partition"),
    [
        (3, 9, [4, 3, 2]),
        (4, 96, "even"),
        (4, 100, [0.4, 0.3, 0.2, 0.1]),
        pytest.param(2, 50, [49, 1], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_paper(tmp_path: Path, ranks: int, tokens: int, partition: Any) -> None:
    """Equations 4 to 7, by the ledger: the sum of the prefixes sent, and (p - 1) C for TSP."""
    plan = {
        "check": "traffic", "mesh": f"{ranks}x1", "tokens": tokens, "methods": ["runahead", "tsp", "tsp_causal"],
        "runahead": {"partition": partition, "chunk_tokens": 5},
    }  # fmt: skip
    (found,) = launch(tmp_path, [plan], ranks, 120)
    config = llama()
    row_bytes = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads * 4
    sizes = even(tokens, ranks)
    if isinstance(partition, list):
        sizes = tuple(partition if sum(partition) == tokens else [round(part * tokens) for part in partition])
    query_bytes = config.hidden_size * 4
    partial_bytes = query_bytes + config.num_attention_heads * 4
    last = config.num_hidden_layers - 1
    # Of the last layer the chain sends nothing: the last token's query goes round all ranks, and its results return.
    rows = found["runahead"]["rows"]
    assert kv_bytes(rows, "runahead", last) == 0
    assert [kv_bytes(rows, name, last) for name in ("pass_q", "pass_q_return")] == [
        (ranks - 1) * query_bytes, (ranks - 1) * partial_bytes
    ]  # fmt: skip
    for layer in range(last):
        chain = kv_bytes(found["runahead"]["rows"], "runahead", layer) // row_bytes
        assert chain == chain_tokens(sizes)
        for method in ("tsp", "tsp_causal"):
            gathered = kv_bytes(found[method]["rows"], "all_gather", layer) // row_bytes
            # Messages of a collective are as long as the longest: a token more, at most.
            assert tsp_tokens(sizes) <= gathered <= tsp_tokens(sizes) + ranks * (ranks - 1)
            if tokens % ranks == 0:
                assert gathered == tsp_tokens(sizes)
            if partition == "even":
                assert 2 * chain == gathered
            if partition == [4, 3, 2]:
                assert (2 * chain, 2 * gathered) == (22, 36)
    # TSP keeps its published form in all layers.
    for method in ("tsp", "tsp_causal"):
        gathered = [kv_bytes(found[method]["rows"], "all_gather", layer) for layer in range(last + 1)]
        assert len(set(gathered)) == 1 and gathered[0] > 0
    assert all(result["waits"] for result in found.values())
    # Two ranks and nobody else share a group: what is posted ahead on one edge holds back nothing on another.
    edges = found["runahead"]["edges"]
    assert sorted(pair for _, pair in edges) == sorted([rank, rank + 1] for rank in range(ranks - 1) for _ in range(2))
    assert len({name for name, _ in edges}) == ranks - 1


def test_peak_memory_is_that_of_pass_kv(tmp_path: Path) -> None:
    """With ``kv = sharded``, what a prompt adds on the fullest rank is at most 1.1 times pass-KV's."""
    added, section = {}, {"partition": "even", "chunk_tokens": 512}
    for method in ("pass_kv", "runahead"):
        plan = {"check": "memory", "mesh": "4x1", "tokens": 5000, "method": method, "runahead": section}
        (found,) = launch(tmp_path, [plan], 4, 300)
        added[method] = max(found["added"])
        # Keys and values are but a part of what is measured.
        assert added[method] > found["kv"] == 6 * 1250 * 2 * 256 * 4
    assert added["runahead"] <= 1.1 * added["pass_kv"], added

"""benchmarks/attention_gpu.py on the CPU: every virtual rank's work, its check and its report."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.ring import Heads, VirtualRing, matmul_rate
from benchmarks.harness.timing import Watch
from megakv.attention.prefill import ROUNDED_TOLERANCE
from megakv.attention.reference import dense_attention
from tests.unit.benchmarks.running import fork_benchmark, refusal

start = partial(fork_benchmark, "attention_gpu.py", env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("context", [37, 500])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_virtual_ranks_make_up_the_whole_attention(context: int, size: int) -> None:
    heads = Heads(6, 2, 32, torch.float32)
    ring = VirtualRing(context, size, heads, torch.device("cpu"))
    assert sorted(np.concatenate(ring.slots).tolist()) == list(range(context))
    q, k, v = (x.transpose(0, 1) for x in (ring._q_CHD, ring._k_CKD, ring._v_CKD))
    causal = torch.ones(context, context, dtype=torch.bool).tril()
    out, lse = dense_attention(q, k, v, 32**-0.5, visible_LS=causal)
    flops = []
    for rank, slots in enumerate(ring.slots):
        merging = Watch(ring.device)
        attention = ring.attend(rank, ring.queries(rank), merging)
        torch.testing.assert_close(attention.out.double(), out[:, slots], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(attention.lse.double(), lse[:, slots], rtol=1e-5, atol=1e-5)
        reference = ring.reference(slots)
        torch.testing.assert_close(reference[0], out[:, slots])
        torch.testing.assert_close(reference[1], lse[:, slots])
        assert max(ring.errors(rank, attention, np.arange(len(slots)))) < 1e-5
        assert merging.seconds() > 0 and merging.seconds() == 0
        flops.append(heads.flops(slots))
        # A wrong row is found.
        attention.out[:, 3] += 0.1 * attention.out[:, 3].norm(dim=-1, keepdim=True) / 32**0.5
        assert 0.09 < ring.errors(rank, attention, np.array([1, 3]))[0] < 0.11
    assert sum(flops) == 4 * 6 * 32 * int(causal.sum())


def test_keys_of_several_reference_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = VirtualRing(300, 2, Heads(2, 1, 16, torch.float32), torch.device("cpu"))
    slots = np.array([0, 63, 64, 65, 299])
    wanted = ring.reference(slots)
    monkeypatch.setattr("benchmarks.harness.ring.REFERENCE_KEYS", 64)
    for got, want in zip(ring.reference(slots), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_rate_of_the_matrix_product_is_plausible() -> None:
    assert 1e8 < matmul_rate(256, torch.float32, torch.device("cpu")) < 1e14


def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    result = start(
        "--device", "cpu", "--contexts", "300,1K,1024M", "--ranks", "2,3", "--heads", "4", "--kv-heads", "2",
        "--head-dim", "32", "--repeats", "2", "--matmul", "256", "--json", path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(path.read_text())
    assert set(report) == {"benchmark", "machine", "versions", "args", "rows", "summary"}
    assert report["benchmark"] == "attention_gpu" and report["args"]["contexts"] == [300, 1024, 1 << 30]
    rows = report["rows"]
    assert [(row["context"], row["ranks"]) for row in rows] == [(300, 2), (300, 3), (1024, 2), (1024, 3)]
    for row in rows:
        context, ranks = row["context"], row["ranks"]
        assert sum(row["flops"]) == 4 * 4 * 32 * context * (context + 1) // 2 and len(row["flops"]) == ranks
        assert np.shape(row["rank_seconds"]) == np.shape(row["merge_seconds"]) == (2, ranks)
        assert row["seconds"] == [max(values) for values in row["rank_seconds"]]
        rate = np.median([sum(row["flops"]) / ranks / seconds for seconds in row["seconds"]])
        assert row["tflops"] == pytest.approx(rate / 1e12)
        assert row["matmul_fraction"] == pytest.approx(row["tflops"] / row["matmul_tflops"])
        assert 0 < row["merge_share"] < 1
        # Where bfloat16 is multiplied by pairs, weights are rounded to it.
        assert 0 < row["output_error"] < ROUNDED_TOLERANCE and row["lse_error"] < 1e-4
    summary = report["summary"]
    assert summary["context"] == 1024
    assert [(cell["context"], cell["ranks"]) for cell in summary["skipped"]] == [(1 << 30, 2), (1 << 30, 3)]
    assert summary["matmul_fraction"] == {str(row["ranks"]): row["matmul_fraction"] for row in rows[2:]}
    assert summary["lowest_matmul_fraction"] == min(summary["matmul_fraction"].values())
    assert summary["largest_merge_share"] == max(row["merge_share"] for row in rows[2:])
    assert "at 1,024 tokens: at least" in result.stdout
    assert "1,073,741,824 tokens on 2 ranks left out: needs" in result.stdout


def test_a_run_without_a_gpu_or_of_which_nothing_fits_fails() -> None:
    result = start()
    assert result.returncode == 2 and "this machine has no CUDA GPU" in result.stderr
    result = start("--device", "cpu", "--contexts", "1024M", "--ranks", "2")
    assert result.returncode == 1 and "nothing fits: 1,073,741,824 tokens on 2 ranks" in result.stderr


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--contexts", "8K..1M"], "--contexts 8K..1M"),
        (["--contexts", "0"], "--contexts 0"),
        (["--ranks", "2,x"], "--ranks 2,x"),
        (["--contexts", "16", "--ranks", "16"], "--contexts 16 has fewer tokens than 2 x --ranks 16"),
        (["--heads", "16", "--kv-heads", "3"], "--heads 16 is no multiple of --kv-heads 3"),
        (["--repeats", "0"], "--repeats 0"),
    ],
)
def test_what_is_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("attention_gpu.py", argv)

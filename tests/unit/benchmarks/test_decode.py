"""benchmarks/decode.py: a tiny real run, and the caches it is made of."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.breakdown import attention_times, split_phases
from benchmarks.harness.models import random_layers, single_caches
from benchmarks.harness.predictions import predicted_anew
from megakv.tracking.measurements import Event
from tests.unit.benchmarks.running import fork_benchmark, refusal, tiny

TINY = tiny(heads=4, kv_heads=4)
SINGLE = ["single", "single_idle", "in_place", "in_place_idle"]
fork = partial(fork_benchmark, "decode.py")


@pytest.mark.drawn("benchmarks")
def test_tiny_run_of_all_methods(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    done = fork(
        "--ranks", "2", "--context", "101", "--tokens", "3", "--repeats", "3", "--profile-seconds", "0.1",
        "--json", path, *TINY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert set(report) == {"benchmark", "machine", "versions", "args", "rows", "summary"}
    assert report["benchmark"] == "decode" and report["args"]["kv_heads"] == 4
    assert predicted_anew(report, path) == report["rows"]
    names = [*SINGLE, "replicated", "tensor", "pass_q", "auto"]
    assert [(row["batch"], row["method"]) for row in report["rows"]] == [(b, name) for b in (1, 2) for name in names]
    for row in report["rows"]:
        assert (row["ranks"], row["context"], row["tokens_per_sample"]) == (2, 101, 3)
        assert len(row["seconds"]) == 3 and all(value > 0 for value in row["seconds"])
        # What it is was chosen in the run.
        chosen = row["method"] == "auto"
        assert row["predicted_s"] is None if chosen else 0 < row["predicted_s"] < math.inf
        # The same cached tokens and weights everywhere.
        assert row["max_logit_difference"] <= 1e-5
        ranks = row["rank_seconds"]
        if row["method"] in ("single", "in_place"):
            assert row["seconds"] == pytest.approx([sum(values) / 2 for values in ranks])
        else:
            assert row["seconds"] == [max(values) for values in ranks]
        assert all((values[1] == 0) == row["method"].endswith("idle") for values in ranks)
        if row["method"] in SINGLE:
            assert row["bytes_sent"] == [{}, {}] and "attention_us" not in row
        else:
            assert row["attention_us"]["attention"] > 0 and row["attention_us"]["collective"] > 0
            assert chosen or (row["attention_us"]["send_recv"] > 0) == (row["method"] == "pass_q")
    middle = {(row["batch"], row["method"]): sorted(row["seconds"])[1] for row in report["rows"]}
    for batch, methods in report["summary"]["time_ratio"].items():
        assert set(methods) == {"replicated", "tensor", "pass_q", "auto"}
        for name, peers in methods.items():
            assert list(peers) == SINGLE
            for peer, found in peers.items():
                assert found["value"] == pytest.approx(middle[int(batch), name] / middle[int(batch), peer])
                assert 0 < found["low"] <= found["value"] <= found["high"]
        best = report["summary"]["best"][batch]
        assert best["largest_ratio"] == max(found["value"] for found in methods[best["method"]].values())
    assert "Seconds per token" in done.stdout and "seconds ms" in done.stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--ranks", "2", "--methods", "single,ring"], "--methods single,ring"),
        (["--ranks", "2", "--methods", "single_idle,pass_q"], "--methods single_idle,pass_q"),
        (["--ranks", "2", "--batches", "1,0"], "--batches 1,0"),
        (["--ranks", "2", "--batches", "1,x"], "--batches 1,x"),
        (["--ranks", "2", "--tokens", "0"], "--tokens 0"),
    ],
)
def test_impossible_arguments_are_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("decode.py", argv)


def test_caches_that_do_not_fit_are_refused() -> None:
    done = fork("--ranks", "2", "--context", "100000000", "--batches", "64", timeout=60)
    assert done.returncode != 0 and "--context 100000000" in done.stderr and "GiB" in done.stderr


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64,
        vocab_size=77,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_roomy_and_copying_caches_hold_the_same_and_rewind() -> None:
    model = small_llama()
    roomy, copying = single_caches(model, batch=2, tokens=13, room=4)
    ids = torch.randint(0, 77, (2, 17))
    outputs = []
    for cache in (roomy, copying, roomy, copying):
        cache.rewind()
        assert cache.get_seq_length() == 13
        for pair, (keys, values) in zip(cache.layers, random_layers(model, 2, 13), strict=True):
            assert torch.equal(pair.keys, keys) and torch.equal(pair.values, values)
        steps = [model(input_ids=ids[:, 13 + i : 14 + i], past_key_values=cache).logits for i in range(4)]
        assert cache.get_seq_length() == 17
        outputs.append(torch.cat(steps, dim=1))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-5, atol=1e-6)
    # Written in place: no layer has moved.
    before = [layer.keys.data_ptr() for layer in roomy.layers]
    model(input_ids=ids[:, :1], past_key_values=(roomy.rewind() or roomy))
    assert [layer.keys.data_ptr() for layer in roomy.layers] == before


def test_breakdown_of_a_ring_and_of_a_replicated_step() -> None:
    ms = 1e-3
    prefill = [
        Event("attention", "compute", 0 * ms, 4 * ms, 0),
        Event("pass_q", "communication", 0 * ms, 6 * ms, 0),
        Event("pass_q", "wait", 4 * ms, 6 * ms, 0),
        Event("attention", "compute", 6 * ms, 8 * ms, 0),
        Event("pass_q_return", "communication", 8 * ms, 11 * ms, 0),
        Event("pass_q_return", "wait", 8 * ms, 11 * ms, 0),
        Event("dense", "compute", 11 * ms, 20 * ms),
        Event("logits", "communication", 20 * ms, 21 * ms),
        Event("logits", "wait", 20 * ms, 21 * ms),
    ]
    step = [
        Event("attention", "compute", 30 * ms, 31 * ms, 0),
        Event("replicated", "communication", 31 * ms, 31.5 * ms, 0),
        Event("replicated", "wait", 31 * ms, 31.5 * ms, 0),
        Event("logits", "communication", 32 * ms, 33 * ms),
    ]
    assert split_phases(prefill + step) == (prefill, step)
    expected = {"attention": 3000, "send_recv": 6000, "send_recv_exposed": 2000, "collective": 3000, "layer": 11000}
    assert attention_times(prefill) == pytest.approx(expected)
    expected = {"attention": 1000, "send_recv": 0, "send_recv_exposed": 0, "collective": 500, "layer": 1500}
    assert attention_times(step) == pytest.approx(expected)


def test_phases_of_a_rank_that_is_alone() -> None:
    events = [Event("attention", "compute", float(i), i + 0.5, i % 3) for i in range(9)]
    assert split_phases(events) == (events[:3], events[3:])

"""benchmarks/decode.py: a tiny real run, and the caches it is made of."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.models import random_layers, single_caches
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
    names = [*SINGLE, "replicated", "tensor", "pass_q", "auto"]
    assert [(row["batch"], row["method"]) for row in report["rows"]] == [(b, name) for b in (1, 2) for name in names]
    for row in report["rows"]:
        assert (row["ranks"], row["context"], row["tokens_per_sample"]) == (2, 101, 3)
        assert len(row["seconds"]) == 3 and all(value > 0 for value in row["seconds"])
        # Other libraries' times are not predicted, and what `auto` is was chosen in the run.
        known = row["method"] in ("replicated", "tensor", "pass_q")
        assert 0 < row["predicted_s"] < math.inf if known else row["predicted_s"] is None
        # The same cached tokens and weights everywhere.
        assert row["max_logit_difference"] <= 1e-5
        ranks = row["rank_seconds"]
        if row["method"] in ("single", "in_place"):
            assert row["seconds"] == pytest.approx([sum(values) / 2 for values in ranks])
        else:
            assert row["seconds"] == [max(values) for values in ranks]
        assert all((values[1] == 0) == row["method"].endswith("idle") for values in ranks)
        assert (row["bytes_sent"] == [{}, {}]) == (row["method"] in SINGLE)
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

"""What all benchmarks share, without ranks: samples, tables, charts, files, models over the same weights."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.charts import bars
from benchmarks.harness.models import random_ids, random_model, twin
from benchmarks.harness.options import Options
from benchmarks.harness.publish import TIMES, align, describe_machine, publish, table
from benchmarks.harness.sampling import Agreement, Method, Samples, measure
from benchmarks.harness.world import World


class Alone(World):
    """A world of one rank without a process group."""

    def barrier(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Recorder(Method):
    def __init__(self, name: str, calls: list[str]):
        super().__init__(name)
        self._calls = calls

    def run(self) -> torch.Tensor:
        self._calls.append(self.name)
        return torch.ones(5 << 20, dtype=torch.uint8)

    def result(self, output: torch.Tensor) -> torch.Tensor:
        return output[:3]

    def facts(self, world: World, output: torch.Tensor) -> dict[str, Any]:
        return {"shape": [self.name, *output.shape]}


def test_methods_run_in_turn_and_every_round_begins_with_another() -> None:
    calls: list[str] = []
    methods = [Recorder(name, calls) for name in "abc"]
    world = Alone(0, 1, torch.device("cpu"))
    results = measure(world, methods, Agreement(world, "fp32"), repeats=4)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    for samples, name in zip(results, "abc", strict=True):
        row = samples.to_row(ranks=1, context=7)
        assert row["method"] == name and row["shape"] == [name, 5 << 20] and row["context"] == 7
        assert len(row["seconds"]) == 4 and min(row["seconds"]) > 0
        assert row["bytes_sent"] == [{}]
        # The kernel counts resident pages in batches: not exact to the last of them.
        assert 4 << 20 < row["working_bytes"][0] < row["peak_bytes"][0]


def test_a_sample_is_the_slowest_ranks_and_memory_the_largest_of_all_rounds() -> None:
    samples = Samples("m", [{}, {}])
    samples.add([(1.0, 50, 5), (3.0, 90, 1)])
    samples.add([(2.0, 70, 3), (1.5, 60, 8)])
    assert samples.seconds == [3.0, 2.0] and samples.rank_seconds == [[1.0, 3.0], [2.0, 1.5]]
    assert samples.peak_bytes == [70, 90] and samples.working_bytes == [5, 8]


def test_twin_shares_weights_but_neither_config_nor_fate() -> None:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=99, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    other = twin(model)
    for (name, ours), (other_name, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == other_name and ours is not theirs and ours.data_ptr() == theirs.data_ptr()
    assert other.lm_head.weight is other.model.embed_tokens.weight
    ids = torch.randint(0, 99, (1, 9))
    expected = model(ids).logits
    other.set_attn_implementation("eager")
    torch.testing.assert_close(other(ids).logits, expected, rtol=1e-4, atol=1e-5)
    other.model.layers[0].mlp.up_proj.weight.data = torch.zeros(48, 32)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, expected)


def model_arguments(*argv: str) -> argparse.Namespace:
    options = Options("shapes")
    options.model()
    return options.parse(argv)


def test_random_llama_has_the_shape_asked_for_and_the_same_weights_everywhere() -> None:
    arguments = model_arguments(
        "--layers", "3", "--hidden", "24", "--heads", "6", "--kv-heads", "3", "--intermediate", "40", "--vocab", "55",
        "--dtype", "bf16",
    )  # fmt: skip
    first, second = (random_model(arguments, positions=77, device=torch.device("cpu")) for _ in range(2))
    assert first.dtype == torch.bfloat16 and first.config.max_position_embeddings == 77
    assert len(first.model.layers) == 3 and first.lm_head.weight.shape == (55, 24)
    assert first.model.layers[0].self_attn.k_proj.weight.shape == (12, 24)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(random_ids(55, 31, first.device), random_ids(55, 31, first.device))


@pytest.mark.parametrize(
    ("argv", "named"), [(["--heads", "3"], "--heads 3"), (["--kv-heads", "5"], "--kv-heads 5"), (["--vocab", "0"], "0")]
)
def test_impossible_shapes_are_refused_by_name(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        model_arguments(*argv)
    assert named in capsys.readouterr().err


def test_results_that_cannot_be_written_are_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options("results")
    options.output()
    with pytest.raises(SystemExit):
        options.parse(["--json", str(tmp_path)])
    assert f"--json {tmp_path}: cannot be written: Is a directory" in capsys.readouterr().err


def test_report_chart_and_table(tmp_path: Path) -> None:
    rows = [
        {"method": "a", "ranks": 2, "context": 4096, "seconds": [3.0, 1.0, 2.5],
         "bytes_sent": [{"x": 1 << 20, "y": 1 << 19}, {"x": 5}], "working_bytes": [1 << 20, 7 << 20]},
        {"method": "longer", "ranks": 2, "context": 4096, "seconds": [0.125], "bytes_sent": [{}, {}],
         "working_bytes": [0, 0], "kv_bytes": [3 << 20, 0]},
    ]  # fmt: skip
    header, first, second = align(table(rows, f"method {TIMES}")).splitlines()
    assert len(header) == len(first) == len(second)
    assert first.split() == ["a", "2", "4,096", "2.500", "1.000", "3.000", "1.5", "-", "7.0"]
    assert second.split() == ["longer", "2", "4,096", "0.125", "0.125", "0.125", "0.0", "3.0", "0.0"]

    path = tmp_path / "sub" / "r.json"
    arguments = argparse.Namespace(ranks=2, json=str(path), wandb=None)
    charts = [bars(name, rows, "method", own="method", title="t", subtitle="s", x_label="s") for name in ("", "x", "x")]
    publish(arguments, "b", describe_machine(), rows, {"s": 1}, charts)
    report = json.loads(path.read_text())
    assert list(report) == ["benchmark", "machine", "versions", "args", "rows", "summary"]
    assert report["rows"] == rows and report["args"] == vars(arguments) and report["machine"]["load_average"] >= 0
    with pytest.raises(ValueError):
        publish(arguments, "b", {}, [{"x": float("nan")}], {}, [])
    assert json.loads(path.read_text()) == report

    for name in ("r.png", "r.x.png", "r.x.2.png"):
        assert path.with_name(name).read_bytes().startswith(b"\x89PNG")

"""DeepSpeed's shared-memory all-reduce, which ignores its group: used where TP is the whole world, and only there."""

import copy
import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.distributed.launch import run_ranks
from tests.distributed.ranks.shared_memory import OPTIONS, PRECISE, SHAPES, error_of, prompt
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "shared_memory.py"


def op_can_be_built() -> bool:
    """Whether DeepSpeed takes this machine for one where its op compiles."""
    return bool(importlib.import_module("deepspeed.ops").__compatible_ops__.get("deepspeed_shm_comm", False))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    """A model, what it answers, and its error in bf16."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).eval()
    model.save_pretrained(folder / "model")
    answers = {f"tokens.{index}": model.generate(prompt(*shape), **OPTIONS) for index, shape in enumerate(SHAPES)}
    half = model.to(torch.bfloat16)
    with torch.no_grad():
        # The reference has the very weights of the bf16 models.
        exact = copy.deepcopy(half).double()(prompt(*PRECISE)).logits
    save_file({**answers, "exact": exact}, folder / "answers.safetensors")
    return folder / "model", folder / "answers.safetensors", error_of(half, exact)


@pytest.mark.parametrize(
    ("meshes", "local_size"),
    [
        # The op stands when the second mesh comes, and would silently sum over all ranks.
        pytest.param("1x2,2x1", "2", marks=pytest.mark.drawn(1, "the op first")),
        pytest.param("1x4,2x2", "4", marks=pytest.mark.drawn(1, "the op first")),
        ("2x2,1x4", "4"),
        # Ranks on other hosts, or a launcher that says nothing: the op would crash.
        pytest.param("1x2", "1", marks=pytest.mark.drawn(1, "no op")),
        pytest.param("1x2", "0", marks=pytest.mark.drawn(1, "no op")),
    ],
)
def test_shared_memory_serves_the_whole_world_only(
    meshes: str, local_size: str, plain: tuple[Path, Path, float], tmp_path: Path
) -> None:
    *given, single = plain
    first = meshes.split(",")[0]
    cp, tp = (int(part) for part in first.split("x"))
    out = tmp_path / "out.json"
    environment = {"LOCAL_SIZE": local_size}
    run_ranks(SCRIPT, out, *given, meshes, ranks=cp * tp, timeout=200, env=environment).check()
    results = json.loads(out.read_text())
    assert [result["mesh"] for result in results] == meshes.split(",")
    for result in results:
        assert result["equal"] == [True] * 3, result
        # The op starts with the process group or never: a mesh that comes later finds what the first one wanted.
        alone = first.startswith("1x") and result["mesh"].startswith("1x")
        expected = alone and int(local_size) == cp * tp and op_can_be_built()
        assert result["shared_memory"] is expected, result
        assert (result["calls"] > 0) is expected, result
        assert 0 < result["error"] <= 1.1 * single, result
        # Nothing stays in shared memory after the run; not even names are there during it.
        assert result["files"] == []

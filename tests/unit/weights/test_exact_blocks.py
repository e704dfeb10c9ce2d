"""Levels and scales in GGUF's blocks: the same numbers, in any part, or left as they are."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megakv.engine.loading import build_model
from megakv.planner.dry_run.run import dry_run
from megakv.weights.blocks import BLOCKS, unpack
from megakv.weights.formats.exact_blocks import BlockTensor, in_blocks
from megakv.weights.lazy import LazyTensor, from_tensor
from megakv.weights.packed_linear import PackedLinear
from megakv.weights.placement.slices import SliceSpec
from tests.quantised_folders import MAKERS, PROMPT, reference


def weight(bits: int, group: int, scales: Tensor, columns: int) -> tuple[LazyTensor, Tensor]:
    """Random levels with such scales, and their numbers."""
    levels = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (len(scales), columns), dtype=torch.int8)
    numbers = levels * scales.float().repeat_interleave(group, 1)
    found = in_blocks(
        from_tensor(numbers), lambda dim, ranges: SliceSpec(dim, ranges).take(levels), lambda: scales, bits
    )
    return found, numbers


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_hold_the_numbers(bits: int, dtype: torch.dtype) -> None:
    rows, groups, group = random.randint(1, 20), random.randint(1, 5), 32 * random.randint(1, 4)
    scales = (torch.rand(rows, groups) + 0.01).to(dtype)
    found, numbers = weight(bits, group, scales, groups * group)
    assert isinstance(found, BlockTensor)
    assert torch.equal(unpack(found.blocks(0, ((0, rows),)), found.kind), numbers)
    start = random.randrange(rows)
    assert torch.equal(unpack(found.blocks(0, ((start, rows), (0, 1))), found.kind), numbers[[*range(start, rows), 0]])
    first = 32 * random.randrange(groups * group // 32)
    columns = ((first, groups * group), (0, 32))
    part = torch.cat([numbers[:, first:], numbers[:, :32]], 1)
    assert torch.equal(unpack(found.blocks(1, columns), found.kind), part)


def test_what_blocks_would_round_stays_as_it_is() -> None:
    # A scale between two of float16, too small a one, half a block, another number of bits.
    for scale in (torch.tensor([[1 + 2.0**-12]]), torch.tensor([[2.0**-30]])):
        assert not isinstance(weight(4, 64, scale, 64)[0], BlockTensor)
    assert not isinstance(weight(4, 16, torch.ones(1, 4), 64)[0], BlockTensor)
    assert not isinstance(weight(2, 32, torch.ones(1, 2), 64)[0], BlockTensor)


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors w4a16", "compressed-tensors w8a16"])
def test_folders_stay_packed(kind: str, tmp_path: Path) -> None:
    if kind.startswith("compressed"):
        pytest.importorskip("compressed_tensors")
    folder = tmp_path / "model"
    MAKERS[kind]("llama", folder)
    model = build_model(folder, dtype=torch.float32, all_reduce=lambda x: x).module
    linear = model.model.layers[0].mlp.up_proj
    assert isinstance(linear, PackedLinear)
    assert linear.weight.nbytes == 256 * BLOCKS[linear.kind].row_bytes(128)
    with torch.no_grad():
        first = model(PROMPT).logits[0, -1].argmax().item()
    assert first == reference(kind, "llama", folder)[0]
    # Heads of 32 inputs each can be cut; a part is that of the whole.
    half = build_model(folder, dtype=torch.float32, tp_size=2, tp_rank=1, all_reduce=lambda x: x).module
    whole, part = (each.model.layers[0].self_attn.o_proj for each in (model, half))
    assert torch.equal(unpack(part.weight, part.kind), unpack(whole.weight, whole.kind)[:, 64:])


def test_plans_know_what_stays_packed(tmp_path: Path) -> None:
    MAKERS["gptq"]("llama", tmp_path / "packed")
    MAKERS["fp8 blocks"]("llama", tmp_path / "unpacked")
    MAKERS["hqq"]("llama", tmp_path / "modules")
    config: dict[str, Any] = {"dtype": "fp32", "megakv": {"context_parallel": {"size": 1}}}
    packed, plain, modules = (
        dry_run(tmp_path / name, config, context=64).ranks[0].weight_bytes for name in ("packed", "unpacked", "modules")
    )
    loaded = build_model(tmp_path / "packed", dtype=torch.float32, all_reduce=lambda x: x)
    assert packed == loaded.bytes_kept
    assert 0.4 * plain > packed and modules == plain
    with pytest.raises(ValueError, match="tp_size = 2 is not supported for a checkpoint that is quantised by hqq"):
        dry_run(tmp_path / "modules", {"tensor_parallel": {"tp_size": 2}}, context=64)

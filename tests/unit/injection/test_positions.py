"""The positions that the hooks give to tokens are those of the plain model."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import TokenBlock
from megakv.forward.pass_plan import Wanted
from megakv.injection.hooks import ForwardHooks
from tests.families import bloom, falcon, falcon_alibi, gpt_j, llama, mpt
from tests.unit.injection.substituted import LAYERS, random_ids


class _StopError(Exception):
    pass


class _Recorder:
    """Takes the tokens that the hooks make of a call, and goes no further."""

    def __init__(self) -> None:
        # What computes there is PyTorch alone.
        mesh = SimpleNamespace(cp_size=1, cp_rank=0, tp_size=1, device=torch.device("meta"))
        self.comm = SimpleNamespace(mesh=mesh, channels={})
        self.planner = SimpleNamespace(may_slice=False)
        self.generation = None
        self.compressor = None
        self.replicas = None
        self.current = None
        self.positions: list[int] = []

    def new_cache(self, layers: int) -> ShardedCache:
        return ShardedCache(layers, size=1, rank=0)

    def plan(self, new: TokenBlock, cache: ShardedCache, slots: int, wanted: Wanted, **_: bool) -> None:
        self.positions = new.position.tolist()
        raise _StopError


@pytest.mark.filterwarnings("ignore:module forward hook")  # it has no engine to tidy up
@pytest.mark.parametrize(
    ("config", "given", "counted"),
    [
        (llama, [5, 6, 7], [2, 3, 4]),
        (falcon, [5, 6, 7], [2, 3, 4]),
        (gpt_j, [5, 6, 7], [2, 3, 4]),
        (falcon_alibi, [0, 1, 2], [0, 1, 2]),
        (bloom, [0, 1, 2], [0, 1, 2]),
        (mpt, [2, 3, 4], [2, 3, 4]),
    ],
)
def test_positions_are_those_of_the_plain_model(config: Any, given: list[int], counted: list[int]) -> None:
    """ALiBi counts along the mask, or slots, and never reads position_ids; rotary models read them."""
    model = AutoModelForCausalLM.from_config(config())
    recorder: Any = _Recorder()
    ForwardHooks(model, recorder, partial(recorder.new_cache, LAYERS))
    inputs = {"input_ids": random_ids(1, 5), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    with pytest.raises(_StopError):
        model(**inputs)
    assert recorder.positions == counted
    with pytest.raises(_StopError):
        model(**inputs, position_ids=torch.tensor([[3, 4, 5, 6, 7]]))
    assert recorder.positions == given

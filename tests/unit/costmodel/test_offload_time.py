"""Predicted times with keys, values and weights behind the host link: never below what the link must carry."""

import random

import pytest
import torch
from transformers import OPTConfig

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.offload_time import layer_weight_bytes, moved_seconds, offloaded_ttit
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape

PROFILE = PRESETS["a100-pcie4"].profile(cp_size=1)
LINK = PRESETS["a100-pcie4"].host.curve()
MODEL = ModelShape.from_config(
    OPTConfig(num_hidden_layers=8, hidden_size=2048, ffn_dim=8192, num_attention_heads=16, word_embed_proj_dim=2048),
    dtype=torch.float16,
)


def ttit(batch: int, tokens: int, **how: object) -> float:
    step = Workload((1,) * batch, (tokens,) * batch, 1)
    return offloaded_ttit(PROFILE, LINK, MODEL, step, "pass_q", **how)  # type: ignore[arg-type]


def test_a_step_is_as_long_as_its_transfers() -> None:
    batch, tokens = random.randint(2, 9), random.randint(500, 3000)
    cache = 8 * batch * (tokens + 1) * 2 * 2048 * 2
    weights = 8 * layer_weight_bytes(MODEL)
    assert weights == pytest.approx(8 * 12 * 2048**2 * 2, rel=0.01)
    resident = ttit_seconds(PROFILE, MODEL, Workload((1,) * batch, (tokens,) * batch, 1), "pass_q")
    assert cache / LINK.bandwidth < ttit(batch, tokens, plan="stream") < cache / LINK.bandwidth + resident + 1e-2
    assert ttit(batch, tokens, plan="stream", weights=True) > (cache + weights) / LINK.bandwidth


def test_auto_is_the_fastest_plan() -> None:
    batch, tokens = random.randint(4, 32), random.randint(200, 2000)
    plans = {name: ttit(batch, tokens, plan=name) for name in ("stream", "kvpr", "chunked")}
    assert ttit(batch, tokens) == min(plans.values())
    # Activations are half of keys and values here: recomputing some pays.
    assert plans["kvpr"] < plans["stream"]


def test_groups_share_the_weights() -> None:
    """A step of four groups brings the weights once; four steps of one group bring them four times."""
    tokens = random.randint(100, 400)
    together, apart = ttit(16, tokens, weights=True, groups=4), ttit(4, tokens, weights=True)
    assert together < 0.6 * 4 * apart
    assert ttit(3, tokens, weights=True, groups=8) == ttit(3, tokens, weights=True, groups=3)


def test_a_prompt_moves_keys_out_and_weights_in() -> None:
    tokens = random.randint(1000, 9000)
    out = 8 * LINK.at(tokens * 2 * 2048 * 2)
    assert moved_seconds(LINK, MODEL, tokens) == pytest.approx(out)
    into = 8 * LINK.at(layer_weight_bytes(MODEL))
    assert moved_seconds(LINK, MODEL, tokens, weights=True) == pytest.approx(max(out, into))

"""What models with latents leave to MegaKV, what they cache, and what they are again afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.costmodel.shape import ModelShape
from megakv.injection.interface import keeps_latents
from megakv.offload.method import AUTO
from tests.families import VOCAB, deepseek_v3

ROW = 20 + 4
"""Columns of a latent and of the rotated key."""


def engine_of(section: dict[str, Any]) -> tuple[Any, Any]:
    """An engine, and the plain model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepseek_v3(), dtype=torch.float32).eval()
    plain = copy.deepcopy(model)
    return megakv.init_inference(model, {"dtype": "fp32", "megakv": section}), plain


@pytest.mark.parametrize("prompt", [1, 9, 64])
def test_a_token_is_cached_as_its_latent(prompt: int, alone: None) -> None:
    engine, plain = engine_of({})
    ids = torch.randint(3, VOCAB, (2, prompt))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cache = engine.new_cache()
    answer = engine.generate_into(cache, ids, **options)
    assert torch.equal(answer, plain.generate(ids, **options))
    for layer in range(2):
        store = cache.store(layer)
        for sequence in range(2):
            keys, values = store.part(sequence)
            assert keys.shape == (1, prompt + 4, ROW) and values.shape == (1, prompt + 4, 0)
            store.release(sequence, 0)
        assert store.nbytes() == 2 * (prompt + 4) * ROW * 4
    # Of which plans know, for any type.
    assert ModelShape.from_config(plain.config).attention().kv_row_bytes == ROW * 4
    model = engine.module
    assert any(map(keeps_latents, model.modules()))
    engine.destroy()
    assert not any(map(keeps_latents, model.modules()))


def test_activations_larger_than_latents_are_not_kept(alone: None) -> None:
    """Recomputing from them cannot pay; from latents, attention itself recomputes keys and values."""
    engine, plain = engine_of({"offload": {"enabled": True, "method": AUTO, "host_gb": 0.05, "page_kib": 8}})
    ids = torch.randint(3, VOCAB, (1, 50))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(engine.generate(ids, **options), plain.generate(ids, **options))
    stores = [engine._offloader._cache.store(layer) for layer in range(2)]
    assert [(store.row_width, store.input_width, store.rows(0)) for store in stores] == [(ROW, 0, 54)] * 2
    assert not any(step.split.recomputed for step in engine._offloader.steps)
    engine.destroy()

"""Under autocast attention stays in the model's type: as near to the exact model as transformers' own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from tests.families import FAMILIES

OFFLOAD = {"enabled": True, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16, "method": "chunked"}


def ragged() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 190, (3, 41), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    mask[2, :39] = 0
    return ids, mask


@pytest.mark.parametrize("section", [{}, {"offload": OFFLOAD}])
@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox", "falcon", "falcon_alibi", "mpt", "gemma2", "deepseek_v3"])
def test_no_farther_from_the_exact_model_than_transformers(name: str, section: dict[str, Any], alone: None) -> None:
    plain = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    ids, mask = ragged()
    real = mask.bool()
    engine = megakv.init_inference(copy.deepcopy(plain), {"dtype": "fp32", "megakv": section})
    try:
        with torch.no_grad():
            exact = plain(ids, attention_mask=mask).logits[real]
            with torch.autocast("cpu", torch.bfloat16):
                theirs = plain(ids, attention_mask=mask).logits[real]
                ours = engine(ids, attention_mask=mask).logits[real]
        assert ours.dtype == theirs.dtype
        # Root mean squares: the largest of many roundings is a matter of chance.
        errors = [float((found.float() - exact).square().mean() ** 0.5) for found in (ours, theirs)]
        assert errors[0] <= 1.5 * errors[1]
        assert torch.allclose(engine(ids, attention_mask=mask).logits[real], exact, atol=1e-3)
    finally:
        engine.destroy()


@pytest.mark.parametrize("section", [{}, {"offload": OFFLOAD}])
@pytest.mark.parametrize("first", [True, False])
def test_a_session_may_have_turns_in_autocast_and_out_of_it(
    first: bool, section: dict[str, Any], alone: None, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.float32).eval()
    ids, mask = ragged()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    engine = megakv.init_inference(copy.deepcopy(plain), {"dtype": "fp32", "megakv": section})
    try:
        session = engine.session()
        for autocast in (first, not first, first):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                session.generate(ids, mask, **options)
        session.save(tmp_path / "saved")
        (shard,) = (tmp_path / "saved").rglob("cp*.safetensors")
        cached = [tensor for tensor in load_file(shard).values() if tensor.is_floating_point()]
        assert {tensor.dtype for tensor in cached} == {torch.float32}
        assert session.input_ids is not None and session.input_ids.shape == (3, 3 * (41 + 4))
    finally:
        engine.destroy()

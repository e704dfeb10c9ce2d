"""Models of images and text, as folders and modules: answered as text like the plain model, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CLIPConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

import megakv
from megakv.costmodel.shape import ModelShape
from megakv.engine.loading import build_model
from megakv.planner.dry_run import dry_run
from tests.tiny_configs import VOCAB
from tests.wrappers import CHUNK, WRAPPERS, qwen3_vl, saved, text_values


def weights_of_text(model: PreTrainedModel) -> int:
    """The decoder's and those of the output head, of its own or not."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    return sum(each.numel() for each in {p for part in parts for p in part.parameters()})


def prompts() -> tuple[Tensor, Tensor]:
    """A batch with padding on the left."""
    ids, mask = torch.randint(3, 90, (2, 21)), torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    return ids, mask


@pytest.mark.parametrize("make", WRAPPERS.values())
@pytest.mark.parametrize("folder", [True, False])
def test_text_is_answered_as_by_the_whole_model(make: Any, folder: bool, alone: None, tmp_path: Path) -> None:
    plain = saved(make(), tmp_path)
    ids, mask = prompts()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(ids, **options)
    with torch.no_grad():
        logits = plain(ids, attention_mask=mask).logits
    with megakv.init_inference(tmp_path if folder else plain, {"dtype": "fp32"}) as engine:
        assert torch.equal(engine.generate(ids, **options), wanted)
        found = engine(ids, attention_mask=mask).logits
        assert torch.allclose(found[mask.bool()], logits[mask.bool()], atol=1e-4)
        with pytest.raises(ValueError, match="pixel_values is not supported with MegaKV: MegaKV reads text alone"):
            engine(ids, pixel_values=torch.zeros(1, 3, 28, 28))
        if make is qwen3_vl:
            positions = torch.arange(21).expand(4, 2, 21).clone()
            positions[1, 0, 9] += 1
            with pytest.raises(ValueError, match=r"position_ids \[4, 2, 21\] are those of images or videos"):
                engine(ids, position_ids=positions)
    if folder:
        assert dry_run(tmp_path, {"dtype": "fp32"}, context=16).parameters == weights_of_text(plain)
        shape = ModelShape.from_path(tmp_path)
        assert (shape.vocab, shape.parameters) == (VOCAB, weights_of_text(plain))


@pytest.mark.parametrize("make", WRAPPERS.values())
def test_weights_of_other_senses_are_neither_read_nor_kept(make: Any, tmp_path: Path) -> None:
    plain = saved(make(), tmp_path)
    loaded = build_model(tmp_path, dtype=torch.float32, all_reduce=lambda tensor: tensor)
    assert 4 * weights_of_text(plain) == loaded.bytes_read < 4 * sum(p.numel() for p in plain.parameters())
    assert loaded.bytes_kept == loaded.bytes_read + sum(b.nbytes for b in loaded.module.buffers())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3_5Config, r"model type 'qwen3_5_text' \(Qwen3_5ForCausalLM\) is not supported: decoder layer 0"),
        (
            CLIPConfig,
            r"model type 'clip' \(CLIPConfig\) is not supported: transformers has no causal language model of",
        ),
    ],
)
def test_others_are_refused_in_one_sentence_before_weights(
    config: type[PreTrainedConfig], reason: str, alone: None, tmp_path: Path
) -> None:
    whole = config()
    if config is not CLIPConfig:
        text = whole.get_text_config().model_type
        whole = config(text_config=text_values(text))
    whole.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    for attempt in (
        lambda: megakv.init_inference(tmp_path),
        lambda: dry_run(tmp_path, {"dtype": "fp32"}, context=16),
    ):
        with pytest.raises(ValueError, match=reason) as caught:
            attempt()
        assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_attention_in_chunks_is_served_within_the_first(alone: None, tmp_path: Path) -> None:
    plain = saved(WRAPPERS["llama4"](), tmp_path)
    ids = torch.randint(3, 90, (1, CHUNK - 4))
    with megakv.init_inference(tmp_path, {"dtype": "fp32"}) as engine:
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        assert torch.equal(
            engine.generate(ids, max_new_tokens=4, **options), plain.generate(ids, max_new_tokens=4, **options)
        )
        with pytest.raises(ValueError, match=f"the model attends in chunks .* computes the first: {CHUNK}; ask for"):
            engine.generate(ids, max_new_tokens=5, **options)
        with pytest.raises(ValueError, match="the model attends in chunks"):
            engine(torch.zeros(1, CHUNK + 1, dtype=torch.long))
        with pytest.raises(ValueError, match="the model attends in chunks"):
            engine.check_length(CHUNK, 3)

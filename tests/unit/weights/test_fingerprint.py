"""Digests tell models apart whose configs and first embeddings are equal."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import megakv
from megakv.base.errors import MegaKVError
from megakv.weights.fingerprint import _digest, module_digests
from tests.families import llama
from tests.quantised_modules import Scaled, rounded

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 2}
OFFLOAD = {"offload": {"enabled": True, "host_gb": 0.05, "page_kib": 8, "weights": True}}
FP8 = {"weights": {"format": "fp8"}}


@pytest.mark.usefixtures("alone")
def test_a_session_of_another_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).eval()
    changed = {"": copy.deepcopy(model)}
    for name in dict(model.named_parameters()):
        changed[name] = copy.deepcopy(model)
        with torch.no_grad():
            # All but the first rows of embeddings, and as little as a fine-tuning does.
            changed[name].get_parameter(name)[64 if "embed" in name else 0 :] *= 1.01
    ids = torch.randint(3, 120, (1, 40))
    sessions = {"plain": {}, "fp8": FP8}
    for kind, section in sessions.items():
        with megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": section}) as engine:
            session = engine.session()
            session.generate(ids, **GREEDY)
            session.save(tmp_path / kind)
    ways: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("plain", OFFLOAD), ("fp8", FP8)]
    for index, (name, other) in enumerate(changed.items()):
        # Every tensor in the plain way, every third in the others too.
        for kind, section in ways if index % 3 == 0 else ways[:1]:
            given = copy.deepcopy(other)
            with megakv.init_inference(given, {"dtype": "fp32", "megakv": section}) as engine:
                if not name:
                    assert engine.restore_session(tmp_path / kind).length == 41
                    with pytest.raises(MegaKVError, match="its weights differ"):
                        engine.restore_session(tmp_path / next(each for each in sessions if each != kind))
                else:
                    with pytest.raises(MegaKVError, match="another model of the same config .its weights differ"):
                        engine.restore_session(tmp_path / kind)


def test_every_element_of_a_module_counts() -> None:
    model = AutoModelForCausalLM.from_config(llama(), dtype=torch.bfloat16)
    before, generator = module_digests(model), torch.Generator().manual_seed(0)
    assert module_digests(copy.deepcopy(model)) == before
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert any(name.endswith("inv_freq") for name in tensors)
    for name, tensor in tensors.items():
        place = int(torch.randint(tensor.numel(), (), generator=generator))
        element = tensor.detach().view(-1)[place : place + 1].view(torch.uint8)[:1]
        element ^= 1
        after = module_digests(model)
        assert [key for key in before if before[key] != after[key]] == [name]
        element ^= 1
    assert module_digests(model) == before
    # How much an adapter counts is no tensor.
    model.model.layers[1].mlp.up_proj.scaling = {"default": 2.0}
    first = module_digests(model)
    model.model.layers[1].mlp.up_proj.scaling["default"] = 4.0
    assert before != first != module_digests(model)


def test_tensors_of_any_type_and_layout() -> None:
    dense = torch.randn(6, 4)
    alike = [dense.t().contiguous().t(), torch.cat([dense, dense])[:6], nn.Parameter(dense)]
    assert {_digest("", each) for each in alike} == {_digest("", dense)}
    kinds = [dense.to(each) for each in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)]
    others = [dense.t(), dense.view(4, 6), dense[0], dense[:0], torch.arange(4.0)[1::4], torch.tensor(1.0), *kinds]
    others += [Scaled(*rounded(dense)), Scaled(rounded(dense)[0], rounded(dense)[1] * 2)]
    assert len({_digest("", each) for each in others}) == len(others)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_is_told_by_all_of_its_files(tmp_path: Path) -> None:
    """A link to it is the same; a few rows of embeddings, another type and other ways to load it are not."""
    model = AutoModelForCausalLM.from_config(llama(), dtype=torch.float32)
    model.save_pretrained(tmp_path / "one")
    model.model.embed_tokens.weight.data[100:120] += 1
    model.save_pretrained(tmp_path / "rows")
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    (tmp_path / "links").mkdir()
    for file in (tmp_path / "one").iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    digests = {}
    for name in ("one", "links", "rows", "parts"):
        with megakv.init_inference(tmp_path / name, {}) as engine:
            digests[name] = engine.weights_digest
    ways = {"bf16": {"dtype": "bf16"}, "fp8": {"megakv": FP8}, "random": {"megakv": {"load": "random"}}}
    for name, config in ways.items():
        with megakv.init_inference(tmp_path / "one", config) as engine:
            digests[name] = engine.weights_digest
    assert digests.pop("links") == digests["one"]
    assert len(set(digests.values())) == len(digests)

"""Digests tell models apart whose configs and first embeddings are equal."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.errors import MegaKVError
from tests.families import llama

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 2}
OFFLOAD = {"offload": {"enabled": True, "host_gb": 0.05, "page_kib": 8, "weights": True}}
FP8 = {"feed_forward": "fp8"}


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

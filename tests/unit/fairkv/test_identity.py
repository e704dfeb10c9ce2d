"""A mapping knows its model, in whatever type that is loaded, and tells it from others with as many heads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megakv.fairkv.mapper import map_heads
from megakv.fairkv.mapping import load_mapping
from megakv.fairkv.placement import place_heads
from megakv.fairkv.profile import MeasuredPrompt, ModelIdentity, load_budgets, make_profile
from tests.families import FAMILIES, llama


def model_of(family: str, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_itself_in_every_type(family: str) -> None:
    identity = ModelIdentity.of_model(model_of(family, 1, torch.bfloat16))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        same = model_of(family, 1, dtype)
        assert identity.other_sizes(same.config) is None and identity.other_weights(same) is None
        assert identity.other_weights(model_of(family, 2, dtype)) == "the same sizes, but other weights"


def test_from_the_profile_to_the_placement(tmp_path: Path) -> None:
    identity = ModelIdentity.of_model(model_of("llama", 1))
    profile = make_profile("m", "ada_snapkv", [MeasuredPrompt("a", 90, np.full((2, 4), 9.0))], identity)
    profile.save(tmp_path / "profile.json")
    map_heads(load_budgets(tmp_path / "profile.json"), tp_size=2).save(tmp_path / "mapping.json")
    mapping = load_mapping(tmp_path / "mapping.json")
    assert mapping.identity == identity
    place_heads(mapping, llama())
    with pytest.raises(ValueError, match=r"of another model, 'm': intermediate_size 97, but this model has 96"):
        place_heads(mapping, llama(intermediate_size=96))
    # A file of an earlier version has no identity.
    values = json.loads((tmp_path / "mapping.json").read_text())
    del values["identity"]
    (tmp_path / "old.json").write_text(json.dumps(values))
    place_heads(load_mapping(tmp_path / "old.json"), llama(intermediate_size=96))

"""What offloading is not there for: compressed keys and values."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.errors import MegaKVError
from tests.families import FAMILIES


def test_a_compressed_session_is_refused(offloaded: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"](), dtype=torch.float32).eval()
    fairkv = {"budget": 20, "min_tokens": 16, "window": 4}
    compressing = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": {"fairkv": fairkv}})
    session = compressing.session()
    turn = torch.randint(3, 190, (1, 40), generator=torch.Generator().manual_seed(3))
    session.generate(turn, max_new_tokens=2, do_sample=False, pad_token_id=0)
    session.save(tmp_path / "saved")
    compressing.destroy()
    with pytest.raises(MegaKVError, match=r"saved holds compressed keys.*megakv.offload.enabled = false"):
        offloaded(model).restore_session(tmp_path / "saved")

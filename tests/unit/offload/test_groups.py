"""Groups in which a batch goes through layers, and what else offloading is joined with: the same tokens."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import megakv
from megakv.offload.layer_columns import LayerColumns
from tests.unit.offload.conftest import SETTINGS
from tests.unit.offload.test_exactness import plain_model

RAGGED_TURNS = (41, 7, 60, 22, 1), (1, 12, 3, 9, 5), (2, 1, 1, 1, 1), (30, 28, 6, 50, 27)
"""Tokens of each of five sequences."""


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("alone", "fixed_costs")
@pytest.mark.parametrize(
    ("name", "method", "weights", "more", "chunk"),
    [
        ("llama_dynamic_rope", "chunked", True, {}, None),
        ("phi3_longrope", "kvpr", "disk", {}, 25),
        ("mistral", "chunked", True, {}, 25),
        ("gemma2", "auto", "disk", {}, None),
        ("gpt_oss", "chunked", "disk", {"weights": {"format": "fp8"}}, None),
        ("mixtral", "auto", True, {}, None),
        ("deepseek_v3", "chunked", False, {"weights": {"format": "fp8"}}, 25),
        ("qwen3", "auto", "disk", {"fairkv": {"budget": 0.3, "min_tokens": 24, "window": 4}}, None),
        ("gpt_oss", "stream", True, {"fairkv": {"budget": 0.3, "min_tokens": 24, "window": 4}}, 25),
    ],
)
def test_ragged_turns_in_groups(
    name: str,
    method: str,
    weights: Any,
    more: dict[str, Any],
    chunk: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers take later turns group by group, over what is recomputed, out of a window or compressed."""
    # Also where it cannot pay.
    monkeypatch.setattr("megakv.offload.config.may_pay", lambda *_: True)
    divide, divided = LayerColumns._parts, list[tuple[int, int]]()

    def noted(columns: LayerColumns, step: Any) -> Any:
        found = divide(columns, step)
        divided.append((step.cache.length, len(found)))
        return found

    monkeypatch.setattr(LayerColumns, "_parts", noted)
    model, found = plain_model(name), []
    away = {"method": method, "weights": weights, "num_gpu_batches": 3, "disk_gb": 0.02, "disk_path": str(tmp_path)}
    how = {"do_sample": False, "pad_token_id": 0, **({} if chunk is None else {"prefill_chunk_size": chunk})}
    for offload in ({"enabled": False}, {**SETTINGS, **away}):
        section, answers = {**more, "offload": offload}, []
        with megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": section}) as engine:
            session = engine.session()
            for turn, lengths in enumerate(RAGGED_TURNS):
                ids = torch.randint(3, 190, (5, max(lengths)), generator=torch.Generator().manual_seed(turn))
                mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
                answers.append(session.generate(ids, mask.long(), max_new_tokens=5, **how))
        found.append(answers)
    assert all(map(torch.equal, *found))
    # What may be compressed is chosen among a layer's tokens whole.
    assert {3} <= {groups for length, groups in divided if length}

"""Keys and values in four bits: the error of each element is bounded, and tokens are those of so rounded a cache."""

import copy
from typing import Any

import pytest
import torch

import megakv
from megakv.offload.row_format import GroupQuantiser, group_size
from tests.unit.offload.test_columns import deep_model
from tests.unit.offload.test_exactness import generate, plain_model, ragged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "group"), [(96, 12), (128, 64), (6, 1)])
def test_no_element_is_off_by_more_than_half_a_step(dtype: torch.dtype, width: int, group: int) -> None:
    rows = (torch.randn(37, width) * torch.randn(37, 1).exp() + 3 * torch.randn(37, 1)).to(dtype)
    rows[0] = 0.25
    quantiser = GroupQuantiser(width, group, dtype)
    packed = quantiser.pack(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (37, quantiser.nbytes)
    scales = 2 if dtype == torch.float16 else 4
    assert quantiser.nbytes == width // 2 + 2 * scales * width // group
    back = torch.empty_like(rows)
    quantiser.unpack(packed, back)
    groups, found = rows.double().unflatten(1, (-1, group)), back.double().unflatten(1, (-1, group))
    low, high = groups.aminmax(dim=2, keepdim=True)
    size = torch.maximum(low.abs(), high.abs())
    # Half a step; and the rounding of step, smallest value and result to their types.
    rounding = 4 * size * (torch.finfo(dtype).eps + torch.finfo(torch.float16 if scales == 2 else torch.float32).eps)
    assert ((found - groups).abs() <= (high - low) / 30 + rounding).all()


def test_groups_divide_heads() -> None:
    assert [group_size(*dims, 64) for dims in ((128, 128), (80, 80), (12, 12), (192, 128), (64, 64))] == [
        64,
        40,
        12,
        64,
        64,
    ]


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("method", ["stream", "chunked"])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_sees_rows_within_half_a_step(
    method: str, groups: int, offloaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model = deep_model("opt")
    ids, mask = ragged(4)
    engine = offloaded(copy.deepcopy(model), method=method, kv_bits=4, kv_group=8, num_gpu_batches=groups)
    exact = offloaded(copy.deepcopy(model), method="stream")
    errors: list[float] = []
    unpack = GroupQuantiser.unpack

    def compared(self: GroupQuantiser, packed: torch.Tensor, rows: torch.Tensor) -> None:
        unpack(self, packed, rows)
        again = torch.empty_like(rows)
        unpack(self, self.pack(rows), again)
        errors.append((again - rows).abs().max().item())

    monkeypatch.setattr(GroupQuantiser, "unpack", compared)
    generate(engine, ids, mask)
    # What was rounded once stays as it is.
    assert errors and max(errors) < 1e-5
    steps = engine._offloader.steps
    assert {step.report().kv_bits for step in steps} == {4}
    generate(exact, ids, mask)
    row, packed = exact._offloader.costs.profile.row_bytes, engine._offloader.costs.profile.row_bytes
    assert packed == row // 4 * (1 / 2 + 2 * 4 / 8) and packed < row / 2
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits[:, -1]
        session = engine.session()
        session.generate(ids[1:3, :-1], max_new_tokens=1, do_sample=False, pad_token_id=0)
        folder = tmp_path / "saved"
        session.save(folder)
        restored = engine.restore_session(folder)
        assert restored.length == session.length
    assert wanted.isfinite().all()


def test_logits_stay_near_the_exact_ones(offloaded: Any) -> None:
    model = plain_model("llama")
    ids, _ = ragged(2)
    engine = offloaded(copy.deepcopy(model), method="stream", kv_bits=4)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        first = engine(input_ids=ids[:, :-1], use_cache=True)
        found = engine(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True).logits[:, -1]
    # These weights are random and wide; a trained model's keys and values differ far less from their groups' levels.
    error = (found - expected).abs().max() / expected.abs().max()
    assert 0 < error < 0.25


@pytest.mark.usefixtures("alone")
def test_what_cannot_work_is_refused() -> None:
    for offload, message in (
        ({"enabled": True, "kv_bits": 4, "method": "cpu_rank"}, r"cpu_rank.*kv_bits = 4"),
        ({"enabled": True, "kv_bits": 3}, r"kv_bits"),
        ({"kv_bits": 4}, r"kv_bits is set: that needs megakv.offload.enabled = true"),
    ):
        with pytest.raises(ValueError, match=message):
            megakv.init_inference(plain_model("llama"), {"dtype": "fp32", "megakv": {"offload": offload}})

"""Keys and values in four bits: the error of each element is bounded, and tokens are those of so rounded a cache."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import megakv
from megakv.attention.compiled import load_kernel
from megakv.attention.reference import dense_attention
from megakv.costmodel.stored_rows import group_size
from megakv.offload.row_format import GroupQuantiser, HeadShape
from tests.unit.offload.test_columns import deep_model
from tests.unit.offload.test_exactness import generate, plain_model, ragged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "group", "bits"), [(96, 12, 4), (128, 64, 4), (6, 1, 4), (35, 5, 4), (35, 5, 8), (128, 64, 8)]
)
def test_no_element_is_off_by_more_than_half_a_step(dtype: torch.dtype, width: int, group: int, bits: int) -> None:
    rows = (torch.randn(37, width) * torch.randn(37, 1).exp() + 3 * torch.randn(37, 1)).to(dtype)
    rows[0] = 0.25
    quantiser = GroupQuantiser(width, group, dtype, bits)
    packed = quantiser.pack(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (37, quantiser.nbytes)
    scales = 2 if dtype == torch.float16 else 4
    assert quantiser.nbytes == -(-width * bits // 8) + 2 * scales * width // group
    back = torch.empty_like(rows)
    quantiser.unpack(packed, back)
    groups, found = rows.double().unflatten(1, (-1, group)), back.double().unflatten(1, (-1, group))
    low, high = groups.aminmax(dim=2, keepdim=True)
    size = torch.maximum(low.abs(), high.abs())
    # Half a step; and the rounding of step, smallest value and result to their types.
    rounding = 4 * size * (torch.finfo(dtype).eps + torch.finfo(torch.float16 if scales == 2 else torch.float32).eps)
    assert ((found - groups).abs() <= (high - low) / (2 * 2**bits - 2) + rounding).all()


def groups_of_all_kinds(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Wide and narrow, near zero and far from it, with a largest value near zero, of few values and of one."""
    x, power = torch.randn(count, size), torch.randint(-14, 12, (count, 1)).double().exp2().float()
    narrow = torch.randint(-3, 3, (count, 1)).double().exp2().float() * (1 + 1e-5 * power * x)
    below = 10 * x.clamp(max=0) + 1e-5 * (torch.rand(count, size) < 0.2)
    rows = torch.cat([x, power * x, narrow, x + power, below, x.round(), power.expand(-1, size)]).to(dtype)
    return rows[rows.isfinite().all(dim=1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_was_rounded_once_stays_as_it_is(dtype: torch.dtype, bits: int) -> None:
    """It is what the stored numbers give in float64, rounded to the type."""
    for size in (2, 5, 32):
        rows = groups_of_all_kinds(10_000, size, dtype)
        quantiser = GroupQuantiser(size, size, dtype, bits)
        packed, back = quantiser.pack(rows), torch.empty_like(rows)
        quantiser.unpack(packed, back)
        again = torch.empty_like(rows)
        quantiser.unpack(quantiser.pack(back), again)
        assert torch.equal(back, again)
        levels, scales = packed[:, : -(-size * bits // 8)], packed[:, -(-size * bits // 8) :].contiguous()
        if bits == 4:
            levels = torch.stack([levels % 16, levels // 16], dim=2).flatten(1)[:, :size]
        step, low = scales.view(torch.float16 if dtype == torch.float16 else torch.float32).double().split(1, dim=1)
        assert torch.equal((levels * step + low).float().to(dtype), back)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernel_reads_quantised_rows(bits: int, threads: int) -> None:
    """Heads and groups of all sizes, rows in pieces, several sequences, one of them empty."""
    kernel, reason = load_kernel()
    if kernel is None:
        pytest.skip(f"no compiled kernel: {reason}")
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for kv_heads, share, dims, group, counts in (
            (2, 3, (16, 16), 16, [5, 0, 700]), (3, 1, (20, 12), 4, [64, 1]), (1, 8, (64, 128), 32, [20_000]),
            (8, 4, (128, 128), 64, [1000, 129, 65]), (2, 1, (15, 5), 5, [130]), (4, 2, (7, 3), 1, [70]),
            (3, 2, (9, 6), 3, [0, 67, 1]),
        ):  # fmt: skip
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                quantiser = GroupQuantiser(kv_heads * sum(dims), group, dtype, bits)
                shape = HeadShape(kv_heads, *dims)
                rows = [torch.randn(count, shape.width).to(dtype) for count in counts]
                packed = [quantiser.pack(own) for own in rows]
                q = torch.randn(len(counts), kv_heads * share, 1, dims[0]).to(dtype)
                pieces = [own.split(max(1, len(own) // 2 - 3)) if len(own) else [] for own in packed]
                call = kernel.rows(q, pieces, *shape[::2], 0.2, quantiser.packing)
                out, lse = pool.submit(call).result()
                for index, own in enumerate(packed):
                    exact = torch.empty(len(own), shape.width)
                    quantiser.unpack(own, exact)
                    expected = dense_attention(q[index].float(), *shape.split(exact), 0.2)
                    torch.testing.assert_close(out[index].double(), expected[0], rtol=3e-6, atol=3e-6)
                    torch.testing.assert_close(lse[index].double(), expected[1], rtol=3e-6, atol=3e-6)


def test_groups_divide_heads() -> None:
    assert [group_size(*dims, 64) for dims in ((128, 128), (80, 80), (12, 12), (192, 128), (64, 64))] == [
        64,
        40,
        12,
        64,
        64,
    ]


@pytest.mark.drawn(2)
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
    errors: list[int] = []
    unpack = GroupQuantiser.unpack

    def compared(self: GroupQuantiser, packed: torch.Tensor, rows: torch.Tensor) -> None:
        unpack(self, packed, rows)
        rows = rows.reshape(len(packed), -1)
        again = torch.empty_like(rows)
        unpack(self, self.pack(rows), again)
        errors.append((again != rows).sum().item())

    monkeypatch.setattr(GroupQuantiser, "unpack", compared)
    generate(engine, ids, mask)
    assert errors and not any(errors)
    steps = engine._offloader.steps
    assert {step.report().kv_bits for step in steps} == {4}
    generate(exact, ids, mask)
    row, packed = exact._offloader.rates.row_bytes, engine._offloader.rates.row_bytes
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


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "opt", "gemma2", "mistral"])
def test_the_host_attends_to_the_rows_that_are_sent(name: str, bits: int, offloaded: Any) -> None:
    """Tokens and logits are those of streaming; by the kernel, and block by block where scores are capped."""
    model, (ids, mask) = plain_model(name), ragged(4)
    options = {"return_dict_in_generate": True, "output_logits": True}
    found = []
    for method in ("stream", "cpu_rank", "all"):
        engine = offloaded(copy.deepcopy(model), method=method, kv_bits=bits)
        made = engine.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, **options)
        found.append((made.sequences, torch.stack(made.logits)))
        attended = sum(step.split.on_host for step in engine._offloader.steps)
        assert (attended > 0) == (method != "stream")
    for tokens, logits in found[1:2]:
        assert torch.equal(tokens, found[0][0])
        torch.testing.assert_close(logits, found[0][1], rtol=1e-4, atol=1e-4)
    assert found[2][1].isfinite().all()


def test_logits_stay_near_the_exact_ones(offloaded: Any) -> None:
    model = plain_model("llama")
    ids, _ = ragged(2)
    errors = [logits_error(offloaded, model, ids, bits) for bits in (8, 4)]
    # These weights are random and wide; a trained model's keys and values differ far less from their groups' levels.
    assert 0 < errors[0] < errors[1] / 4 and errors[1] < 0.25


def logits_error(offloaded: Any, model: Any, ids: torch.Tensor, bits: int) -> float:
    """Of the last token, relative to the largest logit."""
    engine = offloaded(copy.deepcopy(model), method="stream", kv_bits=bits)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        first = engine(input_ids=ids[:, :-1], use_cache=True)
        found = engine(input_ids=ids[:, -1:], past_key_values=first.past_key_values, use_cache=True).logits[:, -1]
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.usefixtures("alone")
def test_what_cannot_work_is_refused() -> None:
    for offload, message in (
        ({"enabled": True, "kv_bits": 3}, r"kv_bits"),
        ({"kv_bits": 4}, r"kv_bits is set: that needs megakv.offload.enabled = true"),
    ):
        with pytest.raises(ValueError, match=message):
            megakv.init_inference(plain_model("llama"), {"dtype": "fp32", "megakv": {"offload": offload}})

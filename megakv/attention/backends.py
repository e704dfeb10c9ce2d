"""The kernels of partial attention: one block of queries against one block of keys, with log-sum-exp.

Each backend takes ``q_HLD [H, L, Dk]``, ``k_KSD [K, S, Dk]``, ``v_KSD [K, S, Dv]`` of one floating dtype (K divides H;
L and S at least 1) and returns the output ``[H, L, Dv]`` and the natural log-sum-exp ``[H, L]``, both float32 (float64
for float64), but for CUDA kernels the output in the inputs' dtype. ``causal`` is for L == S and hides the keys after a
row's own index; ``visible_LS`` is an explicit bool mask. A row without a visible key has output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megakv.attention.compiled import load_kernel
from megakv.attention.merge import merge_
from megakv.attention.prefill import load_prefill
from megakv.attention.reference import Alibi, dense_attention, difference
from megakv.attention.visibility import Visibility

logger = logging.getLogger(__name__)

# Score elements that the math backend holds at a time (32 MiB in float32) and the keys of one of its tiles.
MATH_SCORES = 8 << 20
MATH_KEYS = 2048
# Up to this many query rows, the heads that share a KV head go into the kernel as rows of one head.
PACKED_ROWS = 16
# Up to this many rows of a KV head, reading keys takes longer than multiplying them (measured).
READ_ROWS = 8

# Operations of one call from which cuDNN's kernels take so much less time, over a model's layers, that it pays to make
# one for sizes that never come again: that takes 0.07 s (measured on an H100: 590 to 680 TFLOP/s, FlashAttention 350).
CUDNN_OPERATIONS = 2e12
CUDNN_DIM, CUDNN_CAPABILITY = 128, (9, 0)

Backend = Callable[..., tuple[Tensor, Tensor]]
Result = tuple[Callable[[], tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
"""A call, and what it has to return."""


def attend_block(
    q_HLD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    scale: float,
    *,
    causal: bool = False,
    visible: Visibility | None = None,
    softcap: float | None = None,
    alibi: Alibi | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one block by the fastest backend that computes it."""
    everything = not causal and visible is None
    biased = softcap is not None or alibi is not None
    if q_HLD.device.type == "cpu":
        decode, _ = load_kernel()
        prefill, _ = load_prefill()
        reads = everything and not biased and (prefill is None or _reads(q_HLD, len(k_KSD)))
        if reads and decode is not None and decode.computes(q_HLD, k_KSD, v_KSD):
            return decode(q_HLD, k_KSD, v_KSD, scale)
        if prefill is not None and prefill.computes(q_HLD, k_KSD, v_KSD, scale):
            ranges = None if visible is None else visible.ranges()
            return prefill(q_HLD, k_KSD, v_KSD, scale, causal=causal, ranges=ranges, softcap=softcap, alibi=alibi)
    visible_LS = None if visible is None else visible.mask(q_HLD.device)
    if biased:
        return math(q_HLD, k_KSD, v_KSD, scale, causal=causal, visible_LS=visible_LS, softcap=softcap, alibi=alibi)
    heads, rows, dim = q_HLD.shape
    kv_heads, keys, _ = k_KSD.shape
    operations = 4.0 * heads * rows * keys * dim / (2 if causal else 1)
    backend = select(q_HLD, v_KSD.shape[-1], masked=visible_LS is not None, operations=operations)
    if not everything or rows > PACKED_ROWS or heads == kv_heads:
        return backend(q_HLD, k_KSD, v_KSD, scale, causal=causal, visible_LS=visible_LS)
    # Decode: a kernel reads the keys once per query head; as rows of one head, the group reads them together.
    out, lse = backend(q_HLD.reshape(kv_heads, -1, dim), k_KSD, v_KSD, scale)
    return out.reshape(heads, rows, -1), lse.reshape(heads, rows)


def _reads(q_HLD: Tensor, kv_heads: int) -> bool:
    """Whether reading keys takes longer than multiplying them, or too few heads share out the threads but by keys."""
    heads, rows, _ = q_HLD.shape
    return rows == 1 or rows * heads <= READ_ROWS * kv_heads or kv_heads < torch.get_num_threads()


def select(q_HLD: Tensor, value_dim: int, *, masked: bool, operations: float = 0.0) -> Backend:
    """The backend for these queries: by device, dtype, head dims, whether there is an explicit mask, and the work."""
    if q_HLD.dtype == torch.float64:
        return math
    if q_HLD.device.type == "cpu":
        return cpu_flash
    if q_HLD.device.type != "cuda":
        return math
    dim = max(q_HLD.shape[-1], value_dim)
    half = q_HLD.dtype in (torch.float16, torch.bfloat16)
    backend = cuda_flash if half and dim <= 256 and not masked else cuda_efficient
    if backend is cuda_flash and dim <= CUDNN_DIM and operations >= CUDNN_OPERATIONS:
        newest = torch.cuda.get_device_capability(q_HLD.device) >= CUDNN_CAPABILITY
        if newest and _agrees(cuda_cudnn, q_HLD.device, q_HLD.dtype, q_HLD.shape[-1], value_dim):
            return cuda_cudnn
    return backend if _agrees(backend, q_HLD.device, q_HLD.dtype, q_HLD.shape[-1], value_dim) else math


def cpu_flash(
    q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float, *, causal: bool = False, visible_LS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ATen's flash attention for the CPU; its causal mask is top-left aligned.

    16-bit inputs are computed in float32: the kernel would round each part's output to 16 bits (1.1 to 1.3 times the
    error of a single call after the merge) and is no faster (measured with AVX512-BF16; slower for float16, and for
    one query row without grouped heads).
    """
    dtype = torch.promote_types(q_HLD.dtype, torch.float32)
    mask = None if visible_LS is None else _additive(visible_LS, dtype)
    q, k, v = _equal_dims(q_HLD.to(dtype), k_KSD.to(dtype), v_KSD.to(dtype))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], 0.0, causal, attn_mask=mask, scale=scale
    )
    return _neutral(out[0, :, :, : v_KSD.shape[-1]], lse[0], visible_LS)


def cuda_flash(
    q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float, *, causal: bool = False, visible_LS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ATen's FlashAttention for CUDA: 16-bit dtypes, head dims up to 256, no explicit mask."""
    assert visible_LS is None
    q, k, v = _equal_dims(q_HLD, k_KSD, v_KSD, multiple=8)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        q[None], k[None], v[None], 0.0, causal, False, scale=scale
    )[:2]
    return out[0, :, :, : v_KSD.shape[-1]], lse[0]


def cuda_cudnn(
    q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float, *, causal: bool = False, visible_LS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cuDNN's attention, through ATen: 16-bit dtypes, head dims up to 128, no explicit mask."""
    assert visible_LS is None
    q, k, v = _equal_dims(q_HLD, k_KSD, v_KSD, multiple=8)
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out[0, :, :, : v_KSD.shape[-1]], lse.view(q_HLD.shape[:2])


def cuda_efficient(
    q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float, *, causal: bool = False, visible_LS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ATen's memory-efficient attention for CUDA: also float32, explicit masks and Dv different from Dk."""
    heads, rows, _ = q_HLD.shape
    kv_heads, keys, _ = k_KSD.shape
    group = heads // kv_heads
    # It knows no grouped heads: KV heads go in as the batch, and the group's copies of K and V are strides of zero.
    q = _padded(q_HLD, 8).unflatten(0, (kv_heads, group))
    k = _padded(k_KSD, 8).unsqueeze(1).expand(-1, group, -1, -1)
    v = _padded(v_KSD, 8).unsqueeze(1).expand(-1, group, -1, -1)
    mask = None
    if visible_LS is not None:
        # The kernel wants rows of the mask aligned, so they lie in a wider buffer.
        buffer = torch.empty(rows, -(-keys // 16) * 16, dtype=q.dtype, device=q.device)
        mask = _additive(visible_LS, q.dtype, out=buffer[:, :keys]).expand(kv_heads, group, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)[:2]
    # Its log-sum-exp has rows added up to a multiple of 32.
    out = out[..., : v_KSD.shape[-1]].flatten(0, 1)
    return _neutral(out, lse[..., :rows].flatten(0, 1), visible_LS)


def math(
    q_HLD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    scale: float,
    *,
    causal: bool = False,
    visible_LS: Tensor | None = None,
    softcap: float | None = None,
    alibi: Alibi | None = None,
) -> tuple[Tensor, Tensor]:
    """Matrix products in float32 (float64 for float64), in tiles of keys and rows: any device, dtype, head dims, bias.

    ``softcap`` c turns a scaled score s into ``c * tanh(s / c)`` (Gemma 2), before bias and mask.
    """
    heads, rows, _ = q_HLD.shape
    keys, value_dim = v_KSD.shape[1:]
    dtype = torch.promote_types(q_HLD.dtype, torch.float32)
    out = torch.zeros(rows, heads, value_dim, dtype=dtype, device=q_HLD.device).transpose(0, 1)
    lse = torch.full((rows, heads), -torch.inf, dtype=dtype, device=q_HLD.device).t()
    key_step = keys if heads * rows * keys <= MATH_SCORES else min(keys, MATH_KEYS)
    row_step = max(1, MATH_SCORES // (heads * key_step))
    for c in range(0, keys, key_step):
        d = min(c + key_step, keys)
        k, v = k_KSD[:, c:d].to(dtype), v_KSD[:, c:d].to(dtype)
        for a in range(c // row_step * row_step if causal else 0, rows, row_step):
            b = min(a + row_step, rows)
            # The keys that some row of the tile sees.
            seen = slice(c, min(d, b) if causal else d)
            visible = None if visible_LS is None else visible_LS[a:b, seen]
            if causal:
                visible = torch.ones(b - a, seen.stop - c, dtype=torch.bool, device=q_HLD.device).tril_(a - c)
            tile_alibi = alibi and Alibi(alibi.slopes_H, alibi.q_slots_L[a:b], alibi.k_positions_S[seen])
            k_tile, v_tile = k[:, : seen.stop - c], v[:, : seen.stop - c]
            part = _math_tile(q_HLD[:, a:b].to(dtype), k_tile, v_tile, scale, visible, softcap, tile_alibi)
            merge_(out[:, a:b], lse[:, a:b], *part)
    return out, lse


def _math_tile(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None, softcap: float | None, alibi: Alibi | None
) -> tuple[Tensor, Tensor]:
    heads, rows, dim = q.shape
    kv_heads, keys, _ = k.shape
    scores = torch.bmm((q * scale).reshape(kv_heads, -1, dim), k.transpose(1, 2)).view(heads, rows, keys)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if alibi is not None:
        distance = alibi.k_positions_S[None, :] - alibi.q_slots_L[:, None]
        scores.addcmul_(alibi.slopes_H.to(scores.dtype)[:, None, None], distance.to(scores.dtype))
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    # A row that sees nothing is shifted by 0: its weights are 0, not NaN.
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights.view(kv_heads, -1, keys), v).view(heads, rows, -1)
    out /= total.masked_fill(total == 0, 1.0)
    return out, total.log_().add_(top).squeeze(-1)


def _equal_dims(q: Tensor, k: Tensor, v: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns up to one head dim for all three: they add nothing to scores, and the output's are cut off."""
    dim = -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple
    return _padded(q, dim), _padded(k, dim), _padded(v, dim)


def _padded(x: Tensor, multiple: int) -> Tensor:
    if missing := -x.shape[-1] % multiple:
        return F.pad(x, (0, missing))
    # The kernels take any stride but that of the last dim, where another than 1 silently gives wrong results.
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(visible: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    mask = torch.empty(visible.shape, dtype=dtype, device=visible.device) if out is None else out
    return mask.zero_().masked_fill_(~visible, -torch.inf)


def _neutral(out: Tensor, lse: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """What kernels return for a row that sees nothing is arbitrary (the CPU's: log-sum-exp 0)."""
    if visible is not None:
        blind = ~visible.any(-1)
        out.masked_fill_(blind[:, None], 0.0)
        lse.masked_fill_(blind, -torch.inf)
    return out, lse


@functools.cache
def _agrees(backend: Backend, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether a kernel that is not the CPU's gives the reference's results, tried once on a small example."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 67, key_dim), (2, 67, key_dim), (2, 67, value_dim)]
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    # The cases are what the kernel will get: views of [L, H, D], one row, causal, rows that see nothing.
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    triangle = torch.ones(67, 67, dtype=torch.bool, device=device).tril_(-1)
    cases: list[tuple[Tensor, bool, Tensor | None]] = [(q, False, None), (q[:, :1], False, None), (q, True, None)]
    if backend is cuda_efficient:
        cases.append((q, False, triangle))
    scale, results = key_dim**-0.5, []
    for queries, causal, visible in cases:
        seen = triangle.logical_or(torch.eye(67, dtype=torch.bool, device=device)) if causal else visible
        expected = dense_attention(queries, k, v, scale, visible_LS=seen)
        call = functools.partial(backend, queries, k, v, scale, causal=causal, visible_LS=visible)
        results.append((call, expected))
    return trusted(backend, results, dtype, f"{dtype} with head dims {key_dim}, {value_dim} on {device}")


def trusted(kernel: Callable[..., object], results: Sequence[Result], dtype: torch.dtype, case: str) -> bool:
    """Whether a kernel's calls give what is expected of each; a warning says which case it is not used for."""
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 5e-2)
    for call, expected in results:
        try:
            problem = difference(call(), expected, tolerance)
        except Exception as error:
            # Whatever compiles it has errors of its own.
            problem = str(error) or type(error).__name__
        if problem:
            name = getattr(kernel, "__name__", str(kernel))
            logger.warning("%s is not used for %s, slower kernels are: %s", name, case, problem)
            return False
    return True

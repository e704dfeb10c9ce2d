"""Queries against each of several runs of keys, of any lengths, in one variable-length kernel call on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import CUDNN_OPERATIONS, Result, trusted
from megakv.attention.merge import merge_by_owner
from megakv.attention.reference import dense_attention
from megakv.base.device import upload
from megakv.distributed.sharding import IntArray, TokenBlock

CHUNK_KEYS = 512
"""Keys of a chunk at most, where a kernel does not share out the keys of a run by itself."""
FLASH_DIM, MULTIPLE = 256, 8
"""Head dims that FlashAttention takes, and what all kernels want them to be multiples of."""

Once = Callable[[Any, Callable[[], Any]], Any]
"""Makes what all layers of a pass share, by key."""
VarlenKernel = Callable[[Tensor, Tensor, Tensor, "KeyRuns", float], tuple[Tensor, Tensor]]
"""From R queries of each run ``[K, R, D]``, and keys and values of all runs, ``[n, D]`` and ``[n, Dv]``: the attention
to all keys of their run, ``[K, R, Dv]`` and the natural log-sum-exp ``[K, R]``, float32; 0 and -inf without keys."""


@dataclass(frozen=True, eq=False)
class KeyRuns:
    """Runs of keys, one behind the other: ``[K]`` counts on the host, and what kernels are told of them on a device."""

    counts: IntArray
    device: torch.device

    @property
    def longest(self) -> int:
        """Keys of one."""
        return int(self.counts.max(initial=0))

    @cached_property
    def bounds(self) -> Tensor:
        """``[K + 1]`` int32, where each begins and ends (``cu_seqlens``)."""
        return self._bounds(self.counts)

    @cached_property
    def one_each(self) -> Tensor:
        """``[K + 1]`` int32, the same of one query of each."""
        return self._bounds(np.ones_like(self.counts))

    @cached_property
    def empty(self) -> Tensor | None:
        """``[K, 1]`` which have no keys; None where all have some."""
        return None if self.counts.all() else upload((self.counts == 0)[:, None], self.device)

    @cached_property
    def chunks(self) -> tuple[Tensor, KeyRuns]:
        """Chunks of up to `CHUNK_KEYS`, as equal as can be: the run ``[P]`` of each, and they themselves as runs."""
        number = -(-self.counts // CHUNK_KEYS)
        owners = np.repeat(np.arange(len(self.counts)), number)
        place = np.arange(len(owners)) - np.repeat(np.cumsum(number) - number, number)
        counts = self.counts[owners] // number[owners] + (place < self.counts[owners] % number[owners])
        return upload(owners, self.device), KeyRuns(counts, self.device)

    def _bounds(self, counts: IntArray) -> Tensor:
        return upload(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), self.device)


def flash(q_KRD: Tensor, k_nD: Tensor, v_nD: Tensor, runs: KeyRuns, scale: float) -> tuple[Tensor, Tensor]:
    """ATen's FlashAttention: 16-bit dtypes, values with as many columns as keys, up to 256."""
    rows = q_KRD.shape[1]
    # One query of each run, whose heads share a KV head: for that the kernel splits long runs, given two heads or more.
    q_KHD = q_KRD if rows > 1 else q_KRD.expand(-1, 2, -1)
    out, lse_HK = torch.ops.aten._flash_attention_forward(
        q_KHD, k_nD.unsqueeze(1), v_nD.unsqueeze(1), runs.one_each, runs.bounds, 1, runs.longest,
        0.0, False, False, scale=scale,
    )[:2]  # fmt: skip
    lse = lse_HK.t()[:, :rows]
    # It gives infinity where there are no keys.
    return out[:, :rows].float(), lse if runs.empty is None else lse.masked_fill(runs.empty, -torch.inf)


def efficient(q_KRD: Tensor, k_nD: Tensor, v_nD: Tensor, runs: KeyRuns, scale: float) -> tuple[Tensor, Tensor]:
    """ATen's memory-efficient attention: also float32, values with other columns than keys, and older devices.

    It leaves all keys of a sequence to one multiprocessor: so chunks of runs are its sequences, and merge.
    """
    owners_P, chunks = runs.chunks
    q_PRD = q_KRD.index_select(0, owners_P)
    count, rows, _ = q_PRD.shape
    bounds = torch.arange(0, (count + 1) * rows, rows, dtype=torch.int32, device=q_PRD.device)
    out, lse = torch.ops.aten._efficient_attention_forward(
        q_PRD.flatten(0, 1)[None, :, None], k_nD[None, :, None], v_nD[None, :, None], None,
        bounds, chunks.bounds, rows, chunks.longest, 0.0, 0, True, scale=scale,
    )[:2]  # fmt: skip
    # Its log-sum-exp has rows added up to a multiple of 32.
    return merge_by_owner(out.view(count, rows, -1), lse[:, 0, :rows], owners_P, len(runs.counts))


def attend_prompts(
    q_HLD: Tensor, k_KLD: Tensor, v_KLD: Tensor, queries: TokenBlock, tokens: TokenBlock, scale: float, once: Once
) -> tuple[Tensor, Tensor] | None:
    """Causal attention of several sequences' packed tokens to each other, or of the last one of each.

    ``[H, L, D]`` and ``[H, L]``, as a call for each sequence gives them; None where FlashAttention takes no such heads,
    and where sequences are so long that a call for each takes no longer, by kernels that are faster.
    """
    dim, longest = q_HLD.shape[-1], int(np.diff(tokens.bounds).max())
    operations = 2.0 * len(q_HLD) * longest**2 * dim
    half = q_HLD.dtype in (torch.float16, torch.bfloat16) and q_HLD.dtype == k_KLD.dtype == v_KLD.dtype
    if not half or dim != v_KLD.shape[-1] or dim % MULTIPLE or dim > FLASH_DIM or operations >= CUDNN_OPERATIONS:
        return None
    if not _agrees_on_prompts(q_HLD.device, q_HLD.dtype, dim):
        return None

    def bounds(block: TokenBlock) -> Tensor:
        return upload(np.unique(block.bounds).astype(np.int32), q_HLD.device)

    single = queries is not tokens
    k_bounds = once("prompts", lambda: bounds(tokens))
    q_bounds = once("last of prompts", lambda: bounds(queries)) if single else k_bounds
    return _prompts(q_HLD, k_KLD, v_KLD, q_bounds, k_bounds, 1 if single else longest, longest, scale)


def _prompts(
    q_HLD: Tensor, k_KLD: Tensor, v_KLD: Tensor, q_bounds: Tensor, k_bounds: Tensor, rows: int, keys: int, scale: float
) -> tuple[Tensor, Tensor]:
    packed = (each.transpose(0, 1) for each in (q_HLD, k_KLD, v_KLD))
    out_LHD, lse_HL = torch.ops.aten._flash_attention_forward(
        *packed, q_bounds, k_bounds, rows, keys, 0.0, rows > 1, False, scale=scale
    )[:2]
    return out_LHD.transpose(0, 1), lse_HL


@functools.cache
def _agrees_on_prompts(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether FlashAttention gives the reference's results, tried once on a small example."""
    generator, lengths = torch.Generator("cpu").manual_seed(0), [70, 1, 33]
    q, k, v = (torch.randn(heads, 104, dim, generator=generator, device="cpu").to(device, dtype) for heads in (4, 2, 2))
    ends = np.cumsum(lengths)
    at, one = (upload(np.array([0, *each], dtype=np.int32), device) for each in (ends, (1, 2, 3)))
    whole = []
    for end, length in zip(ends, lengths, strict=True):
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
        own = slice(end - length, end)
        whole.append(dense_attention(q[:, own], k[:, own], v[:, own], dim**-0.5, visible_LS=seen))
    out, lse = (torch.cat(each, dim=1) for each in zip(*whole, strict=True))
    q_last, out_last, lse_last = (each.index_select(1, at[1:] - 1) for each in (q, out, lse))
    results: list[Result] = [
        (functools.partial(_prompts, q, k, v, at, at, 70, 70, dim**-0.5), (out, lse)),
        (functools.partial(_prompts, q_last, k, v, one, at, 1, 70, dim**-0.5), (out_last, lse_last)),
    ]
    return trusted(_prompts, results, dtype, f"prompts in {dtype} with head dim {dim} on {device}")


def select_varlen(q: Tensor, k_nD: Tensor, v_nD: Tensor) -> VarlenKernel | None:
    """The fastest kernel for queries on a device over such keys and values; None where no kernel takes them."""
    dims = q.shape[-1], v_nD.shape[-1]
    fits = q.dtype == k_nD.dtype == v_nD.dtype and k_nD.shape[-1] == dims[0] and not any(dim % MULTIPLE for dim in dims)
    if q.device.type != "cuda" or not fits or q.dtype == torch.float64:
        return None
    half = q.dtype in (torch.float16, torch.bfloat16)
    kernels = [flash, efficient] if half and dims[0] == dims[1] <= FLASH_DIM else [efficient]
    return next((kernel for kernel in kernels if _agrees(kernel, q.device, q.dtype, *dims)), None)


@functools.cache
def _agrees(kernel: VarlenKernel, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether a kernel gives the reference's results, tried once on a small example."""
    # One that is split among multiprocessors, or in chunks; none; few.
    counts = np.array([4 * CHUNK_KEYS + 1, 0, 3])
    generator, scale = torch.Generator("cpu").manual_seed(0), key_dim**-0.5
    shapes = [(len(counts), 5, key_dim), (int(counts.sum()), key_dim), (int(counts.sum()), value_dim)]
    q, k, v = (torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for shape in shapes)
    parts = [each[None].split(counts.tolist(), dim=1) for each in (k, v)]
    runs = KeyRuns(counts, device)
    results = []
    for queries in (q, q[:, :1]):
        each = [dense_attention(row[None], key, value, scale) for row, key, value in zip(queries, *parts, strict=True)]
        expected = torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])
        results.append((functools.partial(kernel, queries, k, v, runs, scale), expected))
    return trusted(kernel, results, dtype, f"{dtype} with head dims {key_dim}, {value_dim} on {device}")

"""A few queries against each of several runs of keys, of any lengths, in one variable-length kernel call on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import trusted
from megakv.attention.merge import merge_by_owner
from megakv.attention.reference import dense_attention
from megakv.base.device import upload
from megakv.distributed.sharding import IntArray

CHUNK_KEYS = 512
"""Keys of a chunk at most, where a kernel does not share out the keys of a run by itself."""
FLASH_DIM, MULTIPLE = 256, 8
"""Head dims that FlashAttention takes, and what all kernels want them to be multiples of."""

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

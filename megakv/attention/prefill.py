"""Attention of many query rows on processors, in C++.

PyTorch's kernel wants 16-bit inputs turned into float32 in memory. This one widens a tile of keys and values at a time
in the cache, so that no weight is rounded; or multiplies bfloat16 by pairs, where the processor is faster with them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import timeit
from pathlib import Path

import torch
from torch import Tensor

from megakv.attention.compiled import Run, laid
from megakv.attention.reference import Alibi, dense_attention, difference
from megakv.attention.visibility import Slots
from megakv.base.library import TYPES, fault, load

TOLERANCE = 1e-5
ROUNDED_TOLERANCE = 2**-7
"""For weights rounded to bfloat16."""
LEAST_GAIN = 1.1
"""How many times as fast products of pairs must be: they round weights."""
TRIALS = 8
MOST_KEYS = 1 << 24
"""Beyond these neither the distances of linear biases nor all keys' numbers are exact in float32."""


PROBLEM = struct.Struct("@17q2d5q")
RUN = struct.Struct("@9q")
"""What the C++ calls so: a `ctypes.Structure` would take as long as a small call."""


class PrefillKernel:
    """Any number of queries, with as many threads as PyTorch uses in the calling one.

    `pairs` is whether bfloat16 is multiplied by pairs, with weights rounded to it, or widened; None: by pairs where
    that is measured to be faster. An OSError says that the library cannot be loaded, or has no products of pairs.
    """

    def __init__(self, path: Path, pairs: bool | None = None):
        library = ctypes.CDLL(str(path))
        self._call = library.megakv_prefill
        pointer = ctypes.c_void_p
        self._call.argtypes = [
            ctypes.c_char_p, pointer, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, pointer, pointer,
        ]  # fmt: skip
        self._call.restype = ctypes.c_int
        available = bool(library.megakv_prefill_pairs())
        if pairs and not available:
            raise OSError(f"{path} has no products of bfloat16 pairs for this processor")
        self.pairs = available and self._gain() >= LEAST_GAIN if pairs is None else pairs

    def _gain(self) -> float:
        """How many times as fast one thread is by pairs, on a block small enough for the second cache: milliseconds."""
        rows, keys, dim = 128, 512, 64
        q, kv = (torch.ones((n, dim), dtype=torch.bfloat16, device="cpu") for n in (rows, keys))
        out, lse = (torch.empty((rows, n), dtype=torch.float32, device="cpu") for n in (dim, 1))
        given = q.data_ptr(), RUN.pack(*Run.of(kv[None], kv[None])), 1, 1, out.data_ptr(), lse.data_ptr()
        seconds = []
        for pairs in (False, True):
            sizes = TYPES[q.dtype], pairs, 1, 1, rows, keys, dim, dim
            problem = PROBLEM.pack(*sizes, *laid(q[None]), *(0,) * 6, 1.0, 0.0, *(0,) * 5)
            call = functools.partial(self._call, problem, *given)
            seconds.append(min(timeit.repeat(call, number=1, repeat=TRIALS)))
        return seconds[0] / seconds[1]

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether weights are rounded to this type of inputs."""
        return self.pairs and dtype == torch.bfloat16

    @staticmethod
    def computes(q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float) -> bool:
        """Whether they fit together: it reads addresses, so what does not must not come to it."""
        fits = q_HLD.dtype == k_KSD.dtype == v_KSD.dtype and q_HLD.shape[2] == k_KSD.shape[2]
        return fits and q_HLD.dtype in TYPES and scale > 0 and k_KSD.shape[1] == v_KSD.shape[1] <= MOST_KEYS

    def __call__(
        self,
        q_HLD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        scale: float,
        *,
        causal: bool = False,
        ranges: tuple[Slots, Slots] | None = None,
        softcap: float | None = None,
        alibi: Alibi | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``[H, L, Dv]`` and the natural log-sum-exp ``[H, L]``, float32, of what it `computes`.

        Row i sees the keys from the first of the `ranges` to before the second one, at i; without them those up to
        its own, if `causal`, or all.
        """
        # A token's elements lie side by side.
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_HLD, k_KSD, v_KSD))
        (heads, rows, dim), (kv_heads, keys, value_dim) = q.shape, v.shape
        bias = () if alibi is None else (alibi.slopes_H.float(), alibi.q_slots_L, alibi.k_positions_S)
        # Held until the call is over.
        held = [x.contiguous() for x in bias]
        problem = PROBLEM.pack(
            TYPES[q.dtype], self.rounds(q.dtype), kv_heads, heads // kv_heads, rows, keys, dim, value_dim,
            *laid(q), causal,
            *((0, 0) if ranges is None else (each.ctypes.data for each in ranges)),
            *((x.data_ptr() for x in held) if held else (0, 0, 0)),
            scale, softcap or 0.0,
            *((0, 0) if ranges is None else (each.nbytes for each in ranges)),
            *((x.nbytes for x in held) if held else (0, 0, 0)),
        )  # fmt: skip
        out = torch.empty((rows, heads, value_dim), dtype=torch.float32, device="cpu")
        lse = torch.empty((rows, heads), dtype=torch.float32, device="cpu")
        runs = RUN.pack(*Run.of(k, v))
        if code := self._call(problem, q.data_ptr(), runs, 1, torch.get_num_threads(), out.data_ptr(), lse.data_ptr()):
            raise fault(code, f"tiles of attention with head dimensions {dim} and {value_dim}")
        return out.transpose(0, 1), lse.t()


@functools.cache
def load_prefill() -> tuple[PrefillKernel | None, str]:
    """The kernel, or None and why there is none; compiled, within seconds, if this machine does not have it yet."""
    return load("prefill", PrefillKernel, _problem)


def _problem(kernel: PrefillKernel) -> str:
    """What is wrong with its results on a small example; empty if nothing is."""
    # Whatever device is the default one.
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = (6, 83, 75), (2, 150, 75), (2, 150, 70)
    high = torch.arange(60, 143, device="cpu")
    low = (high - 100).clamp(min=0)
    keys = torch.arange(150, device="cpu")
    triangle = keys <= torch.arange(83, device="cpu")[:, None]
    visible = (keys >= low[:, None]) & (keys < high[:, None])
    alibi = Alibi(torch.rand(6, generator=generator, device="cpu"), high, keys)
    bias = alibi.slopes_H[:, None, None] * (keys - high[:, None])
    for dtype in TYPES:
        q, k, v = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
        ranges = low.numpy(), high.numpy()
        results = (
            (kernel(q, k, v, 0.1), dense_attention(q, k, v, 0.1)),
            (kernel(q, k, v, 0.1, causal=True), dense_attention(q, k, v, 0.1, visible_LS=triangle)),
            (
                kernel(q, k, v, 0.1, ranges=ranges, softcap=2.0, alibi=alibi),
                dense_attention(q, k, v, 0.1, visible_LS=visible, softcap=2.0, bias_HLS=bias),
            ),
        )
        tolerance = ROUNDED_TOLERANCE if kernel.rounds(dtype) else TOLERANCE
        for found, expected in results:
            if problem := difference(found, expected, tolerance):
                return f"compiled, {problem} for {dtype}"
    return ""

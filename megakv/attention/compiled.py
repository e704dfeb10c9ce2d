"""Attention of a few query rows on processors, in C++: compiled once for a machine, loaded by every process.

PyTorch's kernel turns 16-bit keys and values into float32 in memory first and uses each of them for one query head
alone. Decoding reads all keys and values for little computation, so that is what a token costs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megakv.attention.agreement import difference
from megakv.attention.reference import dense_attention

__all__ = ["DecodeKernel", "load_kernel"]

SOURCE = Path(__file__).with_name("csrc") / "decode.cpp"
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""Flags by what PyTorch found the processor capable of: a folder may be shared by machines that differ in that."""
COMPILE_S = 120
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TOLERANCE = 1e-5
MAX_ROWS, MAX_HEADS = 32, 128
"""Query rows of a KV head, and query heads of one for one query, beyond which products are as fast (measured)."""


class DecodeKernel:
    """Queries that see all keys, few of them for each KV head.

    Parameters
    ----------
    path : Path
        The compiled library.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """

    def __init__(self, path: Path):
        self._call = ctypes.CDLL(str(path)).megakv_decode
        whole, pointer = ctypes.c_int64, ctypes.c_void_p
        self._call.argtypes = [
            ctypes.c_int,
            *(pointer,) * 3,
            *(whole,) * 9,
            ctypes.c_float,
            ctypes.c_int,
            pointer,
            pointer,
        ]
        self._call.restype = ctypes.c_int

    @staticmethod
    def computes(q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
        """Whether these are for it: their type, how they lie in memory, and how many rows share a KV head."""
        group, length = q_HLD.shape[0] // k_KSD.shape[0], q_HLD.shape[1]
        few = group * length <= MAX_ROWS or (length == 1 and group <= MAX_HEADS)
        return few and q_HLD.dtype in TYPES and k_KSD.stride(2) == v_KSD.stride(2) == 1

    def __call__(self, q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, with as many threads as PyTorch uses in the calling one.

        Parameters
        ----------
        q_HLD, k_KSD, v_KSD : Tensor
            ``[H, L, D]``, ``[K, S, D]`` and ``[K, S, Dv]`` that it `computes`; K divides H; S at least 1.
        scale : float
            Factor of the dot products.

        Returns
        -------
        tuple[Tensor, Tensor]
            ``[H, L, Dv]`` and the natural log-sum-exp ``[H, L]``, float32, computed in float32.

        Raises
        ------
        MemoryError
            If there is no memory for partial results.
        """
        heads, rows, dim = q_HLD.shape
        kv_heads, keys, value_dim = v_KSD.shape
        q = q_HLD.to(torch.float32).contiguous()
        out = q.new_empty((heads, rows, value_dim))
        lse = q.new_empty((heads, rows))
        failed = self._call(
            TYPES[k_KSD.dtype], q.data_ptr(), k_KSD.data_ptr(), v_KSD.data_ptr(),
            kv_heads, heads // kv_heads * rows, keys, dim, value_dim,
            k_KSD.stride(0), k_KSD.stride(1), v_KSD.stride(0), v_KSD.stride(1),
            scale, torch.get_num_threads(), out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for partial results of attention to {keys} keys with {heads} heads")
        return out, lse


@functools.cache
def load_kernel() -> tuple[DecodeKernel | None, str]:
    """The kernel, or None and why there is none; compiled, within seconds, if this machine does not have it yet."""
    # Where PyTorch and DeepSpeed keep what they compile.
    from torch.utils.cpp_extension import get_cxx_compiler, get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "megakv"
    capability = torch.backends.cpu.get_cpu_capability()
    flags = next((flags for name, flags in VECTORS.items() if capability.startswith(name)), ())
    try:
        kernel = DecodeKernel(_compiled(folder, get_cxx_compiler(), (*FLAGS, *flags)))
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    problem = _problem(kernel)
    return (None, problem) if problem else (kernel, "")


def _problem(kernel: DecodeKernel) -> str:
    """What is wrong with its results on a small example; empty if nothing is."""
    generator = torch.Generator().manual_seed(0)
    shapes = (10, 1, 83), (2, 131, 83), (2, 131, 70)
    for dtype in TYPES:
        q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        found = difference(kernel(q, k, v, 0.1), dense_attention(q, k, v, 0.1), TOLERANCE)
        if found:
            return f"compiled, {found} for {dtype}"
    return ""


def _compiled(folder: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The library for these flags, from the folder if it is there."""
    identity = hashlib.sha256(repr((flags, platform.machine())).encode() + SOURCE.read_bytes()).hexdigest()
    path = folder / f"decode-{identity[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may compile at once: none waits for another, and none loads what is half written.
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, str(SOURCE), "-o", name], capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise OSError(f"{compiler} cannot compile {SOURCE}: {lines[0]}")
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
    return path

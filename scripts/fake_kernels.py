"""What `fake_cuda.py` puts in the place of kernels, graphs, streams, addresses, and knowledge of devices."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default}
"""Operations that give Python a number."""
VARLEN = {aten._flash_attention_forward.default, aten._efficient_attention_forward.default}
"""Attention to runs of any lengths."""
NO_WORK = {
    aten._unsafe_view.default, aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty.default, aten.new_empty_strided.default, aten.resize_.default, aten.set_.source_Tensor,
}  # fmt: skip
"""Operations, beside views, that start nothing on a device."""
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""
"""Builds of torch for processors know CUDA devices by name alone: with a guard that does nothing, as builds for CUDA
take one on a machine without a GPU, what is made by index has its place, too."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`, whose choice of a kernel asks the device: one, which knows grouped heads."""
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[0]
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    options = {"scale": scale}
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, False, 0.0, is_causal, **options)[
        0
    ]


def step_kernel(launch: Callable[..., None]) -> Callable[..., Tensor]:
    """In the place of `megakv.attention.triton_step.attend_step`: three launches."""

    def attend_step(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *given: Any, **options: Any) -> Tensor:
        for name in ("megakv_store", "megakv_attend", "megakv_merge"):
            launch(name, tuple(q_BHSD.shape), tuple(k_BKSD.shape))
        _, heads, rows, _ = q_BHSD.shape
        return q_BHSD.new_empty((1, rows, heads, v_BKSD.shape[3]))

    return attend_step


_places, _spaces = itertools.count(1), dict[int, int]()


def address(tensor: Tensor) -> int:
    """Where a tensor would begin: memory of the device is aligned, and no two pieces of it lie in one place."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _spaces:
        _spaces[storage._cdata] = next(_places) << 40
    return _spaces[storage._cdata] + tensor.storage_offset() * tensor.element_size()


def know_cuda() -> None:
    """Let tensors of a build of torch for processors be on CUDA devices; it takes a C++ compiler."""
    if torch.version.cuda is not None:
        return
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{torch_folder}/include", str(source)]
        command += [f"-L{torch_folder}/lib", "-lc10", f"-Wl,-rpath,{torch_folder}/lib", "-o", str(library)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


@dataclass(eq=False)
class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    launch: Callable[..., None]
    held: list[tuple[str, Any]] = field(default_factory=list)
    """Operations and the shapes that they were given, in order."""
    broken: list[str] = field(default_factory=list)
    """What cannot be in a graph, and where."""
    replays: int = 0

    def pool(self) -> None:
        """None of its own."""

    def replay(self) -> None:
        """One launch."""
        self.replays += 1
        self.launch("graph")


class Stream:
    """A stream in which nothing takes any time."""

    cuda_stream = 0

    def __init__(self, wait: Callable[[str], None]):
        self._wait = wait

    def synchronize(self) -> None:
        self._wait("Stream.synchronize")

    def wait_event(self, event: Any) -> None:
        pass

    wait_stream = wait_event


class Event:
    """A moment in a stream: over at once, at the time at which it was recorded."""

    def __init__(self, wait: Callable[[str], None]):
        self._wait = wait
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        self._wait("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return (other._at - self._at) * 1e3

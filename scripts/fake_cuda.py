"""A CUDA device without a GPU: what lies on it has shape, type and place but no content; who waits for it is noted.

Torch's fake tensors know their device: an operation on tensors of two devices raises, as on a real one. Tensors on the
processor stay real, so that what the library decides there is decided. What is read from the device is made up: ones,
which are a mask without padding, the tokens that compression keeps, and a valid token, and for a truth whatever
`FakeCuda.truth` says.

The host waits for the device where it reads from it, where it copies to it from memory that is not pinned, or not with
``non_blocking``, and where it synchronises a stream or an event. Each such place is noted with its line.

Operations are counted, too, that a device would be given: all but views and memory that is only taken. A CUDA graph is
the operations that were given while it was captured; what would break it, or be wrong when it is replayed, is noted.
MegaKV's kernels for steps of decoding and PyTorch's fused attention are stand-ins of the same number of launches.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_kernels import NO_WORK, READS, VARLEN, Event, Graph, Stream, address, attention, know_cuda, step_kernel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

from megakv.attention import device_step
from megakv.distributed import comm
from megakv.distributed.agreement import Agreement
from megakv.distributed.health import HealthChannel
from megakv.injection import step_graphs
from megakv.injection.step_graphs import WAITED
from megakv.offload.cuda_link import CudaStreams

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Wait:
    """A place in which the host waits for the device.

    Parameters
    ----------
    operation, place : str
        What it did, and where.
    """

    operation: str
    place: str


def _place() -> str:
    """The innermost line of the library or of transformers that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{ROOT}/megakv/"):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}"
        if "/site-packages/transformers/" in name:
            return f"transformers/{name.rsplit('/transformers/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class FakeCuda(TorchDispatchMode):
    """Operations of this process while it stands.

    Attributes
    ----------
    waits : list of Wait
        In order.
    truth : bool
        What a truth value on the device is found to be.
    varlen : int
        Calls of attention to runs of any lengths.
    operations : Counter
        That reached the device, by name and place.
    bytes_up, bytes_down : int
        Copied to the device and from it.
    graphs : list of Graph
        Captured so far.
    """

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.waits: list[Wait] = []
        self.truth = False
        self.varlen = 0
        self.operations: Counter[tuple[str, str]] = Counter()
        self.bytes_up = self.bytes_down = 0
        self.graphs: list[Graph] = []
        self.debug: int | str = 0
        self._capturing: Graph | None = None
        self._fake = fake
        self._pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._registered: list[tuple[int, int]] = []

    def wait(self, operation: str) -> None:
        """Note that the host waits here."""
        self.waits.append(Wait(operation, _place()))
        self._breaks(operation)
        if self.debug == "warn":
            warnings.warn(f"called a {WAITED}", stacklevel=2)

    def _breaks(self, what: str) -> None:
        if self._capturing is not None:
            self._capturing.broken.append(f"{what} at {_place()}")

    def launch(self, operation: str, *shapes: Any) -> None:
        """Count what reaches the device."""
        self.operations[operation, _place()] += 1
        if self._capturing is not None:
            self._capturing.held.append((operation, shapes))

    @contextlib.contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        """``torch.cuda.graph``: nothing is given to the device."""
        before, self._capturing = self.operations.copy(), graph
        try:
            yield
        finally:
            self._capturing, self.operations = None, before
        self.graphs.append(graph)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pin = bool(kwargs.pop("pin_memory", False))
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is aten._pin_memory.default:
            with unset_fake_temporarily():
                return self._pin(args[0].clone())
        inside = tree_any(lambda value: isinstance(value, FakeTensor), (args, kwargs))
        to = kwargs.get("device")
        onto = to is not None and torch.device(to).type == "cuda"
        if not inside and not onto:
            with unset_fake_temporarily():
                found = func(*args, **kwargs)
                return self._pin(found) if pin else found
        self.varlen += func in VARLEN
        if func in READS:
            self.bytes_down += args[0].element_size()
            self.wait(func._opname)
            return self._number(args[0]) if func is aten._local_scalar_dense.default else True
        if not func.is_view and func not in NO_WORK and func.namespace != "prim":
            shapes = [tuple(each.shape) for each in args if isinstance(each, Tensor)]
            if func is not aten._to_copy.default or args[0].numel():
                self.launch(func._opname, *shapes)
        if inside and to is not None and torch.device(to).type == "cpu":
            return self._read(args[0], kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default and not inside:
            self._up(args[0])
            if not (kwargs.get("non_blocking") and self._is_pinned(args[0])):
                self.wait("copy to the device")
        with self._fake:
            found = func(*self._known(args), **self._known(kwargs))
        if func is aten.all.default:
            # Only of masks is that asked.
            found.whole = True
        return found

    def _up(self, source: Tensor) -> None:
        self.bytes_up += source.nbytes
        self._breaks("copy to the device, whose source a replay finds changed,")

    def _known(self, values: Any) -> Any:
        """Values with a fake for each real tensor: torch would compute with the numbers in it."""

        def fake(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

        return tree_map_only(Tensor, fake, values)

    def _number(self, tensor: Tensor) -> Any:
        if getattr(tensor, "whole", False):
            return True
        return self.truth if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _read(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A real tensor in the place of one on the device."""
        self.bytes_down += tensor.nbytes
        self.wait("copy to the host")
        with unset_fake_temporarily():
            dtype = kwargs.get("dtype") or tensor.dtype
            # Masks are full; of each row of a batch it is false that it has ended.
            return torch.full(tensor.shape, dtype != torch.bool or tensor.dim() > 1, dtype=dtype)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        there, here = isinstance(target, FakeTensor), isinstance(source, FakeTensor)
        host = source if there else target
        if there and not here:
            self._up(source)
        elif here and not there:
            self.bytes_down += target.nbytes
        if there != here and not (non_blocking and self._is_pinned(host)):
            self.wait("copy to the device" if there else "copy to the host")
        if there:
            with self._fake:
                return aten.copy_.default(target, self._known(source), non_blocking)
        with unset_fake_temporarily():
            return target.fill_(1)

    # Pinned memory

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        within = any(start <= first and first + tensor.nbytes <= end for start, end in self._registered)
        return within or not tensor.numel() or tensor.untyped_storage().data_ptr() in self._pinned

    def gather(self, values: list[Any], value: Any, group: Any = None) -> None:
        """``all_gather_object``, which goes through bytes on the device: all ranks say what this one says."""
        self.wait("all_gather_object")
        values[:] = [value] * len(values)

    def decide(self, agreement: Agreement, action: Callable[[], Any]) -> Any:
        """`Agreement.decide`, whose object goes through bytes on the device: rank 0 says what this rank would."""
        if agreement.shared:
            self.wait("broadcast_object_list")
        return action()

    def register(self, address: int, nbytes: int, flags: int) -> int:
        """``cudaHostRegister``."""
        self._registered.append((address, address + nbytes))
        return 0


_tensor = torch.tensor


def _new_tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor`, which copies from the host in C++ where nobody sees it."""
    found = _tensor(data, **options)
    return found if device is None else found.to(device)


def _move(module: nn.Module, device: Any = None, *args: Any, **options: Any) -> nn.Module:
    """`Module.to`, which does not know tensors that change from real to fake."""
    if device is not None and not isinstance(device, torch.dtype):
        for part in module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)
            for name, parameter in part._parameters.items():
                if parameter is not None and not isinstance(parameter, FakeTensor):
                    part._parameters[name] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
    return module


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """A process with one CUDA device that does nothing."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    cuda = FakeCuda(fake)
    stream = Stream(cuda.wait)
    runtime = mock.Mock(cudaHostRegister=cuda.register, cudaHostUnregister=lambda address: 0)
    sizes = {"total_memory": 80 << 30, "multi_processor_count": 132, "shared_memory_per_block_optin": 227 << 10}
    properties = mock.Mock(major=9, minor=0, **sizes)
    properties.name = "no device"
    answers = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "no device",
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *args, **options: True,
        "mem_get_info": lambda device=None: (64 << 30, 80 << 30),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: cuda.wait("synchronize"),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "Stream": lambda *args, **options: Stream(cuda.wait),
        "Event": lambda *args, **options: Event(cuda.wait),
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "cudart": lambda: runtime,
        "CUDAGraph": lambda: Graph(cuda.launch),
        "graph": cuda.capture,
        "default_generators": (mock.Mock(),),
        "get_sync_debug_mode": lambda: cuda.debug,
        "set_sync_debug_mode": lambda mode: setattr(cuda, "debug", mode),
    }
    know_cuda()
    with fake:
        # Once on a machine without a GPU, torch takes a guard of devices that does nothing.
        assert not torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", cuda.gather))
        stack.enter_context(mock.patch.object(Agreement, "decide", lambda *given: cuda.decide(*given)))
        stack.enter_context(mock.patch.object(comm, "connect", lambda rank, *given, **named: HealthChannel(rank, {})))
        stack.enter_context(mock.patch.object(torch, "tensor", _new_tensor))
        stack.enter_context(mock.patch.object(nn.Module, "to", _move))
        stack.enter_context(mock.patch.object(torch, "set_rng_state", lambda state: None))
        stack.enter_context(mock.patch.object(nn.functional, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", address))
        stack.enter_context(mock.patch.object(device_step, "_agrees", lambda *case: True))
        stack.enter_context(mock.patch.object(device_step, "_kernel", lambda: step_kernel(cuda.launch)))
        # The driver's own call, which knows addresses alone.
        stack.enter_context(mock.patch.object(CudaStreams, "_memcpy", staticmethod(lambda *copy: 0)))
        stack.enter_context(mock.patch.object(step_graphs, "attends_on_device", lambda: True))
        # Threads of their own have no modes: what they copy is noted and made all the same.
        run = threading.Thread.run

        def run_within(thread: threading.Thread) -> None:
            with fake, cuda:
                run(thread)

        stack.enter_context(mock.patch.object(threading.Thread, "run", run_within))
        stack.enter_context(fake)
        stack.enter_context(cuda)
        yield cuda

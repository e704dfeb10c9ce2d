"""In the place of CUDA: a graph is a call that is made again, and kernels are PyTorch's."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megakv.attention import device_step, tiles
from megakv.attention.compiled import Run
from megakv.attention.merge import add_sinks
from megakv.attention.reference import dense_attention
from megakv.injection import hooks, step_graphs
from megakv.injection import step as steps
from megakv.injection.step_graphs import StepGraphs


def rows_at(address: int, heads: int, tokens: int, dim: int, head: int, step: int, dtype: torch.dtype) -> Tensor:
    """``[K, n, D]`` that lie somewhere."""
    extent = (heads - 1) * head + (tokens - 1) * step + dim
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided((heads, tokens, dim), (head, step, 1))


def attend_step(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bounds: Tensor, skips: Tensor, runs: Tensor,
    *, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `megakv.attention.triton_step.attend_step`."""
    (_, heads, rows, dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[3]
    out = q.new_zeros(1, rows, heads, value_dim)
    words = runs.reshape(-1)
    size = len(Run._fields)
    table = words[: len(words) // size * size].view(-1, size).tolist()
    for row in range(rows):
        own = table[bounds[row] : bounds[row + 1]]
        if not own:
            continue
        pairs = [
            (
                rows_at(run[0], kv_heads, run[2], dim, run[3], run[4], q.dtype),
                rows_at(run[1], kv_heads, run[2], value_dim, run[5], run[6], q.dtype),
            )
            for run in own
        ]
        for place, new in zip(pairs[-1], (k, v), strict=True):
            place[:, -1] = new[0, :, row]
        keys, values = (torch.cat(each, dim=1)[:, int(skips[row]) :] for each in zip(*pairs, strict=True))
        one, lse = dense_attention(q[0, :, row, None], keys, values, scale, softcap=softcap)
        out[0, row] = (one if sinks is None else add_sinks(one, lse, sinks))[:, 0].to(q.dtype)
    return out


class Replayed:
    """In the place of `torch.cuda.CUDAGraph`."""

    made: list["Replayed"] = []

    def __init__(self) -> None:
        self.again: Any = None
        self.replays = 0
        Replayed.made.append(self)

    def pool(self) -> None:
        """None of its own."""

    def replay(self) -> None:
        self.replays += 1
        self.again()


@contextmanager
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Replayed]]:
    """All graphs that are made."""
    Replayed.made = []
    computed = step_graphs.StepGraph._computed
    under_way: list[Any] = [None]
    capturing: list[Replayed] = []
    modes: list[Any] = []

    @contextmanager
    def capture(graph: Replayed, **_: Any) -> Iterator[None]:
        capturing.append(graph)
        yield
        capturing.pop()

    def recorded(self: Any, step: Any, inputs: dict[str, Any], cache: Any = None) -> Any:
        output = computed(self, step, inputs, cache)
        if capturing:

            def again() -> None:
                # What is captured has no pass of its own.
                found = computed(self, under_way[0], inputs)
                for name, value in found.items():
                    output[name].copy_(value)

            capturing[-1].again = again
        return output

    run = step_graphs.StepGraph.run

    def begun(self: Any, step: Any, *args: Any) -> Any:
        under_way[0] = step
        return run(self, step, *args)

    monkeypatch.setattr(step_graphs.StepGraph, "_computed", recorded)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(step_graphs.StepGraph, "run", begun)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(tiles, "_shared_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(device_step, "_kernel", lambda: attend_step)
    monkeypatch.setattr(hooks, "step_graphs", StepGraphs)
    # A processor's own way through layers.
    monkeypatch.setattr(steps, "load_layer", lambda: (None, ""))
    monkeypatch.setattr("megakv.forward.runtime.load_step", lambda: (None, ""))
    yield Replayed.made
    assert modes[1::2] == [0] * (len(modes) // 2)

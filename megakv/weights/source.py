"""What every source of weights offers, and the simplest one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from megakv.errors import MegaKVError
from megakv.weights.placement.slices import SliceSpec


class WeightSource(Protocol):
    """Gives any part of any parameter of a model.

    Attributes
    ----------
    bytes_read : int
        Bytes taken from storage so far.
    owned : bool
        Whether whole parameters may be used where they lie, because the source gives them away.
    """

    owned: bool

    @property
    def bytes_read(self) -> int: ...

    def has(self, name: str) -> bool:
        """Whether there is a value for parameter `name`."""

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        """The part `spec` of parameter `name`, in the source's type; may share memory with the source.

        Raises
        ------
        MegaKVError
            If it cannot be read.
        """


class ModuleWeights:
    """The weights of a module that is loaded already; each is given away when it is read, so that its memory can go.

    Raises
    ------
    MegaKVError
        If a parameter has no memory (meta device).
    """

    owned = True
    bytes_read = 0

    def __init__(self, module: nn.Module):
        self._tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._tensors |= dict(module.named_buffers(remove_duplicate=False))
        empty = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if empty:
            raise MegaKVError(f"the model given has no value for {empty[0]} and {len(empty) - 1} more: load it first")

    def has(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        return spec.take(self._tensors.pop(name).detach())

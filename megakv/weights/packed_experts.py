"""Modules that hold all experts of a layer, with weights that stay in GGUF's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megakv.weights.blocks import BLOCKS, unpack
from megakv.weights.packed_product import packed_product
from megakv.weights.placement.plan import EXPERT_WEIGHTS, is_experts, unknown_experts


class PackedExperts:
    """In the place of the `forward` of one module, whose weights are ``[E, rows, row bytes]`` uint8, blocks of `kinds`.

    Its class, its gate and its biases stay. Experts are computed one after the other, those that have tokens.
    """

    def __init__(self, module: nn.Module, kinds: Mapping[str, str]):
        self.experts: Any = module
        self.kinds = dict(kinds)
        self.columns: dict[str, int] = {}
        for name, kind in kinds.items():
            *several, columns = getattr(module, name).shape
            self.columns[name] = columns
            memory = torch.empty((*several, BLOCKS[kind].row_bytes(columns)), dtype=torch.uint8, device="meta")
            setattr(module, name, nn.Parameter(memory, requires_grad=False))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[L, h]`` to the same, by the experts ``[L, k]`` of every token and how much each of them counts."""
        chosen, each = top_k_index.reshape(-1), top_k_index.shape[-1]
        counts = torch.bincount(chosen, minlength=len(self.experts.down_proj)).tolist()
        found = hidden_states.new_empty(len(chosen), hidden_states.shape[-1])
        for expert, places in enumerate(chosen.argsort(stable=True).split(counts)):
            if len(places):
                inner = self.experts._apply_gate(self._project(expert, "gate_up_proj", hidden_states[places // each]))
                found[places] = self._project(expert, "down_proj", inner)
        weighted = found * top_k_weights.reshape(-1, 1)
        return weighted.unflatten(0, (-1, each)).sum(1).to(found.dtype)

    def _project(self, expert: int, name: str, rows: Tensor) -> Tensor:
        weight, bias = getattr(self.experts, name)[expert], getattr(self.experts, f"{name}_bias", None)
        own = None if bias is None else bias[expert]
        return packed_product(rows, weight, self.kinds[name], self.columns[name], own)


def packable_experts(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the experts' weights that may stay packed, by name; of a module all may or none."""
    return {
        f"{path}.{name}": getattr(module, name).shape
        for path, module in model.named_modules()
        if may_pack(module)
        for name in EXPERT_WEIGHTS
    }


def may_pack(module: Any) -> bool:
    """Whether a module's experts are multiplied with rows of weights, in a way that is known."""
    return is_experts(module) and not unknown_experts(module) and not module.is_transposed and module.is_concatenated


def pack_experts(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Let the weights of experts that are named be packed, without memory yet."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in kinds):
        module = model.get_submodule(path)
        # A module's own, which is called like a method of its class.
        module.forward = PackedExperts(module, {name: kinds[f"{path}.{name}"] for name in EXPERT_WEIGHTS})


def unpack_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Give modules plain weights and their own `forward` back."""
    for module in model.modules():
        if isinstance(packed := vars(module).get("forward"), PackedExperts):
            for name, kind in packed.kinds.items():
                weight = getattr(module, name)
                plain = unpack(weight.flatten(0, 1), kind).to(dtype).unflatten(0, weight.shape[:2])
                setattr(module, name, nn.Parameter(plain, requires_grad=False))
            del module.forward

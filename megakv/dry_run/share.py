"""One tensor-parallel rank's share of a model on the meta device, cut by the code that loads weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.dry_run.coverage import check_coverage
from megakv.dry_run.passage import run_shapes
from megakv.errors import MegaKVError
from megakv.offload.weights import layer_places
from megakv.weights.fp8 import Fp8Linear, use_fp8
from megakv.weights.loading import empty_model, parameter_dtypes
from megakv.weights.placement import HeadMap, SliceSpec, plan_placement
from megakv.weights.placement.attention import find_attention
from megakv.weights.placement.plan import decoder_layers
from megakv.weights.tensor_parallel import shard_structure


@dataclass(frozen=True)
class Share:
    """What one tensor-parallel rank holds."""

    tp_rank: int
    heads: int  # Query and KV heads of all layers together.
    kv_heads: int
    weight_bytes: int  # Of parameters and buffers.
    row_bytes: tuple[int, ...]  # Per layer, bytes of one token's keys and values.
    # Per decoder layer, bytes of what `megakv.offload.weights` puts into host memory.
    layer_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class WholeModel:
    """A model before it is cut, and how all ranks cut it."""

    model: PreTrainedModel  # Uncut, on the meta device.
    dtype: torch.dtype
    head_map: HeadMap
    placements: tuple[dict[str, SliceSpec], ...]  # The part of every parameter, by tensor-parallel rank.
    shapes: dict[str, torch.Size]  # Whole shape of every parameter, by name.
    cut: int  # Parameters that are cut.

    @classmethod
    def plan(cls, config: PreTrainedConfig, dtype: torch.dtype, head_map: HeadMap) -> WholeModel:
        """Cut a model for every rank of a head map, and check that the parts add up.

        Raises ValueError: if the model cannot be cut so.
        Raises MegaKVError: if the parts are not the model.
        """
        model = empty_model(deepcopy(config), dtype)
        placements = tuple(plan_placement(model, head_map, rank) for rank in range(head_map.tp_size))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        attentions: list[str] = []
        if head_map.tp_size > 1:
            prefix, layers = decoder_layers(model)
            kind = config.get_text_config().model_type
            attentions = [f"{prefix}.{index}.{find_attention(layer, kind)[0]}" for index, layer in enumerate(layers)]
        cut = check_coverage(shapes, placements, head_map, attentions)
        return cls(model, dtype, head_map, placements, shapes, cut)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def shares(self, tokens: set[int], *, fp8: bool) -> Iterator[Share]:
        """Build every rank's share and run it.

        Shares whose parameters have the same shapes, and whose layers the same numbers of heads, are run once: nothing
        else decides about the shapes in a pass.

        tokens: numbers of tokens to run them over.
        fp8: whether feed-forward weights become FP8.
        Raises MegaKVError: if a parameter has another shape than it should, or shapes do not fit in a pass.
        Raises ValueError: if FP8 is not possible with this model.
        """
        dtypes = parameter_dtypes(self.model, self.dtype)
        kept = {id(parameter): parameter for parameter in self.model.parameters()}
        known: dict[Any, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        for tp_rank in range(self.head_map.tp_size):
            model = deepcopy(self.model, dict(kept))
            shard_structure(model, self.placements[tp_rank], self.head_map, tp_rank, lambda tensor: tensor)
            self._check_shapes(model, self.placements[tp_rank], tp_rank)
            shards = [layers[tp_rank] for layers in self.head_map.layers]
            counts = [(len(shard.query_heads), len(shard.kv_heads), shard.group_size) for shard in shards]
            form = tuple(parameter.shape for parameter in model.parameters()), tuple(counts)
            if form not in known:
                known[form] = self._run(model, tp_rank, tokens, dtypes, fp8)
            heads, kv_heads = sum(count[0] for count in counts), sum(count[1] for count in counts)
            yield Share(tp_rank, heads, kv_heads, *known[form])

    def _run(
        self, model: PreTrainedModel, tp_rank: int, tokens: set[int], dtypes: Mapping[str, torch.dtype], fp8: bool
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Bytes of a share's weights, by layer of a token's keys and values, and by layer of weights."""
        # Some rotary embeddings keep more tables once they have seen a long prompt.
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        found = [run_shapes(model, self.head_map, tp_rank, count) for count in sorted(tokens)]
        if any(other != found[0] for other in found):
            raise MegaKVError(
                f"tensor-parallel rank {tp_rank}: keys and values of a token depend on how many there are"
            )
        if fp8:
            use_fp8(model)
        rows = tuple(found[0][layer] for layer in sorted(found[0]))
        layers = () if fp8 else tuple(places.nbytes for places in layer_places(model, dtypes))
        return buffers + parameter_bytes(model, dtypes), rows, layers

    def _check_shapes(self, model: PreTrainedModel, placement: Mapping[str, SliceSpec], tp_rank: int) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if parameters.keys() != self.shapes.keys():
            raise MegaKVError(f"tensor-parallel rank {tp_rank} has other parameters than the whole model")
        for name, parameter in parameters.items():
            expected = placement[name].shape(self.shapes[name])
            if tuple(parameter.shape) != expected:
                raise MegaKVError(
                    f"tensor-parallel rank {tp_rank}: {name} has shape {list(parameter.shape)}, "
                    f"expected {list(expected)}"
                )


def parameter_bytes(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> int:
    """Bytes of a model's parameters once they are filled, tied ones once, scales of FP8 weights included.

    model: on the meta device, with FP8 linears in their places where there are any.
    dtypes: from `parameter_dtypes` of the whole model.
    """
    quantised = {id(module.weight): module.stored_bytes for module in model.modules() if isinstance(module, Fp8Linear)}
    return sum(
        quantised.get(id(parameter), parameter.numel() * dtypes[name].itemsize)
        for name, parameter in model.named_parameters()
    )

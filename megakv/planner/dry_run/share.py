"""One tensor-parallel rank's share of a model on the meta device, cut by the code that loads weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megakv.attention.partial import Scoring
from megakv.base.errors import MegaKVError
from megakv.costmodel.memory import RankShare
from megakv.engine.loading import parameter_dtypes
from megakv.injection.support import shape_pass
from megakv.offload.weights import layer_places
from megakv.planner.dry_run.coverage import check_coverage
from megakv.weights.formats import WeightFormat
from megakv.weights.placement import HeadMap, SliceSpec, plan_placement
from megakv.weights.placement.attention import find_attention
from megakv.weights.placement.plan import InjectionPolicy, decoder_layers
from megakv.weights.tensor_parallel import shard_structure


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
    def plan(
        cls,
        model: PreTrainedModel,
        dtype: torch.dtype,
        head_map: HeadMap,
        policy: InjectionPolicy | None = None,
        multiples: Sequence[int] = (),
    ) -> WholeModel:
        """Cut a model for every rank of a head map, and check that the parts add up; the model stays as it is.

        Raises ValueError if the model cannot be cut so.
        Raises MegaKVError if the parts are not the model.
        """
        placements = tuple(plan_placement(model, head_map, rank, policy, multiples) for rank in range(head_map.tp_size))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        attentions: list[str] = []
        if head_map.tp_size > 1:
            prefix, layers = decoder_layers(model)
            kind = model.config.get_text_config().model_type
            attentions = [f"{prefix}.{index}.{find_attention(layer, kind)[0]}" for index, layer in enumerate(layers)]
        cut = check_coverage(shapes, placements, head_map, attentions)
        return cls(model, dtype, head_map, placements, shapes, cut)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def shares(self, tokens: int, *, weights: WeightFormat) -> list[RankShare]:
        """Build every rank's share and run it.

        Ranks that keep the same shapes and the same numbers of heads in each layer are alike: the first is built.

        tokens: to run them over.
        weights: their format.
        Raises MegaKVError if a parameter has another shape than it should, or shapes do not fit in a pass.
        Raises ValueError if this form is not possible with this model.
        """
        known: dict[Any, RankShare] = {}
        shares = []
        for tp_rank, placement in enumerate(self.placements):
            shapes = {name: placement[name].shape(whole) for name, whole in self.shapes.items()}
            shards = [layers[tp_rank] for layers in self.head_map.layers]
            counts = tuple((len(shard.query_heads), len(shard.kv_heads), shard.group_size) for shard in shards)
            form = tuple(shapes.values()), counts
            if form not in known:
                known[form] = self._build(tp_rank, shapes, tokens, weights)
            shares.append(replace(known[form], tp_rank=tp_rank))
        return shares

    def _build(
        self, tp_rank: int, shapes: Mapping[str, tuple[int, ...]], tokens: int, weights: WeightFormat
    ) -> RankShare:
        dtypes = parameter_dtypes(self.model, self.dtype)
        model = deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})
        shard_structure(model, self.placements[tp_rank], self.head_map, tp_rank, lambda tensor: tensor)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if parameters.keys() != shapes.keys():
            raise MegaKVError(f"tensor-parallel rank {tp_rank} has other parameters than the whole model")
        for name, parameter in parameters.items():
            if tuple(parameter.shape) != shapes[name]:
                raise MegaKVError(
                    f"tensor-parallel rank {tp_rank}: {name} has shape {list(parameter.shape)}, "
                    f"expected {list(shapes[name])}"
                )
        # Some rotary embeddings keep more tables once they have seen a long prompt.
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        rows = run_shapes(model, self.head_map, tp_rank, tokens)
        dtypes |= weights.prepare(model, self.dtype)
        layers = tuple(places.nbytes for places in layer_places(model, dtypes))
        return RankShare(buffers + parameter_bytes(model, dtypes), rows, layers, tp_rank)


def parameter_bytes(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> int:
    """Bytes of a model's parameters once they are filled, tied ones once, scales included.

    model: on the meta device, prepared by its weights' format.
    dtypes: from `parameter_dtypes` of the whole model, and from `WeightFormat.prepare`.
    """
    return sum(parameter.numel() * dtypes[name].itemsize for name, parameter in model.named_parameters())


class ShapeRuntime:
    """Attention that only compares the heads it is given with the head map, and counts what a cache would hold.

    row_bytes: per layer, bytes of one token's keys and values.
    """

    def __init__(self, head_map: HeadMap, tp_rank: int):
        self._head_map = head_map
        self._tp_rank = tp_rank
        self.row_bytes: dict[int, int] = {}

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """``[1, L, H, Dv]`` without values.

        Raises MegaKVError if there are other heads than this rank has, or rows do not belong together.
        """
        shard = self._head_map.shard(layer, self._tp_rank)
        heads, kv_heads = len(shard.query_heads), len(shard.kv_heads)
        found = q_BHSD.shape[1], k_BKSD.shape[1], v_BKSD.shape[1]
        # ALiBi lies in an extra column of the keys, one for each query head.
        if found not in ((heads, kv_heads, kv_heads), (heads, heads, heads)):
            raise MegaKVError(
                f"layer {layer}, tensor-parallel rank {self._tp_rank}: attention got (query, key, value) heads "
                f"{found}, the head map has {heads} query heads and {kv_heads} KV heads there"
            )
        rows = {tensor.shape[2] for tensor in (q_BHSD, k_BKSD, v_BKSD)}
        fits = q_BHSD.shape[3] == k_BKSD.shape[3] if scoring.latent is None else scoring.latent.heads == heads
        if len(rows) > 1 or not fits:
            raise MegaKVError(
                f"layer {layer}: shapes of queries {list(q_BHSD.shape)}, keys {list(k_BKSD.shape)} and values "
                f"{list(v_BKSD.shape)} do not fit each other"
            )
        self.row_bytes[layer] = sum(
            tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in (k_BKSD, v_BKSD)
        )
        return q_BHSD.new_empty((1, q_BHSD.shape[2], heads, scoring.value_dim(v_BKSD)))


def run_shapes(model: PreTrainedModel, head_map: HeadMap, tp_rank: int, tokens: int) -> tuple[int, ...]:
    """Run one rank's share, cut on the meta device, over so many of its tokens.

    Returns the bytes of one token's keys and values, by layer.
    Raises MegaKVError if shapes do not fit.
    """
    runtime = ShapeRuntime(head_map, tp_rank)
    try:
        _, logits = shape_pass(model, runtime.attend, tokens)
    except (RuntimeError, IndexError, AssertionError) as error:
        raise MegaKVError(
            f"tensor-parallel rank {tp_rank}: shapes of {type(model).__name__} do not fit: {error}"
        ) from error
    vocab, expected = model.config.get_text_config().vocab_size, range(len(head_map.layers))
    if logits.shape[-1] != vocab or set(runtime.row_bytes) != set(expected):
        raise MegaKVError(
            f"tensor-parallel rank {tp_rank}: layers {sorted(runtime.row_bytes)} called attention, not "
            f"{[*expected]}; logits have shape {list(logits.shape)} for a vocabulary of {vocab}"
        )
    return tuple(runtime.row_bytes[layer] for layer in expected)

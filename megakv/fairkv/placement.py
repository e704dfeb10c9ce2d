"""From the JSON's head mapping to a placement of a model's heads."""

from __future__ import annotations

import logging

from transformers import PreTrainedConfig, PreTrainedModel

from megakv.base.errors import CombinationError
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.fairkv.config import FairKVConfig
from megakv.fairkv.mapping import HeadMapping, load_mapping
from megakv.weights.placement import HeadMap, head_counts

SETTING = "megakv.fairkv.mapping"

logger = logging.getLogger(__name__)


def read_mapping(config: FairKVConfig, tp_size: int) -> HeadMapping | None:
    """The mapping that the JSON names, for this tensor-parallel degree; None where it names none."""
    if config.mapping is None:
        return None
    mapping = load_mapping(config.mapping, setting=SETTING)
    if mapping.tp_size != tp_size:
        raise CombinationError(
            "foreign",
            f"{SETTING} = {config.mapping!r} is for {mapping.tp_size} tensor-parallel ranks, but "
            f"tensor_parallel.tp_size = {tp_size}; make one with "
            f"megakv fairkv map --tp {tp_size}, or set tp_size to {mapping.tp_size}",
        )
    return mapping


def place_heads(mapping: HeadMapping, config: PreTrainedConfig) -> HeadMap:
    """The placement of a model's heads, all query heads beside every replica of their KV head."""
    layers, heads, kv_heads = head_counts(config)
    found = len(mapping.mapping), mapping.n_kv_heads
    if found != (layers, kv_heads):
        raise CombinationError(
            "foreign",
            f"{SETTING} is of {mapping.model!r} with {found[0]} layers of {found[1]} KV heads, but the model has "
            f"{layers} layers of {kv_heads} KV heads; profile and map this model: "
            f"megakv fairkv profile, megakv fairkv map",
        )
    if mapping.identity is not None:
        _check_model(mapping, mapping.identity.other_sizes(config))
    return mapping.head_map(heads)


def check_weights(mapping: HeadMapping, model: PreTrainedModel, comm: Communicator) -> None:
    """Refuse a mapping of a model with the same sizes and other weights; warn of one that does not say whose it is.

    Every rank must call it: it fails on all.
    """
    identity = mapping.identity
    if identity is not None:
        Agreement(comm).together(lambda: _check_model(mapping, identity.other_weights(model)))
    elif comm.mesh.rank == 0:
        logger.warning(
            "%s of %r does not say by more than this name which model it was made for, so nobody can check that it is "
            "this one: profile and map the model anew with megakv fairkv profile and megakv fairkv map",
            SETTING,
            mapping.model,
        )


def _check_model(mapping: HeadMapping, difference: str | None) -> None:
    if difference is not None:
        raise CombinationError(
            "foreign",
            f"{SETTING} is of another model, {mapping.model!r}: {difference}; profile and map this model: "
            "megakv fairkv profile, megakv fairkv map",
        )

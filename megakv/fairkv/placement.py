"""From the JSON's head mapping to a placement of a model's heads."""

from __future__ import annotations

from transformers import PreTrainedConfig

from megakv.comm import Communicator
from megakv.errors import MegaKVError
from megakv.fairkv.config import FairKVConfig
from megakv.fairkv.mapping import HeadMapping, load_mapping
from megakv.placement import HeadMap, head_counts

SETTING = "megakv.fairkv.mapping"


def read_mapping(config: FairKVConfig, tp_size: int) -> HeadMapping | None:
    """The mapping that the JSON names; None where it names none.

    Raises
    ------
    ValueError
        If it cannot be read, or is for another tensor-parallel degree.
    """
    if config.mapping is None:
        return None
    mapping = load_mapping(config.mapping, setting=SETTING)
    if mapping.tp_size != tp_size:
        raise ValueError(
            f"{SETTING} = {config.mapping!r} is for {mapping.tp_size} tensor-parallel ranks, but "
            f"tensor_parallel.tp_size = {tp_size}; make one with "
            f"megakv fairkv-map --tp {tp_size}, or set tp_size to {mapping.tp_size}"
        )
    return mapping


def place_heads(mapping: HeadMapping, config: PreTrainedConfig) -> HeadMap:
    """The placement of a model's heads, all query heads beside every replica of their KV head.

    Raises
    ------
    ValueError
        If the mapping is of another model.
    """
    layers, heads, kv_heads = head_counts(config)
    found = len(mapping.mapping), mapping.n_kv_heads
    if found != (layers, kv_heads):
        raise ValueError(
            f"{SETTING} is of {mapping.model!r} with {found[0]} layers of {found[1]} KV heads, but the model has "
            f"{layers} layers of {kv_heads} KV heads; profile and map this model: "
            f"megakv fairkv-profile, megakv fairkv-map"
        )
    return mapping.head_map(heads, whole=True)


def check_same_mapping(mapping: HeadMapping, comm: Communicator) -> None:
    """Refuse to go on where ranks have read different files.

    Raises
    ------
    MegaKVError
    """
    digests = comm.gather_objects(mapping.digest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise MegaKVError(f"{SETTING}: rank {rank} has read another mapping than rank 0; give all ranks one file")

"""The runtime of an engine, put together from the JSON and the model."""

from __future__ import annotations

from transformers import PreTrainedModel

from megakv.comm import Communicator
from megakv.config import MegaKVConfig
from megakv.costmodel.shape import ModelShape
from megakv.fairkv.compression import Compressor
from megakv.fairkv.mapping import HeadMapping
from megakv.fairkv.replicas import HeadReplicas
from megakv.loading import LoadedModel
from megakv.placement import head_counts
from megakv.planning import PassPlanner
from megakv.runtime import Runtime


def make_runtime(
    loaded: LoadedModel, config: MegaKVConfig, comm: Communicator, mapping: HeadMapping | None = None
) -> Runtime:
    """What the attention modules of an engine's model call. Every rank must call it.

    Parameters
    ----------
    loaded : LoadedModel
        The model with this rank's weights.
    config : MegaKVConfig
    comm : Communicator
    mapping : HeadMapping, optional
        That the model's heads were placed by.

    Raises
    ------
    ValueError
        If a setting does not fit the model, or a file that one names cannot be used.
    """
    section, model = config.megakv, loaded.module
    _, heads, kv_heads = head_counts(model.config)
    replicas = None if mapping is None else HeadReplicas(mapping, loaded.head_map, comm)
    planner = PassPlanner(
        comm=comm,
        config=section.context_parallel,
        heads=heads,
        kv_heads=kv_heads,
        shape=_known_shape(model, config),
        runahead=section.runahead,
        divided=replicas is not None and replicas.shared,
    )
    fairkv = section.fairkv
    compressor = None if fairkv.budget is None else Compressor(fairkv, loaded.head_map, comm, replicas)
    return Runtime(comm, planner, compressor, replicas, dtype=model.dtype)


def _known_shape(model: PreTrainedModel, config: MegaKVConfig) -> ModelShape | None:
    """The model's sizes where something is predicted from them; None where its config does not tell them."""
    section = config.megakv
    if section.context_parallel.profile is None and section.runahead.table is None:
        return None
    try:
        return ModelShape.from_config(model.config, dtype=model.dtype)
    except ValueError:
        return None

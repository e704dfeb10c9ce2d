"""Whether the shares of all tensor-parallel ranks together are the model: nothing missing, nothing summed twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megakv.base.errors import MegaKVError
from megakv.weights.placement import HeadMap, SliceSpec
from megakv.weights.placement.attention import FUSED, KEY_NORMS, OUTPUTS, QUERY_NORMS, SEPARATE


def check_coverage(
    shapes: Mapping[str, Sequence[int]],
    placements: Sequence[Mapping[str, SliceSpec]],
    head_map: HeadMap,
    attentions: Sequence[str],
) -> int:
    """Refuse shares that do not add up to the model.

    Every index of a parameter that is cut must be on exactly one rank, but for those of heads that the head map copies,
    which are on as many as it says.

    shapes: whole shape of every parameter, by name.
    placements: from `plan_placement`, one of each rank.
    attentions: full name of each layer's attention module.
    Returns the number of parameters that are cut.
    Raises MegaKVError, naming the parameter, and which of its indices are on how many ranks.
    """
    cut = 0
    # Layers are mostly cut alike.
    duplicates: dict[tuple[object, ...], int] = {}
    for name, shape in shapes.items():
        specs = [placement[name] for placement in placements]
        if any(spec.zero for spec in specs):
            present = sum(not spec.zero for spec in specs)
            if present != 1:
                raise MegaKVError(f"{name} is summed over ranks, but {present} of {len(specs)} ranks hold its values")
            continue
        if all(spec.ranges is None for spec in specs):
            continue
        cut += 1
        layer = next((index for index, prefix in enumerate(attentions) if name.startswith(f"{prefix}.")), None)
        extra = duplicates.get((tuple(shape), *specs))
        if extra is None:
            extra = duplicates[tuple(shape), *specs] = _duplicates(name, shape, specs)
        allowed = (0,) if layer is None else _copied(head_map, layer, name, shape[specs[0].dim])
        if extra not in allowed:
            raise MegaKVError(
                f"{name}: {extra} of {shape[specs[0].dim]} indices of dimension {specs[0].dim} are doubled, "
                f"copies of heads make {' or '.join(map(str, allowed))}"
            )
    return cut


def _copied(head_map: HeadMap, layer: int, name: str, length: int) -> tuple[int, ...]:
    """Indices that copies of heads add to an attention parameter of `length` along the dimension that is cut.

    There are several where its name does not tell whether it belongs to queries or to keys.
    """
    heads, kv_heads, shards = head_map.n_heads, head_map.n_kv_heads, head_map.layers[layer]
    more = sum(len(shard.query_heads) for shard in shards) - heads
    more_kv = sum(len(shard.kv_heads) for shard in shards) - kv_heads
    owner = name.split(".")[-2] if not name.endswith("sinks") else QUERY_NORMS[0]
    if owner in FUSED:
        return ((more + 2 * more_kv) * length // (heads + 2 * kv_heads),)
    of_queries, of_keys = more * length // heads, more_kv * length // kv_heads
    if owner in (SEPARATE[0], *QUERY_NORMS, *OUTPUTS):
        return (of_queries,)
    return (of_keys,) if owner in (*SEPARATE[1:], *KEY_NORMS) else (of_queries, of_keys)


def _duplicates(name: str, shape: Sequence[int], specs: Iterable[SliceSpec]) -> int:
    """How many indices more than the parameter has are on all ranks together, none being missing."""
    specs = list(specs)
    dims = {spec.dim for spec in specs}
    if len(dims) > 1 or any(spec.ranges is None for spec in specs):
        raise MegaKVError(f"{name} is cut otherwise on one rank than on another")
    length = shape[dims.pop()]
    held = np.zeros(length, dtype=np.int64)
    for rank, spec in enumerate(specs):
        own = np.zeros(length, dtype=np.int64)
        assert spec.ranges is not None
        for start, stop in spec.ranges:
            if not 0 <= start < stop <= length:
                raise MegaKVError(f"{name}: rank {rank} holds {start} to {stop} of {length} indices")
            own[start:stop] += 1
        if own.max(initial=0) > 1:
            raise MegaKVError(f"{name}: rank {rank} holds index {int(own.argmax())} twice")
        held += own
    if not held.all():
        raise MegaKVError(f"{name}: index {int(held.argmin())} of {length} is on no rank")
    return int(held.sum()) - length

"""Whether the shares of all tensor-parallel ranks together are the model: nothing missing, nothing summed twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megakv.errors import MegaKVError
from megakv.placement import HeadMap, SliceSpec
from megakv.placement.attention import FUSED, KEY_NORMS, SEPARATE


def check_coverage(
    shapes: Mapping[str, Sequence[int]],
    placements: Sequence[Mapping[str, SliceSpec]],
    head_map: HeadMap,
    attentions: Sequence[str],
) -> int:
    """Refuse shares that do not add up to the model.

    Every index of a parameter that is cut must be on exactly one rank, but for rows of KV heads, which are on as many
    as the head map has copies. What is cut along its inputs is summed over ranks, so it may never be there twice.

    Parameters
    ----------
    shapes : mapping
        Whole shape of every parameter, by name.
    placements : sequence of mapping
        From `plan_placement`, one of each rank.
    head_map : HeadMap
    attentions : sequence of str
        Full name of each layer's attention module.

    Returns
    -------
    int
        Parameters that are cut.

    Raises
    ------
    MegaKVError
        Naming the parameter, and which of its indices are on how many ranks.
    """
    copies = {
        f"{name}.": sum(len(shard.groups) for shard in head_map.layers[layer]) - head_map.n_kv_heads
        for layer, name in enumerate(attentions)
    }
    cut = 0
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
        copied = next((count for prefix, count in copies.items() if name.startswith(prefix)), 0)
        extra, allowed = _duplicates(name, shape, specs), copied * _rows_of_kv_head(name, shape, head_map)
        if extra != allowed:
            raise MegaKVError(
                f"{name}: {extra} of {shape[specs[0].dim]} indices of dimension {specs[0].dim} are doubled, "
                f"copies of KV heads make {allowed}"
            )
    return cut


def _rows_of_kv_head(name: str, shape: Sequence[int], head_map: HeadMap) -> int:
    """Rows that every copy of a KV head adds to an attention parameter."""
    owner = name.split(".")[-2]
    if owner in FUSED:
        return 2 * shape[0] // (head_map.n_heads + 2 * head_map.n_kv_heads)
    return shape[0] // head_map.n_kv_heads if owner in (*SEPARATE[1:], *KEY_NORMS) else 0


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

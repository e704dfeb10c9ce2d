"""What a rank remembers of a layer's attention to a sequence, for the next time that its cache is compressed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megakv.base.device import upload
from megakv.base.tensor_files import StreamedTensor
from megakv.distributed.sharding import IntArray


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Notes:
    """Of one layer and sequence. Never changed once made, so that copies of a cache share them.

    `queries` ``[n, H, D + 1]``, with the log-sum-exp of their attention, are those of the tokens at `slots` ``[n]``,
    ascending, that are not counted in yet; each lies on one context-parallel rank. `mass` ``[m]`` is what all others
    have given to the tokens at the slots `held` ``[m]`` of the local KV heads `heads` ``[m]``, head after head.
    """

    slots: IntArray = field(default_factory=_none)
    queries: Tensor | None = None
    heads: IntArray = field(default_factory=_none)
    held: IntArray = field(default_factory=_none)
    mass: Tensor | None = None

    def joined(self, slots: IntArray, queries: Tensor) -> Notes:
        """With further queries."""
        every = queries if self.queries is None else torch.cat([self.queries, queries])
        return replace(self, slots=np.concatenate([self.slots, slots]), queries=every)

    def since(self, slot: int) -> Notes:
        """Without the queries before a slot."""
        first = int(np.searchsorted(self.slots, slot))
        if self.queries is None or not first:
            return self
        return replace(self, slots=self.slots[first:], queries=self.queries[first:].clone())

    def below(self, slot: int) -> Notes:
        """Without all that is at a slot and beyond."""
        count, kept = int(np.searchsorted(self.slots, slot)), np.flatnonzero(self.held < slot)
        return Notes(
            self.slots[:count],
            None if self.queries is None else self.queries[:count],
            self.heads[kept],
            self.held[kept],
            None if self.mass is None else self.mass[upload(kept, self.mass.device)],
        )

    def with_mass(self, heads: IntArray, held: IntArray, mass: Tensor) -> Notes:
        """With what was given to further tokens; of those that are known already this holds."""
        if self.mass is not None:
            heads, held = np.concatenate([heads, self.heads]), np.concatenate([held, self.held])
            mass = torch.cat([mass, self.mass])
        order = np.lexsort((held, heads))
        same = (np.diff(heads[order], prepend=-1) == 0) & (np.diff(held[order], prepend=-1) == 0)
        order = order[~same]
        return replace(self, heads=heads[order], held=held[order], mass=mass[upload(order, mass.device)])

    def mass_of(self, slots_KM: IntArray, like: Tensor) -> Tensor:
        """``[K, m]`` what was given to the tokens at some slots of each head: 0 where nothing is known."""
        found = like.new_zeros(slots_KM.shape)
        if self.mass is None or not len(self.heads) or not slots_KM.size:
            return found
        width = 1 + max(int(self.held.max()), int(slots_KM.max()))
        known = self.heads * width + self.held
        asked = np.arange(len(slots_KM))[:, None] * width + slots_KM
        place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        same = (known[place] == asked) & (slots_KM >= 0)
        device = like.device
        return torch.where(upload(same, device), self.mass.to(like.dtype)[upload(place, device)], found)

    def saved(self) -> dict[str, StreamedTensor]:
        """What a file holds of it."""
        tensors: dict[str, Tensor] = {}
        if self.queries is not None:
            tensors |= {"slots": torch.from_numpy(self.slots), "queries": self.queries}
        if self.mass is not None:
            heads, held = torch.from_numpy(self.heads), torch.from_numpy(self.held)
            tensors |= {"heads": heads, "held": held, "mass": self.mass}
        return {f"noted.{name}": StreamedTensor.of(tensor) for name, tensor in tensors.items()}

    def nbytes(self) -> int:
        tensors = sum(each.nbytes for each in (self.queries, self.mass) if each is not None)
        return tensors + self.slots.nbytes + self.heads.nbytes + self.held.nbytes

"""Which groups of which layers are in the buffers on the accelerator, or on their way there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from megakv.errors import MegaKVError
from megakv.offload.link import Link
from megakv.offload.staging import StagedLayer, StagingBuffer, bring
from megakv.offload.windows import UnseenTokens

if TYPE_CHECKING:
    from megakv.offload.cache import OffloadedCache
    from megakv.offload.division import Plan
    from megakv.offload.planner import Planner
    from megakv.offload.store import TieredStore

BUFFERS = 2


class Prefetch:
    """Brings groups of sequences, layer by layer, in the order in which they are attended to.

    Parameters
    ----------
    planner : Planner
    link : Link
    layers : int
    device : torch.device

    Attributes
    ----------
    groups : list of range
        The sequences of the pass under way, in the groups that each layer attends to.
    stays : bool
        Whether cached rows are attended to where they lie in the pass under way: only then may some stay away.
    unseen : UnseenTokens or None
        Of the pass under way.
    """

    def __init__(self, planner: Planner, link: Link, *, layers: int, device: torch.device):
        self.groups: list[range] = []
        self.stays = True
        self.unseen: UnseenTokens | None = None
        self._planner = planner
        self._link = link
        self._layers = layers
        self._free = [StagingBuffer(device) for _ in range(BUFFERS)]
        self._staged: dict[tuple[int, int], StagedLayer] = {}

    def __len__(self) -> int:
        return len(self._staged)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(b.nbytes for b in self._free) + sum(staged.buffer.nbytes for staged in self._staged.values())

    def get(self, layer: int, index: int) -> StagedLayer | None:
        """A group of a layer, if it was brought."""
        return self._staged.get((layer, index))

    def valid(self, new: list[int]) -> bool:
        """Whether all that was brought is what a pass with so many new tokens per sequence needs."""
        return all(staged.valid(new, self.stays) and staged.group in self.groups for staged in self._staged.values())

    def plan(self, store: TieredStore, *, beyond: bool = False) -> Plan:
        """What becomes of the cached tokens of a layer, in this step or the next."""
        unseen = self._unseen(None, beyond, len(store.lengths()))
        return self._planner.plan(store, self.groups, unseen, stays=self.stays, beyond=beyond)

    def _unseen(self, layer: int | None, beyond: bool, batch: int) -> list[int]:
        """First tokens of each sequence that need not come: in a layer, or in the mean of all layers."""
        # Rows that travel to other ranks are counted there.
        if self.unseen is None or not self.stays:
            return [0] * batch
        return self.unseen.in_the_mean(beyond=beyond) if layer is None else self.unseen.in_layer(layer, beyond=beyond)

    def begin(self, cache: OffloadedCache, new: list[int]) -> None:
        """Bring the first groups of a pass."""
        for unit in range(min(BUFFERS, self._layers * len(self.groups))):
            self.stage(cache, *divmod(unit, len(self.groups)), new)

    def follow(self, cache: OffloadedCache, layer: int, index: int, new: list[int], *, beyond: bool) -> None:
        """A group's buffer was given back: bring those that come next.

        Parameters
        ----------
        cache : OffloadedCache
        layer, index : int
            The group that was attended to last.
        new : list of int
            New tokens of the pass, per sequence.
        beyond : bool
            Whether the next step's first groups may come too: one more token of each sequence. Rows of this step are in
            their tiers or on the way there.
        """
        count = len(self.groups)
        unit, units = layer * count + index, self._layers * count
        for following in range(unit + 1, unit + BUFFERS + 1):
            if following < units:
                self.stage(cache, *divmod(following, count), new)
            elif beyond and following - units <= unit:
                self.stage(cache, *divmod(following - units, count), [1] * len(new), beyond=True)

    def stage(self, cache: OffloadedCache, layer: int, index: int, new: list[int], *, beyond: bool = False) -> None:
        """Begin to bring a group's rows in a layer, if there is a buffer and anything to bring."""
        store, group = cache.store(layer), self.groups[index]
        tokens = sum(store.settled()[group.start : group.stop])
        if (layer, index) in self._staged or not self._free or not tokens:
            return
        store.flush()
        plan = self.plan(store, beyond=beyond)
        buffer, division = self._free.pop(), plan.divisions[index]
        unseen = self._unseen(layer, beyond, len(new))
        self._staged[layer, index] = bring(
            store, group, buffer, self._link, division, new, chunk=plan.chunk, unseen=unseen
        )

    def ensure(self, cache: OffloadedCache, layer: int, index: int, new: list[int]) -> StagedLayer | None:
        """A group of a layer, brought now if it was not before; None if it has no cached tokens."""
        group = self.groups[index]
        if (layer, index) not in self._staged and any(cache.store(layer).settled()[group.start : group.stop]):
            self.drop_all()
            self.stage(cache, layer, index, new)
        return self.get(layer, index)

    def release(self, layer: int, index: int) -> None:
        """A group was attended to."""
        staged = self._staged.pop((layer, index), None)
        if staged is not None:
            staged.settle()
            self._free.append(staged.buffer)

    def drop_all(self) -> None:
        """Forget what was brought, whether or not it came."""
        for unit in list(self._staged):
            staged = self._staged.pop(unit)
            with suppress(MegaKVError):
                staged.settle()
            self._free.append(staged.buffer)

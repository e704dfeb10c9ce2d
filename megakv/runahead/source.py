"""Where an engine's partitions come from: fixed by the user, looked up and interpolated, predicted, or even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from megakv.comm import Communicator
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape
from megakv.runahead.partition import Partition, check_partition, even, explicit


class PartitionSettings(Protocol):
    """What `PartitionSource` reads of the section ``megakv.runahead``."""

    @property
    def kv(self) -> Literal["sharded", "last"]: ...
    @property
    def partition(self) -> str | Sequence[float]: ...
    @property
    def table(self) -> str | None: ...
    @property
    def accept_foreign_table(self) -> bool: ...


@dataclass
class PartitionSource:
    """The partition of every sequence of every prompt; the same on all ranks.

    Parameters
    ----------
    size : int
        Context-parallel degree.
    given : str or sequence of float
        ``auto``, ``even``, or a user's fractions or token counts.
    """

    size: int
    given: str | Sequence[float] = "auto"

    @classmethod
    def from_config(
        cls,
        settings: PartitionSettings,
        *,
        comm: Communicator,
        model: ModelShape | None,
        profile: HardwareProfile | None = None,
    ) -> PartitionSource:
        """Read what the section ``megakv.runahead`` names. Every rank must call it.

        Parameters
        ----------
        settings : section ``megakv.runahead``
        comm : Communicator
        model : ModelShape, optional
            Of the whole model; None where it is not known.
        profile : HardwareProfile, optional
            What ``megakv.context_parallel.profile`` names, for the cost model.

        Raises
        ------
        ValueError
            If a setting cannot be used: its name, its value and what would work.
        MegaKVError
            On ranks whose own files are in order.
        """
        size = comm.mesh.cp_size
        if not isinstance(settings.partition, str):
            check_partition(settings.partition, size)
        return cls(size, settings.partition)

    def sizes(self, new: int, cached: int = 0) -> Partition:
        """Tokens of each context-parallel rank.

        Parameters
        ----------
        new, cached : int
            New tokens of a sequence, and those that the ranks hold of it already.

        Raises
        ------
        ValueError
            If the user's token counts do not sum to `new`.
        """
        if isinstance(self.given, str):
            return even(new, self.size)
        return explicit(self.given, new, self.size)

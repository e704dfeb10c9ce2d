"""Limits of fair-copying: how many replicas there may be, of a head and of all (FairKV, Equations 3-4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CopyLimits:
    """What fair-copying may use in each layer of `tp_size` ranks.

    `copies` are the extra replicas of all heads together; `max_replicas` is R_max of the paper's Equation 3;
    `copied_heads` is CH, how many heads may have more than one replica.
    """

    tp_size: int
    copies: int = 0
    max_replicas: int | None = None
    copied_heads: int | None = None

    def check(self, heads: int) -> None:
        """A `ValueError` for what `heads` KV heads per layer cannot satisfy."""
        size, copies = self.tp_size, self.copies
        limits = {"max_replicas": self.max_replicas, "copied_heads": self.copied_heads}
        for (name, value), least in zip({"tp": size, "copies": copies, **limits}.items(), (1, 0, 1, 0), strict=True):
            if value is not None and value < least:
                raise ValueError(f"{name} = {value}: allowed: {least} or more")
        if self.max_replicas is not None and self.max_replicas > size:
            raise ValueError(
                f"max_replicas = {self.max_replicas}: a head can be on each rank once, so tp = {size} at most"
            )
        if copies > (most := heads * (size - 1)):
            raise ValueError(
                f"copies = {copies}: each of {heads} KV heads can be on each of tp = {size} ranks once, "
                f"which is {most} copies at most"
            )
        if heads + self.most(heads) < size:
            limiting = limits if self.most(heads) < copies else {}
            given = {"copies": copies, **{name: value for name, value in limiting.items() if value is not None}}
            raise ValueError(
                f"tp = {size}: {heads} KV heads with {' and '.join(f'{k} = {v}' for k, v in given.items())} leave "
                f"ranks without a head; {size - heads} copies are needed, or fewer ranks"
            )

    @property
    def replicas(self) -> int:
        """That one head may have."""
        return min(self.max_replicas or self.tp_size, self.tp_size, 1 + self.copies)

    def most(self, heads: int) -> int:
        """Copies that `heads` heads can have within R_max and CH."""
        copied = heads if self.copied_heads is None else min(self.copied_heads, heads)
        return min(self.copies, copied * (self.replicas - 1))

    def allow(self, replicas: Sequence[int]) -> bool:
        """Whether heads may have so many replicas."""
        return (
            sum(replicas) - len(replicas) <= self.copies
            and max(replicas) <= self.replicas
            and (self.copied_heads is None or sum(n > 1 for n in replicas) <= self.copied_heads)
        )

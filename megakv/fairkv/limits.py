"""How many replicas of KV heads a layer may have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CopyLimits:
    """What fair-copying may use in each layer.

    Parameters
    ----------
    tp_size : int
        Ranks.
    copies : int
        Extra replicas of a layer's heads, all together.
    max_replicas : int, optional
        R_max of the paper's Equation 3: replicas that one head may have; by default as many as there are ranks.
    copied_heads : int, optional
        CH: heads that may have more than one replica; by default any number.
    """

    tp_size: int
    copies: int = 0
    max_replicas: int | None = None
    copied_heads: int | None = None

    def check(self, heads: int) -> None:
        """Refuse what `heads` KV heads per layer cannot satisfy.

        Raises
        ------
        ValueError
            Naming the setting, its value and what is allowed.
        """
        for name, value, least in (
            ("tp", self.tp_size, 1),
            ("copies", self.copies, 0),
            ("max_replicas", self.max_replicas, 1),
            ("copied_heads", self.copied_heads, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} = {value}: allowed: {least} or more")
        if self.max_replicas is not None and self.max_replicas > self.tp_size:
            raise ValueError(
                f"max_replicas = {self.max_replicas}: a head can be on each rank once, so tp = {self.tp_size} at most"
            )
        most = self.most(heads)
        if self.copies > heads * (self.tp_size - 1):
            raise ValueError(
                f"copies = {self.copies}: each of {heads} KV heads can be on each of tp = {self.tp_size} ranks once, "
                f"which is {heads * (self.tp_size - 1)} copies at most"
            )
        if heads + most < self.tp_size:
            limited = [
                f"{name} = {value}"
                for name, value in (("max_replicas", self.max_replicas), ("copied_heads", self.copied_heads))
                if value is not None and most < self.copies
            ]
            settings = " and ".join([f"copies = {self.copies}", *limited])
            raise ValueError(
                f"tp = {self.tp_size}: {heads} KV heads with {settings} leave ranks without a head; "
                f"{self.tp_size - heads} copies are needed, or fewer ranks"
            )

    @property
    def replicas(self) -> int:
        """That one head may have."""
        return min(self.max_replicas or self.tp_size, self.tp_size, 1 + self.copies)

    def most(self, heads: int) -> int:
        """Copies that `heads` heads can have within R_max and CH."""
        copied = heads if self.copied_heads is None else min(self.copied_heads, heads)
        return min(self.copies, copied * (self.replicas - 1))

    def allow(self, replicas: list[int]) -> bool:
        """Whether heads may have so many replicas."""
        return (
            sum(replicas) - len(replicas) <= self.copies
            and max(replicas) <= self.replicas
            and (self.copied_heads is None or sum(n > 1 for n in replicas) <= self.copied_heads)
        )

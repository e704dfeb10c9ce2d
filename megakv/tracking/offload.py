"""What passes over offloaded keys and values did, step by step and summed up."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class OffloadStep:
    """One pass over keys and values that lie off the accelerator.

    Attributes
    ----------
    plan
        The method that it was planned by; ``all`` for one in which activations are recomputed and the host attends.
    cached, resident, recomputed, on_host, unseen
        Cached tokens of all sequences; of them, in each layer, those whose keys and values stay on the accelerator,
        those recomputed from activations (the split point), those attended to by the host, and those before the windows
        of all queries. They are counted as it happens, which may be otherwise than planned: all but the first are means
        over layers.
    predicted_s, measured_s
        From the end of the pass before to the end of this one.
    waited_s
        In which the accelerator stood still for the link or the host.
    bytes_in, bytes_out
        To the accelerator and from it.
    weight_bytes
        Weights that the pass needed; what is brought ahead counts for the pass in which it comes.
    kv_bits
        Bits of each key and value off the accelerator where they are quantised: results are lossy then.
    link_utilisation
        `bytes_in` as a share of what the link carries in `measured_s`, by its measured bandwidth.
    disk_bytes, disk_utilisation
        Of `bytes_in`, what was read from disk, and as a share of what the disk gives in `measured_s`.
    profiled
        Whether speeds of the machine were measured in the course of it, or read from their file: that takes time which
        was not predicted.
    """

    plan: str
    cached: int
    resident: int
    recomputed: int
    on_host: int
    predicted_s: float
    measured_s: float
    waited_s: float
    bytes_in: int
    bytes_out: int
    weight_bytes: int = 0
    kv_bits: int | None = None
    link_utilisation: float = 0.0
    disk_bytes: int = 0
    disk_utilisation: float = 0.0
    profiled: bool = False
    unseen: int = 0
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @property
    def streamed(self) -> int:
        """Tokens whose keys and values were sent."""
        return self.cached - self.resident - self.recomputed - self.on_host - self.unseen


def offload_scalars(ranks: Sequence[Sequence[OffloadStep]]) -> dict[str, float]:
    """Flat metrics of all ranks' passes; none where nothing was offloaded.

    Bytes are sums over ranks and passes, shares and errors medians over passes, passes by plan means over ranks.
    """
    steps = [step for rank in ranks for step in rank]
    if not steps:
        return {}
    values = {
        "offload/bytes_in": float(sum(step.bytes_in for step in steps)),
        "offload/bytes_out": float(sum(step.bytes_out for step in steps)),
        "offload/link_utilisation": statistics.median(step.link_utilisation for step in steps),
    }
    if any(step.disk_bytes for step in steps):
        values["offload/disk_bytes"] = float(sum(step.disk_bytes for step in steps))
        values["offload/disk_utilisation"] = statistics.median(step.disk_utilisation for step in steps)
    for share in ("resident", "recomputed", "on_host", *(("unseen",) if any(step.unseen for step in steps) else ())):
        values[f"offload/{share}_share"] = statistics.median(
            getattr(step, share) / max(1, step.cached) for step in steps
        )
    errors = [abs(step.measured_s / step.predicted_s - 1) for step in steps if step.predicted_s and not step.profiled]
    if errors:
        values["offload/prediction_error"] = statistics.median(errors)
    counts = Counter(step.plan for step in steps)
    return values | {f"offload/passes/{plan}": counts[plan] / len(ranks) for plan in sorted(counts)}

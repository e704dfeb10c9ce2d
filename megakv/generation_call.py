"""One `generate` call of all ranks: the agreement on seeds, tokens, plans and stops, and when each token was known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from megakv.device import upload
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.errors import MegaKVError
from megakv.generation import described, given_option


def _open(
    agreement: Agreement, device: torch.device, model: PreTrainedModel, ids: Tensor | None, options: dict[str, Any]
) -> bool:
    """Begin with rank 0's random state, so that all draw the same tokens; returns whether rank 0 has a streamer.

    A MegaKVError on every rank, if one was called with another prompt or other options than rank 0.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    own = described(model, ids, options)

    def opening() -> tuple[list[Tensor], dict[str, str], bool]:
        states = [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(device)])]
        return states, own, options.get("streamer") is not None

    states, first, streams = agreement.decide(opening)
    torch.set_rng_state(states[0])
    if module is not None:
        module.set_rng_state(states[1], device)

    def check() -> None:
        for name in sorted(own.keys() | first.keys()):
            given, wanted = own.get(name, "None"), first.get(name, "None")
            if given != wanted:
                raise MegaKVError(
                    f"called with {name} = {given:.200}, rank 0 with {wanted:.200}: every rank must make the same "
                    "calls, in the same order, with the same options"
                )

    # All start at one time, too.
    agreement.together(check)
    return streams


@dataclass
class TokenClock:
    """When each token of a `generate` call was known, in seconds of the ledger's clock."""

    now: Callable[[], float]
    times: list[float] = field(default_factory=list)
    latest: Tensor | None = None
    """Prompt and tokens so far."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.times[0] if self.times else None

    @property
    def ttit_s(self) -> float | None:
        """Mean time to incremental token."""
        steps = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / steps if steps > 0 else None


class Plans(Protocol):
    """What rank 0 decides for all ranks after each token, besides when to stop."""

    def decision(self) -> int:
        """A number that means the same on every rank."""

    def follow(self, decision: int) -> None:
        """Take that of rank 0."""


class RankZeroStreamer(BaseStreamer):
    """The user's streamer on rank 0; the others have one that does nothing, so that transformers treats all alike.

    What it raises is kept, and ends the call on all ranks with the next step's message.
    """

    def __init__(self, streamer: Any):
        self._streamer = streamer
        self.failure: BaseException | None = None

    def put(self, value: Tensor) -> None:
        """Tokens go to the user's, until it fails."""
        self._attempt(lambda: self._streamer.put(value))

    def end(self) -> None:
        """The last of them has come."""
        self._attempt(lambda: self._streamer.end())

    def check(self) -> None:
        """Raise what the user's streamer raised."""
        if self.failure is not None:
            raise self.failure

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._streamer is not None and self.failure is None:
            try:
                action()
            except BaseException as error:
                self.failure = error


class RankZeroStop(StoppingCriteria):
    """Rank 0's decision after each token: when to stop, the plans of the next step, and whether user code of it failed.

    One message has it all, with rank 0's tokens, by which the others see that they chose the same. The user's own
    `criteria` are asked on rank 0 only; `max_time` is in seconds, by rank 0's clock.
    """

    def __init__(
        self,
        comm: Communicator,
        agreement: Agreement,
        criteria: list[Any],
        max_time: float | None,
        clock: TokenClock,
        streamer: RankZeroStreamer | None,
        plans: Plans | None,
    ):
        self._comm = comm
        self._agreement = agreement
        self._plans = plans
        self._criteria = criteria
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self._clock = clock
        self._streamer = streamer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._clock.latest = input_ids
        tokens, device = input_ids[:, -1:].t(), self._comm.mesh.device
        failure = None if self._streamer is None else self._streamer.failure
        said = np.zeros((3, tokens.shape[1]), dtype=np.int64)
        if self._comm.mesh.rank == 0 and failure is None:
            try:
                said[0] = self._done(input_ids, scores, **kwargs).numpy()
                said[1] = 0 if self._plans is None else self._plans.decision()
            except BaseException as error:
                failure = error
        said[2] = failure is None
        agreed = torch.cat([tokens.to(device), upload(said, device)])
        self._comm.broadcast(agreed, 0, operation="control")
        # All that is to be known of a step is read at once: the host waits for the device here, and nowhere else.
        own, found, stop, plan, well = torch.cat([tokens.to(device), agreed]).cpu()
        self._clock.times.append(self._clock.now())
        if not well[0]:
            self._agreement.decide(lambda: _raise(failure))
        if not torch.equal(found, own):
            raise MegaKVError(
                f"rank {self._comm.mesh.rank} chose other tokens than rank 0 at length {input_ids.shape[1]}: a logits "
                "processor or prefix_allowed_tokens_fn gives different results on different ranks"
            )
        if self._plans is not None:
            self._plans.follow(int(plan[0]))
        return upload(stop.bool().numpy(), input_ids.device)

    def _done(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        for criterion in self._criteria:
            done |= torch.as_tensor(criterion(input_ids, scores, **kwargs)).cpu()
        if self._deadline is not None:
            done |= time.monotonic() > self._deadline
        return done


def _raise(failure: BaseException | None) -> None:
    assert failure is not None
    raise failure


@contextmanager
def agreed_call(
    model: PreTrainedModel,
    ids: Tensor | None,
    options: dict[str, Any],
    comm: Communicator,
    agreement: Agreement,
    new_plans: Callable[[], Plans] | None = None,
) -> Iterator[tuple[dict[str, Any], TokenClock]]:
    """Around transformers' `generate` on all ranks: the options to hand to it, and when its tokens were known.

    Stops and plans are decided by rank 0, tokens are streamed from rank 0. An error has the tokens that there were.
    `new_plans` begins a run of an engine that plans its steps, once all ranks are known to make the same call.
    """
    streams = _open(agreement, comm.mesh.device, model, ids, options)
    comm.ledger.reset()
    clock = TokenClock(comm.ledger.now)
    plans = None if new_plans is None else new_plans()
    streamer = RankZeroStreamer(options.get("streamer") if comm.mesh.rank == 0 else None) if streams else None
    prepared = {name: value for name, value in options.items() if name not in ("streamer", "stopping_criteria")}
    max_time = given_option("max_time", options, model)
    if max_time is not None:
        # None as an option goes before what the configurations say: each rank's own clock must not decide.
        prepared["max_time"] = None
    criteria = list(options.get("stopping_criteria") or [])
    stop = RankZeroStop(comm, agreement, criteria, max_time, clock, streamer, plans)
    prepared["stopping_criteria"] = StoppingCriteriaList([stop])
    if streamer is not None:
        prepared["streamer"] = streamer
    try:
        yield prepared, clock
        # A rank that fails at the last token fails all; rank 0's streamer has seen the end by now.
        agreement.together(lambda: None if streamer is None else streamer.check())
    except MegaKVError as error:
        error.sequences = clock.latest
        raise
    finally:
        clock.latest = None

"""One `generate` call of all ranks: the agreement on seeds, tokens, plans and stops, and when each token was known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from megakv.base.device import random_state, set_random_state, upload
from megakv.base.errors import MegaKVError
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.engine.candidates import Candidates
from megakv.engine.generation import described, given_option

if TYPE_CHECKING:
    from megakv.offload.planner import Planner


def _open(comm: Communicator, agreement: Agreement, model: PreTrainedModel, ids: Any, options: dict[str, Any]) -> bool:
    """Begin with rank 0's random state, so that all draw the same tokens; returns whether rank 0 has a streamer.

    A MegaKVError on every rank, if one was called with another prompt or other options than rank 0.
    """
    device = comm.mesh.device
    own = described(model, ids, options)

    def opening() -> tuple[list[Tensor], dict[str, str], bool]:
        return random_state(device), own, options.get("streamer") is not None

    states, first, streams = agreement.decide(opening)
    set_random_state(states, device)

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
    def step_s(self) -> list[float]:
        """Times from each token to the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def ttit_s(self) -> float | None:
        """Mean time to incremental token."""
        return fmean(self.step_s) if len(self.times) > 1 else None


@dataclass(eq=False)
class RankZero(StoppingCriteria, BaseStreamer):
    """Rank 0's word after each step: when to stop, the plans of the next step, and whether user code of it failed.

    One message has it all, with rank 0's tokens, by which the others see that they chose the same. The user's own
    criteria are asked, and the user's streamer is given tokens, on rank 0 only; the others have a streamer that does
    nothing, so that transformers treats all alike. What either raises is kept, and ends the call on all ranks with the
    next message.

    Where `candidates` are checked a step may have several tokens. Then all criteria that there are come here, and are
    asked after each of them: `stop_length` is that at which one said to stop, and no token beyond is streamed.
    """

    comm: Communicator
    agreement: Agreement
    clock: TokenClock
    criteria: list[Any]
    deadline: float
    """By rank 0's clock, in seconds."""
    streamer: Any
    plans: Planner | None
    failure: BaseException | None = None
    candidates: Candidates | None = None
    stop_length: int | None = None

    def take_over(self, criteria: list[Any]) -> None:
        """Ask these too."""
        self.criteria = [*criteria, *self.criteria]

    def put(self, value: Tensor) -> None:
        """Tokens go to the user's streamer, until it fails; where candidates are checked, when they are asked about."""
        if self.candidates is None:
            self._stream(value)

    def _stream(self, value: Tensor) -> None:
        if self.streamer is not None:
            self._attempt(lambda: self.streamer.put(value))

    def end(self) -> None:
        """The last of them has come."""
        if self.streamer is not None:
            self._attempt(lambda: self.streamer.end())

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.failure is None:
            try:
                action()
            except BaseException as error:
                self.failure = error

    def check(self) -> None:
        """Raise what the user's code raised."""
        if self.failure is not None:
            raise self.failure

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        candidates, batch, device = self.candidates, len(input_ids), self.comm.mesh.device
        if candidates is not None and not candidates.computed:
            # Some versions of transformers ask about candidates before these are checked.
            return torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
        self.clock.latest = input_ids
        new, room = 1, 1
        if candidates is not None:
            new, room = input_ids.shape[1] - candidates.before, 1 + candidates.width
        # Another rank may have taken another number of candidates.
        tokens = input_ids[:, -new:].t().to(device)
        if room > new:
            tokens = functional.pad(tokens, (0, 0, 0, room - new), value=-1)
        said = np.zeros((3, batch), dtype=np.int64)

        def decide() -> None:
            said[0] = self._stops(input_ids, scores, new, kwargs)
            said[1] = 0 if self.plans is None else self.plans.decision()

        if self.comm.mesh.rank == 0:
            self._attempt(decide)
        said[2] = self.failure is None
        # All that is to be known of a step is read at once: the host waits for the device here, and nowhere else.
        if self.agreement.shared:
            agreed = torch.cat([tokens, upload(said, device)])
            self.comm.broadcast(agreed, 0, operation="control")
            own, found, told = np.split(torch.cat([tokens, agreed]).cpu().numpy(), [room, 2 * room])
        else:
            own = found = tokens.cpu().numpy()
            told = said
        stop, plan, well = told
        if not well[0]:
            self.agreement.decide(self.check)
        if found is not own and not np.array_equal(found, own):
            raise MegaKVError(
                f"rank {self.comm.mesh.rank} chose other tokens than rank 0 at length {input_ids.shape[1]}: a logits "
                "processor or prefix_allowed_tokens_fn gives different results on different ranks"
            )
        stopped = int(stop[0])
        if candidates is not None and stopped:
            self.stop_length, new = input_ids.shape[1] - new + stopped, stopped
        self.clock.times += [self.clock.now()] * new
        if self.plans is not None:
            self.plans.follow(int(plan[0]))
        # As long as none stops, a number: nothing has to go up.
        return upload(stop.astype(bool), input_ids.device) if stop.any() else torch.tensor(False)

    def _stops(self, input_ids: Tensor, scores: Any, new: int, kwargs: dict[str, Any]) -> Any:
        """``[B]`` after which of so many new tokens to stop, counted from 1; 0 where to go on."""
        late, length = time.monotonic() > self.deadline, input_ids.shape[1]
        for behind in reversed(range(new)):
            tokens = input_ids[:, : length - behind]
            if self.candidates is not None:
                self._stream(tokens[0, -1:].cpu())
            done = np.full(len(tokens), late)
            for criterion in self.criteria:
                known = scores[: len(scores) - behind] if scores and behind else scores
                done |= torch.as_tensor(criterion(tokens, known, **kwargs)).cpu().numpy()
            if self.candidates is None or done.any():
                return done * (new - behind)
        return 0


@contextmanager
def agreed_call(
    model: PreTrainedModel,
    ids: Tensor | None,
    options: dict[str, Any],
    comm: Communicator,
    agreement: Agreement,
    new_plans: Callable[[], Planner] | None = None,
) -> Iterator[tuple[dict[str, Any], RankZero]]:
    """Around transformers' `generate` on all ranks: the options to hand to it, and rank 0's word, with its clock.

    Stops and plans are decided by rank 0, tokens are streamed from rank 0. An error has the tokens that there were.
    `new_plans` begins a run of an engine that plans its steps, once all ranks are known to make the same call.
    """
    streams = _open(comm, agreement, model, ids, options)
    comm.ledger.reset()
    clock = TokenClock(comm.ledger.now)
    prepared = {name: value for name, value in options.items() if name not in ("streamer", "stopping_criteria")}
    max_time = given_option("max_time", options, model)
    if max_time is not None:
        # None as an option goes before what the configurations say: each rank's own clock must not decide.
        prepared["max_time"] = None
    rank_zero = RankZero(
        comm,
        agreement,
        clock,
        criteria=list(options.get("stopping_criteria") or []),
        deadline=math.inf if max_time is None else time.monotonic() + max_time,
        streamer=options.get("streamer") if comm.mesh.rank == 0 else None,
        plans=None if new_plans is None else new_plans(),
    )
    prepared["stopping_criteria"] = StoppingCriteriaList([rank_zero])
    if streams:
        prepared["streamer"] = rank_zero
    try:
        yield prepared, rank_zero
        # A rank that fails at the last token fails all; rank 0's streamer has seen the end by now.
        agreement.together(rank_zero.check)
    except MegaKVError as error:
        error.sequences = clock.latest
        raise
    finally:
        clock.latest = None

"""Where requests of any thread wait for the thread that serves."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from megakv.base.errors import MegaKVError
from megakv.engine.engine import MegaKVEngine
from megakv.serving.request import Event, Finished, Request
from megakv.serving.sampler import Sampler, check_sampling
from megakv.serving.stats import State

logger = logging.getLogger(__name__)


class RefusedError(MegaKVError):
    """No request is taken at the moment: too many wait, or the server is draining or has ended."""


class TooLongError(ValueError):
    """A prompt and its answer are longer than what the model, or the server, has room for."""


class Inbox:
    """Requests and cancellations until they are taken, and the ids of all requests that have not ended."""

    def __init__(self, max_queue: int):
        self.state: State = "starting"
        self.queued = 0
        """Requests that were taken from here and still wait."""
        self.failure: str | None = None
        """Why serving is to end with an error."""
        self._max_queue = max_queue
        self._requests: list[tuple[Request, float]] = []
        self._cancelled: list[str] = []
        self._ids: set[str] = set()
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Requests that are not served yet."""
        return len(self._requests) + self.queued

    @property
    def drained(self) -> bool:
        """Whether no more comes: none is taken in any more, and none that was is still here."""
        with self._changed:
            return self.state == "draining" and not self._requests

    def submit(self, request: Request) -> None:
        """Take a request in; a RefusedError if none is taken now, a ValueError if its id is in use."""
        with self._changed:
            if self.state in ("draining", "ended"):
                raise RefusedError(f"the server is {self.state}: it takes no more requests")
            if (waiting := self.waiting) >= self._max_queue:
                raise RefusedError(f"{waiting} requests wait already, max_queue = {self._max_queue}; try again later")
            if request.id in self._ids:
                raise ValueError(f"a request with id = {request.id!r} is under way; give each its own")
            self._ids.add(request.id)
            self._requests.append((self._watched(request), time.monotonic()))
            self._changed.notify()

    def _watched(self, request: Request) -> Request:
        """The request with a sink that cannot fail, and of which the end is seen."""

        def sink(event: Event) -> None:
            if isinstance(event, Finished):
                with self._changed:
                    self._ids.discard(request.id)
            try:
                request.sink(event)
            except Exception:
                logger.exception("the sink of request %s failed; it is cancelled", request.id)
                self.cancel(request.id)

        return replace(request, sink=sink)

    def cancel(self, request_id: str) -> None:
        """Ask for the end of a request; of one that has ended already this does nothing."""
        with self._changed:
            if request_id in self._ids:
                self._cancelled.append(request_id)
                self._changed.notify()

    def fail(self, message: str) -> None:
        """Ask for the end of serving, with an error."""
        with self._changed:
            self.failure = message
            self._changed.notify()

    def enter(self, state: State) -> None:
        """Begin to serve, to drain, or end; what was begun later stays."""
        order: list[State] = ["starting", "serving", "draining", "ended"]
        with self._changed:
            self.state = max(self.state, state, key=order.index)
            self._changed.notify()

    def take(self) -> tuple[list[tuple[Request, float]], list[str]]:
        """All that came in, with when it did."""
        with self._changed:
            taken = self._requests, self._cancelled
            self._requests, self._cancelled = [], []
            # Both count as waiting until the next look at what does.
            self.queued += len(taken[0])
            return taken

    def wait(self, seconds: float) -> None:
        """Until something comes in, or the server is to drain or to end; at most so long."""
        with self._changed:
            if not (self._requests or self._cancelled or self.failure) and self.state != "draining":
                self._changed.wait(seconds)


def check_request(request: Request, engine: MegaKVEngine, vocabulary: int, capacity: int) -> None:
    """Refuse what cannot be answered: a ValueError that names it, or the setting that limits it."""
    if not request.prompt:
        raise ValueError("the prompt is empty: at least one token is needed")
    if request.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {request.max_new_tokens}: allowed: 0 or more")
    if wrong := [token for token in request.prompt if not 0 <= token < vocabulary]:
        raise ValueError(f"the prompt has token {wrong[0]}: allowed: 0 to {vocabulary - 1}")
    if request.logprobs is not None and not 0 <= request.logprobs <= vocabulary:
        raise ValueError(f"logprobs = {request.logprobs}: allowed: 0 to {vocabulary}")
    if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= vocabulary:
        raise ValueError(f"prompt_logprobs = {request.prompt_logprobs}: allowed: 0 to {vocabulary}")
    if request.prompt_logprobs is not None and request.compresses:
        raise ValueError("compress_cache = true: not with log probabilities of the prompt; leave out one of them")
    if request.compresses and not engine.compresses:
        raise ValueError(
            "compress_cache = true: the server has no budget for caches; start it with a JSON that has "
            "megakv.fairkv.budget, by --config"
        )
    if request.compresses and engine.sides is not None:
        raise ValueError(
            "compress_cache = true: not with a model whose rotary frequencies follow the length; leave it out"
        )
    check_sampling(request.sampling, vocabulary)
    # What it refuses is refused here, and not where answers of others are computed.
    Sampler.of(request)
    try:
        engine.check_length(len(request.prompt), request.max_new_tokens)
    except ValueError as error:
        raise TooLongError(str(error)) from None
    total = len(request.prompt) + request.max_new_tokens
    if capacity and total > capacity:
        raise TooLongError(f"prompt and output need {total} tokens but kv_tokens = {capacity}; ask for less")

"""The loop in which all ranks serve: rank 0 takes requests, plans passes and samples; the others follow its plans."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from megakv.base.device import without_autograd
from megakv.base.errors import MegaKVError, PeerLostError
from megakv.engine.engine import MegaKVEngine
from megakv.engine.session_files import fingerprint
from megakv.serving.answer import Outcome
from megakv.serving.first_passes import first_passes, memory_in_use
from megakv.serving.inbox import Inbox, RefusedError, check_request
from megakv.serving.leader import Leader
from megakv.serving.plan import Plan
from megakv.serving.prefix_folder import PrefixFolder
from megakv.serving.prefix_tree import PrefixTree
from megakv.serving.request import Finished, Request
from megakv.serving.scheduler import Scheduler
from megakv.serving.settings import ServingSettings
from megakv.serving.stats import Counts, Document, ServingStats, State
from megakv.serving.worker import PrefixStore, Worker

__all__ = ["RefusedError", "ServingLoop"]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often rank 0 looks for failures of others while there is nothing to do."""
REPORT_SECONDS = 5.0
"""How often the others tell rank 0 of their memory while there is something to do."""
MOST_FAILURES = 3
"""So many plans that fail one after the other end the loop."""
MOST_DOCUMENTS = 100
SURVIVED = (MegaKVError, RuntimeError, ValueError)
"""Errors after which a plan is tried again, on all ranks; with any other the rank that has it is lost."""


class ServingLoop:
    """Serves the requests of many with one engine.

    Every rank makes one, with the same settings, which is when they compute a little together, and calls `run`. All
    other methods are for rank 0, and safe to call from any thread, before `run` and while it goes on.

    Raises
    ------
    ValueError
        If the engine has settings that cannot be served, by name, or the store's folder cannot be written to.
    MegaKVError
        If no memory is left for keys and values, or another rank failed.
    """

    def __init__(self, engine: MegaKVEngine, settings: ServingSettings):
        engine.check_serves()
        if settings.store is not None and not engine.gives_spans:
            raise ValueError(
                f"store = {str(settings.store)!r}: prefixes of heads that megakv.fairkv.mapping copies are not kept; "
                "leave out one of them"
            )
        if settings.prompt_lookup and (engine.kv_bits is not None or engine.sides is not None):
            # Candidates would see the rows before them as they were, and not rounded, or have others' frequencies.
            settings = replace(settings, prompt_lookup=0)
        self._engine, self._settings = engine, settings
        self._comm = engine.agreement.comm
        self._vocabulary = int(engine.module.config.get_text_config().vocab_size)
        self._folder: PrefixFolder | None = None
        if settings.store is not None:
            heads = engine.heads_here.heads, engine.heads_here.copies
            identity = f"{fingerprint(engine.module)} {engine.weights_digest} {engine.module.dtype} {heads}"
            if engine.kv_bits is not None:
                # What was rounded is not for those who did not ask for it.
                identity += f" {engine.kv_bits}"
            self._folder = PrefixFolder(settings.store, identity, self._comm)
        if settings.prompt_lookup and engine.compresses and not engine.cuts_compressed and self._comm.mesh.rank == 0:
            logger.warning(
                "prompt_lookup = %d is not for answers that ask for compress_cache: what candidates replace, as "
                "megakv.fairkv.decode_interval has it, could not be taken back",
                settings.prompt_lookup,
            )
        self._store = PrefixStore(engine.kv_device, self._folder)
        self._worker = Worker(engine, self._comm, self._store)
        self._inbox = Inbox(settings.max_queue)
        self._leader: Leader | None = None
        # Held whenever the leader changes, which it does not while a pass is computed.
        self._changing = threading.Lock()
        self._memory: tuple[int, ...] = ()
        self._sent_at = time.monotonic()
        # With the first plan.
        self._reported_at = -REPORT_SECONDS
        self._failures = 0
        self.listeners: list[Callable[[], None]] = []  # Called when all have been told what a step comes to.
        # Last: then nobody waits who was told that there is a server.
        self._first = first_passes(engine, settings)

    # Of rank 0, by any thread

    def submit(self, request: Request) -> None:
        """Take a request; its sink is told everything from here on, by the thread of `run`.

        Raises
        ------
        ValueError
            If the prompt is empty or too long, by the setting that limits it, or the id is in use.
        RefusedError
            If too many requests wait, or the server is draining or has ended.
        """
        check_request(request, self._engine, self._vocabulary, self._first.kv.tokens)
        self._inbox.submit(request)

    def cancel(self, request_id: str) -> None:
        """End a request after the pass under way; what was computed of it is kept. One that has ended is no error."""
        self._inbox.cancel(request_id)

    def drain(self) -> None:
        """Take no more requests, and end `run` when those that were taken are answered."""
        self._inbox.enter("draining")

    def fail(self, message: str) -> None:
        """End `run` on all ranks with this error, after the pass under way, as what clients are served by is gone."""
        self._inbox.fail(message)

    @property
    def state(self) -> State:
        """Whether requests are taken: not while it drains, nor from the moment on at which a rank is lost."""
        return self._inbox.state

    def stats(self) -> ServingStats:
        """A snapshot of load, memory and times."""
        with self._changing:
            leader = self._leader
            counts = Counts() if leader is None else leader.counts
            held = {} if leader is None else dict(leader.tree.held)
            return ServingStats(
                **counts.counts(),
                state=self._inbox.state,
                waiting=self._inbox.waiting,
                running=0 if leader is None else len(leader.running),
                kv_tokens=held,
                kv_capacity={
                    "device": self._first.kv.tokens,
                    "host": self._settings.host_kv_tokens,
                    "disk": 0 if self._folder is None else self._first.kv.on_disk(self._settings.store_gb),
                },
                kv_bytes={tier: tokens * self._first.kv.token_bytes for tier, tokens in held.items()},
                memory_bytes=self._memory,
                ttft_s=list(counts.ttft_s),
                token_s=list(counts.token_s),
            )

    def documents(self) -> list[Document]:
        """Prefixes that are kept, the last used first, a hundred at most."""
        with self._changing:
            if self._leader is None:
                return []
            now = time.time()
            leaves = heapq.nlargest(MOST_DOCUMENTS, self._leader.tree.leaves(), key=lambda node: node.used_at)
            return [leaf.document(now) for leaf in leaves]

    # Of all ranks

    @without_autograd
    def run(self) -> None:
        """Serve until drained. A MegaKVError if a rank is lost, after every request was told so."""
        self._comm.watch.on_loss = lambda reason: self._abandon(MegaKVError(reason))
        try:
            self._begin()
            while not self._step():
                pass
            if self._folder is not None:
                self._folder.close()
        except BaseException as error:
            if not isinstance(error, MegaKVError):
                self._comm.watch.desert(error)
            self._abandon(error)
            if isinstance(error, SystemExit):
                # The process was not done: it must not end as if it had been.
                raise MegaKVError(f"something called sys.exit({error.code!r}) while requests were served") from error
            raise
        finally:
            self._comm.watch.on_loss = None
            self._inbox.enter("ended")
            self._tell()

    def _begin(self) -> None:
        """Make the tree, with what takes its requests."""
        if self._comm.mesh.rank != 0:
            return
        tree, times = self._tree(), self._first.times
        scheduler = Scheduler(self._settings, times, most_mixed=times.few)
        with self._changing:
            self._leader = Leader(
                self._settings,
                tree,
                scheduler,
                capacity=self._first.kv.tokens,
                copies=self._first.kv.copies,
                joins=self._engine.joins,
                keeps=self._engine.gives_spans,
                cuts_compressed=self._engine.cuts_compressed,
                sides=self._engine.sides,
                is_here=self._store.is_here,
                held=self._worker.held,
            )
        self._inbox.enter("serving")

    def _tree(self) -> PrefixTree:
        """The tree, with what an earlier server left on disk."""
        host, folder = self._settings.host_kv_tokens, self._folder
        if folder is None:
            return PrefixTree(host)
        tree = PrefixTree(
            host,
            int(self._settings.store_gb * 1e9),
            token_bytes=self._first.kv.token_bytes,
            cp=self._comm.mesh.cp_size,
            describe=folder.describe,
            room=lambda: folder.room * self._comm.mesh.world_size,
        )
        tree.restore(folder.found())
        return tree

    def _step(self) -> bool:
        """One plan and its pass, on every rank; whether it was the last."""
        agreement, leader = self._engine.agreement, self._leader
        try:
            with agreement.call(SURVIVED):
                plan = agreement.decide(self._plan)
                if plan.reports:
                    self._memory = tuple(self._comm.gather_objects(memory_in_use(self._comm.mesh.device)))
                self._carry_out(plan)
        except PeerLostError:
            raise
        except SURVIVED as error:
            self._failures += 1
            logger.warning("a pass failed: %s", error)
            if leader is not None:
                with self._changing:
                    leader.recover(str(error))
            return False
        self._failures = 0
        if plan.error:
            raise MegaKVError(plan.error)
        return plan.ends

    def _carry_out(self, plan: Plan) -> None:
        """A plan's commands and its pass; rank 0 takes what comes of them."""
        began = time.perf_counter()
        unread = self._worker.prepare(plan)
        logits = self._worker.compute(plan)
        if (leader := self._leader) is not None:
            with self._changing:
                leader.absorb(Outcome(time.perf_counter() - began, logits, unread))
                self._inbox.queued = leader.waiting
            self._tell()

    # Of rank 0, by the thread that serves

    def _plan(self) -> Plan:
        """What is next, waited for while there is nothing to do."""
        leader = self._leader
        assert leader is not None
        while True:
            if self._inbox.failure is not None:
                return Plan(error=self._inbox.failure)
            if self._failures >= MOST_FAILURES:
                return Plan(error=f"{self._failures} passes failed one after the other; see what was said of them")
            with self._changing:
                self._take(leader)
                plan = leader.plan()
                self._inbox.queued = leader.waiting
            self._tell()
            now = time.monotonic()
            if plan is not None:
                if now - self._reported_at > REPORT_SECONDS:
                    self._reported_at = now
                    plan = replace(plan, reports=True)
            elif leader.idle and self._inbox.drained:
                plan = Plan(ends=True)
            elif now - self._sent_at > self._comm.mesh.timeout_s / 4:
                # The others would not wait for ever.
                plan = Plan()
            if plan is not None:
                self._sent_at = now
                return plan
            self._inbox.wait(min(LOOK_SECONDS, self._comm.mesh.timeout_s / 8))
            self._comm.watch.check("waiting for requests")

    def _take(self, leader: Leader) -> None:
        requests, cancelled = self._inbox.take()
        for request, submitted in requests:
            try:
                leader.add(request, submitted)
            except (ValueError, TypeError, RuntimeError) as error:
                # It ends by itself, and leaves those of others alone.
                request.sink(Finished("error", str(error)))
        for request_id in cancelled:
            leader.cancel(request_id)

    def _abandon(self, error: BaseException) -> None:
        """Tell every request that it ends; also by another thread, while a pass hangs."""
        message = str(error) if isinstance(error, MegaKVError) else "the server failed"
        self._inbox.enter("ended")
        requests, _ = self._inbox.take()
        for request, _ in requests:
            request.sink(Finished("error", message))
        with self._changing:
            if self._leader is not None:
                self._leader.end_all(message)
        self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()

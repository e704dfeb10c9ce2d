"""Rank 0's side of the loop: takes requests, plans what all ranks do next, and hands out what comes of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from megakv.injection.policy import RopeSides
from megakv.serving.admission import Admission
from megakv.serving.answer import NEW_TOKEN, Answer, Outcome, Part, Pass
from megakv.serving.lookups import StreamLookup
from megakv.serving.pass_times import PassSize
from megakv.serving.plan import Await, Crop, Plan
from megakv.serving.prefix_tree import PrefixTree
from megakv.serving.prompt_scores import MOST_ROWS, tell_scores
from megakv.serving.request import Finished, Progress, Request, Token
from megakv.serving.sampler import Sampler, sample
from megakv.serving.scheduler import Scheduler
from megakv.serving.settings import ServingSettings
from megakv.serving.sides import SideTurns
from megakv.serving.stats import Counts
from megakv.serving.turns import Queue

MOST_FAILURES = 2
"""An answer that was part of so many passes that failed ends with the error."""


class Leader:
    """The answers under way, and those that wait.

    `capacity` and `copies` are as of `Admission`; `joins` says whether passes may have several sequences, and `keeps`
    whether prefixes can be kept; `cuts_compressed` whether candidates can be taken back out of compressed caches.
    `is_here` says whether a node that is being read from disk is there, on this rank; `held` how many tokens of a cache
    every context-parallel rank has, by the number that ranks know it by.
    """

    def __init__(
        self,
        settings: ServingSettings,
        tree: PrefixTree,
        scheduler: Scheduler,
        *,
        capacity: int,
        copies: int | None = None,
        joins: bool = True,
        keeps: bool = True,
        cuts_compressed: bool = True,
        sides: RopeSides | None = None,
        is_here: Callable[[int], bool] = lambda node: True,
        held: Callable[[int], tuple[int, ...]] = lambda number: (),
    ):
        self.tree, self.counts = tree, Counts()
        self._joins, self._keeps, self._held, self._cuts_compressed = joins, keeps, held, cuts_compressed
        self._most_looked_up, self._sides = settings.prompt_lookup, SideTurns(sides)
        self._scheduler, self._is_here, self._arrivals = scheduler, is_here, itertools.count()
        self._admission = Admission(settings, tree, self.counts, capacity=capacity, copies=copies)
        self._by_id: dict[str, Answer] = {}
        # Of those whose passes have no other, who has not had one since the last of all others.
        self._alone: list[Answer] = []
        self._pass: Pass | None = None
        self._reset = False

    # What comes in

    def add(self, request: Request, submitted: float) -> None:
        """A request begins to wait."""
        whole = request.compresses or request.prompt_logprobs is not None
        alone, kept = whole or not self._joins, self._keeps and not whole
        sampler, arrival = Sampler.of(request), next(self._arrivals)
        answer = Answer(request, arrival, submitted, self.tree.root, sampler, self._sides.sides, alone, kept)
        most = self._most_looked_up if request.prompt_lookup is None else request.prompt_lookup
        if (most := min(most, self._most_looked_up)) and (self._cuts_compressed or not request.compresses):
            answer.lookup = StreamLookup(most)
        self._by_id[request.id] = answer
        self._admission.shares.enter(answer)
        self._admission.queue.add(answer)
        if answer.most > self._admission.capacity:
            wanted = f"prompt and output need {answer.most} tokens but kv_tokens = {self._admission.capacity}"
            self._end(answer, Finished("error", f"{wanted}: ask for less, or start the server with more"))

    def cancel(self, request_id: str) -> None:
        """A request ends, if it has not yet."""
        if (answer := self._by_id.get(request_id)) is not None:
            self._end(answer, Finished("cancelled"))

    @property
    def running(self) -> list[Answer]:
        """Those that were let in."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """How many were not."""
        return len(self._admission.queue)

    @property
    def idle(self) -> bool:
        """Whether no request is there."""
        return not self.running and not self.waiting

    # What is to be done

    def plan(self) -> Plan | None:
        """What all ranks do next; None if there is nothing to do."""
        now, self._pass = time.time(), None
        self._admission.admit(now)
        for answer in self.running:
            if answer.state == "reading":
                self._admission.advance(answer, now)
        plan = self._next_pass()
        return plan if plan.commands or plan.sequences or plan.reset else None

    def _next_pass(self) -> Plan:
        if (alone := self._next_alone()) is not None:
            return self._planned_alone(alone)
        together = self._sides.next([answer for answer in self.running if not answer.alone])
        decoding = [answer for answer in together if answer.state == "decoding"]
        size = PassSize(sequences=len(decoding), context=sum(answer.cached for answer in decoding))
        readers = self._admission.readers(together)
        choice = self._scheduler.next([self._admission.reader(answer) for answer in readers], size)
        chosen = self._decoded(decoding, size, proposes=not readers)
        if not choice.decodes:
            size, chosen = PassSize(), []
        for answer, new in zip(readers, choice.chunks, strict=True):
            if new:
                chosen.append(Part(answer, new))
                size = size.with_prompt(answer.cached, new)
        self._alone = [answer for answer in self.running if answer.alone]
        if not chosen and (alone := self._next_alone()) is not None:
            return self._planned_alone(alone)
        return self._made(chosen, size)

    def _decoded(self, answers: list[Answer], size: PassSize, *, proposes: bool) -> list[Part]:
        """A token of each, with candidates where those are of use."""
        if not (proposes and answers):
            return [Part(answer, 1) for answer in answers]
        candidates = self._scheduler.proposals.of(answers, size)
        return [Part(answer, 1, own) for answer, own in zip(answers, candidates, strict=True)]

    def _next_alone(self) -> Answer | None:
        """Whose turn it is of those whose passes have no other."""
        while self._alone:
            if (answer := self._alone.pop(0)) in self.running and answer.state != "loading":
                return answer
        return None

    def _planned_alone(self, answer: Answer) -> Plan:
        """A pass of one. Where it is compressed its prompt ends with a pass, and then come single tokens, whether they
        are known or not.
        """
        read, end = answer.cached, len(answer.request.prompt if answer.request.compresses else answer.tokens)
        if answer.state == "decoding" or read >= end:
            step = PassSize(sequences=1, context=read)
            parts = self._decoded([answer], step, proposes=answer.state == "decoding" and answer.left == 1)
            # Compressed ones take other times than those that passes are planned by.
            return self._made(parts, PassSize() if self._joins else step)
        reader = replace(self._admission.reader(answer), left=min(end - read, answer.run))
        new = self._scheduler.chunk(reader, others=len(self.running) > 1)
        if answer.scores:
            new = min(new, MOST_ROWS)
            return self._made([Part(answer, new, scored=new - 1)], PassSize())
        return self._made([Part(answer, new)], PassSize().with_prompt(read, new))

    def _made(self, chosen: list[Part], size: PassSize) -> Plan:
        """The plan of a pass, with what becomes of prefixes."""
        proposed = 0
        for index, part in enumerate(chosen):
            part.row = index + proposed + part.scored
            proposed += len(part.candidates) + part.scored
        if proposed and size != PassSize():
            size = replace(size, candidates=proposed)
        coming = list(self.tree.loading.values())
        # Where there is nothing else to do, what is being read is waited for.
        awaited = coming if not chosen else [node for node in coming if self._is_here(node.id)]
        commands = self.tree.commands
        self.tree.commands = []
        if awaited:
            commands.append(Await(tuple(node.id for node in awaited)))
        self._pass = Pass(chosen, size, awaited)
        tokens = tuple((*part.answer.tokens[part.answer.cached :][: part.new], *part.candidates) for part in chosen)
        candidates = tuple(len(part.candidates) + part.scored for part in chosen) if proposed else ()
        reset, self._reset = self._reset, False
        numbers = tuple(part.answer.number for part in chosen)
        longest = chosen[0].answer.side if chosen else 0
        return Plan(tuple(commands), numbers, tokens, candidates, longest, reset)

    # What came of it

    def absorb(self, outcome: Outcome) -> None:
        """Take what a plan came to."""
        if (done := self._pass) is None:
            return
        now, self._pass = time.time(), None
        for node in done.awaited:
            self.tree.loaded(node, node.id not in outcome.unread)
        if done.awaited:
            self._admission.go_on(now)
        if done.parts:
            self._absorb_pass(done, outcome, now)

    def _absorb_pass(self, done: Pass, outcome: Outcome, now: float) -> None:
        self.counts.passes += 1
        if done.size != PassSize():
            reading = done.size.prompt_tokens > 0 or any(answer.state == "reading" for answer in self.running)
            self._scheduler.measured(done.size, outcome.seconds, reading=reading)
        asked: list[Part] = []
        for part in done.parts:
            answer, new = part.answer, part.new
            answer.cached += new
            self.counts.proposed_tokens += len(part.candidates)
            self._admission.shares.serve(answer, new if answer.state == "reading" else NEW_TOKEN * new)
            if answer.state == "reading":
                self._admission.keep(answer, now)
                self.counts.computed_tokens += new
                if not answer.new:
                    ranks = self._held(answer.number)
                    answer.request.sink(Progress(answer.hits, answer.cached, len(answer.tokens), ranks))
            if answer.scores and outcome.logits is not None:
                tell_scores(part, outcome.logits)
                answer.alone = answer.scores or answer.request.compresses or not self._joins
            if not answer.left and answer.new == answer.request.max_new_tokens:
                self._end(answer, Finished("length"))
            elif not answer.left:
                asked.append(part)
        while asked:
            # Once for the next token of each, and again for those whose candidate has come true.
            logits, rows = outcome.logits, [part.row for part in asked]
            assert logits is not None
            # Logits of many streams are megabytes.
            asked = self._hand_out(asked, logits if len(rows) == len(logits) else logits[rows])

    def _hand_out(self, parts: Sequence[Part], logits: Tensor) -> list[Part]:
        """Give out the next token of each; those come back that have one more after it."""
        answers = [part.answer for part in parts]
        tokens = sample(logits, [answer.sampler for answer in answers], [answer.tokens for answer in answers])
        return [part for part, token in zip(parts, tokens, strict=True) if self._goes_on(part, token)]

    def _goes_on(self, part: Part, token: Token | None) -> bool:
        """Give out a token; whether it is the candidate, so that what follows it is known, too."""
        answer = part.answer
        if token is None:
            self._end(answer, Finished("error", answer.sampler.problem))
            return False
        self._tell(answer, token, time.monotonic())
        if not part.candidates:
            return False
        if token.id == part.candidates.pop(0):
            # None is one that ends the answer.
            part.row += 1
            answer.cached += 1
            self.counts.accepted_tokens += 1
            self._admission.shares.serve(answer, NEW_TOKEN)
            return True
        if answer.request.id in self._by_id:
            self.tree.commands.append(Crop(answer.number, answer.cached))
        return False

    def _tell(self, answer: Answer, token: Token, now: float) -> None:
        if answer.token_at is None:
            self.counts.ttft_s.append(now - answer.submitted)
        else:
            self.counts.token_s.append(now - answer.token_at)
        answer.token_at, answer.state = now, "decoding"
        if leaves := self._sides.leaves(answer):
            # What it has is of this side.
            self._admission.keep(answer, time.time())
        answer.tokens.append(token.id)
        self.counts.new_tokens += 1
        answer.request.sink(token)
        if token.id in answer.request.stop_ids:
            self._end(answer, Finished("stop"))
        elif answer.new == answer.request.max_new_tokens:
            self._end(answer, Finished("length"))
        elif leaves:
            self._admission.restart(answer)

    def _end(self, answer: Answer, finished: Finished) -> None:
        if answer.state == "waiting":
            self._admission.queue.remove(answer)
        else:
            self._admission.leave(answer)
        self._finish(answer, finished)

    def _finish(self, answer: Answer, finished: Finished) -> None:
        del self._by_id[answer.request.id]
        self._admission.shares.leave(answer)
        self.counts.requests += 1
        self.counts.cancelled += finished.why == "cancelled"
        self.counts.failed += finished.why == "error"
        self.counts.compressed += answer.request.compresses
        answer.request.sink(finished)

    # Failures

    def recover(self, message: str) -> None:
        """A plan failed: nothing that is in memory counts any more. Answers begin anew, unless those that were part of
        it have tried that.
        """
        self.tree.forget_memory()
        part = [] if self._pass is None else [each.answer for each in self._pass.parts]
        self._reset, again = True, self.running
        self._admission.running, self._pass, self._alone = [], None, []
        for answer in reversed(again):
            answer.wait(self.tree.root)
            answer.failures += not part or answer in part
            if answer.failures >= MOST_FAILURES:
                self._finish(answer, Finished("error", message))
            else:
                self._admission.queue.add(answer, first=True)

    def end_all(self, message: str) -> None:
        """Every request ends with an error; nothing follows, nor does what the pass under way comes to."""
        for answer in [*self.running, *self._admission.queue]:
            self._finish(answer, Finished("error", message))
        self._admission.running, self._admission.queue = [], Queue(self._admission.shares)
        self._pass, self._alone = None, []

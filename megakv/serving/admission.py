"""The answers that run and those that wait: who is let in, what they find in the tree, and what they leave there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from megakv.serving.answer import Answer
from megakv.serving.plan import Attach, Close
from megakv.serving.prefix_tree import PrefixTree
from megakv.serving.request import Progress
from megakv.serving.settings import ServingSettings
from megakv.serving.stats import Counts
from megakv.serving.turns import Queue, Reader, Shares, turns


class Admission:
    """Lets answers in by turns, as far as there is room for their keys and values.

    `capacity` are the tokens that device memory has space for, of which what is kept takes a part; or, where there is
    space for so many `copies` of them, those of caches alone.
    """

    def __init__(
        self,
        settings: ServingSettings,
        tree: PrefixTree,
        counts: Counts,
        *,
        capacity: int,
        copies: int | None,
    ):
        self.shares = Shares()
        self.queue: Queue[Answer] = Queue(self.shares)
        self.running: list[Answer] = []
        self.tree, self.counts, self.capacity, self._copies = tree, counts, capacity, copies
        self._settings = settings
        self._numbers = itertools.count(1)

    def admit(self, now: float) -> None:
        """Those whose turn it is begin to run."""
        self._let_in(now)
        self.counts.waiting_max = max(self.counts.waiting_max, len(self.queue))

    def _let_in(self, now: float) -> None:
        while (answer := self.queue.head(self.running)) is not None:
            if not self._fits(answer) and not self._make_space(answer):
                return
            self.queue.remove(answer)
            self.running.append(answer)
            self.counts.running_max = max(self.counts.running_max, len(self.running))
            answer.number, answer.state = next(self._numbers), "reading"
            compresses = answer.request.compresses
            prompt = len(answer.request.prompt if compresses else answer.tokens)
            self.tree.commands.append(Attach(answer.number, (), prompt, compresses))
            self.advance(answer, now)
            if not (answer.new or answer.counted):
                answer.counted = True
                self.counts.prompt_tokens += len(answer.request.prompt)
                answer.request.sink(Progress(answer.hits, answer.cached, len(answer.tokens)))
            self.tree.shrink(self.capacity - self._reserved if self._copies is None else self._copies)

    @property
    def _reserved(self) -> int:
        """Tokens that running answers may come to, beside what the tree has of them."""
        return sum(answer.most - answer.node.end for answer in self.running)

    def _fits(self, answer: Answer) -> bool:
        if len(self.running) >= self._settings.max_sequences:
            return False
        if self._copies is not None:
            return sum(other.most for other in self.running) + answer.most <= self.capacity
        path, matched = self.tree.match(answer.reusable)
        used = 0
        for node in path:
            used += min(len(node.tokens), matched - used) if node.uses else 0
        return self.tree.used_tokens + self._reserved + answer.most - used <= self.capacity

    def _make_space(self, answer: Answer) -> bool:
        """Let those of lower priority wait again, the latest first; what they have computed is kept."""
        others = [other for other in self.running if other.priority < answer.priority]
        for other in sorted(others, key=lambda each: (each.priority, -each.arrival)):
            self.leave(other)
            other.wait(self.tree.root)
            self.queue.add(other, first=True)
            self.counts.preempted += 1
            if self._fits(answer):
                return True
        return False

    def advance(self, answer: Answer, now: float) -> None:
        """Take over what the tree has of the tokens that come next."""
        if not answer.kept:
            return
        if answer.node.end == answer.cached:
            last = min(len(answer.tokens) - 1, answer.common)
            path = self.tree.take(answer.ids(answer.cached, last), answer.node, now)
            answer.node = path[-1] if path else answer.node
        if answer.node.end <= answer.cached:
            return
        nodes = [node for node in answer.node.path() if node.end > answer.cached]
        if self.tree.fetch(nodes):
            answer.state = "loading"
            return
        self.tree.commands.append(Attach(answer.number, tuple(node.id for node in nodes)))
        found = answer.node.end - answer.cached
        answer.state, answer.cached = "reading", answer.node.end
        answer.hits += found
        self.counts.hit_tokens += 0 if answer.new else found

    def readers(self, answers: Sequence[Answer]) -> list[Answer]:
        """Those whose prompts go on, but for those that another one is about to read the same tokens for."""
        reading = [answer for answer in answers if answer.state == "reading"]
        ahead: dict[int, list[Answer]] = {}
        found = []
        for at in turns([self.reader(answer) for answer in reading]):
            answer = reading[at]
            others = ahead.setdefault(answer.node.id, [])
            if not any(answer.shares(other) for other in others):
                others.append(answer)
                found.append(answer)
        return found

    def reader(self, answer: Answer) -> Reader:
        """One of them as the scheduler sees it."""
        return answer.reader(self.shares.of(answer))

    def go_on(self, now: float) -> None:
        """Those that waited for what was read from disk."""
        for answer in self.running:
            if answer.state != "loading":
                continue
            if not self.tree.has(answer.node):
                self.tree.release(answer.node, now)
                path = self.tree.take(answer.ids(0, answer.cached), self.tree.root, now)
                answer.node, answer.state = path[-1] if path else self.tree.root, "reading"
            elif not any(node.loading for node in answer.node.path()):
                self.advance(answer, now)

    def keep(self, answer: Answer, now: float) -> None:
        """What its cache has becomes part of the tree."""
        last = min(answer.cached, answer.common)
        if not answer.kept or last < answer.node.end:
            return
        tokens = answer.ids(answer.node.end, last)
        path = self.tree.insert(answer.node, tokens, now, sequence=answer.number)
        answer.node = path[-1] if path else answer.node

    def restart(self, answer: Answer) -> None:
        """An answer gives its cache back, and is read again from its beginning: another side follows."""
        self.leave(answer)
        answer.wait(self.tree.root)
        self.queue.add(answer, first=True)

    def leave(self, answer: Answer) -> None:
        """An answer gives its cache back, of which everything is kept."""
        now = time.time()
        if answer.node.end < answer.cached:
            self.keep(answer, now)
        self.tree.release(answer.node, now)
        self.tree.commands.append(Close(answer.number))
        self.running.remove(answer)

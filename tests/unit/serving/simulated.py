"""Ranks that follow plans without a model: their caches hold tokens, and time is what a formula says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megakv.serving.answer import Outcome
from megakv.serving.leader import Leader
from megakv.serving.pass_times import PassTimes
from megakv.serving.plan import Attach, Await, Close, Crop, Drop, Erase, Keep, Load, Move, Plan, Split, Write
from megakv.serving.prefix_tree import PrefixTree
from megakv.serving.request import Event, Finished, Progress, Request, Sampling, Scored, Token
from megakv.serving.scheduler import Scheduler
from megakv.serving.settings import ServingSettings

VOCABULARY = 97
GREEDY = Sampling(temperature=0)


def next_token(tokens: Sequence[int], quotes: int = 0) -> int:
    """What comes behind some tokens: any of them changes it; but for one in ten, what came so many tokens before."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=4).digest()
    if 0 < quotes <= len(tokens) and digest[1] % 10:
        return tokens[-quotes]
    return digest[0] % VOCABULARY


def answer_alone(prompt: Sequence[int], new: int, quotes: int = 0) -> list[int]:
    """What a model that nobody else asks would say."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens, quotes))
    return tokens[len(prompt) :]


@dataclass
class Machine:
    """Seconds of a pass, as real ones take them: some for each, and some for what is in it."""

    each: float = 0.02
    token: float = 0.002
    pair: float = 2e-7
    sequence: float = 0.002
    context: float = 1e-7

    def seconds(self, pasts: Sequence[int], new: Sequence[int], decodes: Sequence[bool]) -> float:
        total = self.each
        for past, count, alone in zip(pasts, new, decodes, strict=True):
            pairs = count * (past + count / 2)
            if alone:
                total += self.sequence * (1 + (count - 1) / 4) + self.context * past
            else:
                total += self.token * count + self.pair * pairs
        return total


@dataclass
class Stream:
    """What a request was told, and when."""

    prompt: tuple[int, ...]
    new: int
    submitted: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    scores: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


class Simulation:
    """A leader, and ranks that do as it says; with `copies`, caches share no memory with what is kept, nor passes."""

    def __init__(
        self,
        settings: ServingSettings,
        *,
        machine: Machine | None = None,
        disk: int = 0,
        copies: int | None = None,
        most_mixed: float = math.inf,
        quotes: int = 0,
    ):
        self.now, self._quotes = 0.0, quotes
        self.machine = machine or Machine()
        self.tree = PrefixTree(settings.host_kv_tokens, disk, token_bytes=1)
        scheduler = Scheduler(settings, PassTimes(most_mixed), most_mixed=most_mixed)
        capacity = settings.kv_tokens or 1 << 40
        self._room, self._copies = capacity, copies
        space: dict[str, Any] = {"capacity": capacity, "copies": copies, "joins": copies is None}
        self.leader = Leader(settings, self.tree, scheduler, **space)
        self._turns: dict[int, int] = {}
        self.streams: dict[str, Stream] = {}
        self.caches: dict[int, tuple[int, ...]] = {}
        self.spans: dict[int, tuple[int, ...]] = {}
        self.files: dict[str, tuple[int, ...]] = {}
        self.computed = 0
        self.breaks: list[str] = []
        """Files that cannot be read any more."""

    def submit(self, name: str, prompt: Sequence[int], new: int, **options: Any) -> Stream:
        stream = self.streams[name] = Stream(tuple(prompt), new, self.now)

        def sink(event: Event) -> None:
            assert stream.finished is None
            match event:
                case Token(id):
                    stream.tokens.append(id)
                    stream.times.append(self.now)
                case Progress():
                    stream.progress.append(event)
                case Scored(told):
                    assert not stream.tokens
                    stream.scores += told
                case Finished():
                    stream.finished = event

        self.leader.add(Request(name, tuple(prompt), new, sink, **{"sampling": GREEDY, **options}), 0.0)
        return stream

    def step(self, *, fails: bool = False) -> bool:
        """One plan; whether there was one."""
        plan = self.leader.plan()
        if plan is None:
            return False
        if fails:
            self._prepare(plan)
            self.leader.recover("it failed")
            return True
        self._carry_out(plan)
        return True

    def _carry_out(self, plan: Plan) -> None:
        unread = self._prepare(plan)
        assert self._copies is None or sum(map(len, self.caches.values())) <= self._room
        began, logits = self.now, self._compute(plan)
        self.leader.absorb(Outcome(self.now - began, logits, unread))

    def run(self) -> None:
        """Until everything is answered."""
        for _ in range(1_000_000):
            if not self.step():
                assert self.leader.idle
                return
        raise AssertionError("it does not end")

    def _prepare(self, plan: Plan) -> dict[int, str]:
        unread: dict[int, str] = {}
        if plan.reset:
            self.caches.clear()
            self._turns.clear()
            self.spans.clear()
        for command in plan.commands:
            match command:
                case Split(node, head, at):
                    self.spans[head], self.spans[node] = self.spans[node][:at], self.spans[node][at:]
                case Keep(node, sequence, first, last):
                    self.spans[node] = self.caches[sequence][first:last]
                    assert len(self.spans[node]) == last - first
                case Write(node, key):
                    self.files[key] = self.spans[node]
                case Attach(sequence, nodes, prompt, compresses):
                    if compresses:
                        self._turns[sequence] = prompt
                    assert not nodes or sequence not in self._turns
                    held = self.caches.get(sequence, ())
                    self.caches[sequence] = held + tuple(token for node in nodes for token in self.spans[node])
                case Close(sequence):
                    del self.caches[sequence]
                    self._turns.pop(sequence, None)
                case Crop(sequence, count):
                    assert count < len(self.caches[sequence])
                    self.caches[sequence] = self.caches[sequence][:count]
                case Drop(node):
                    # What could not be read, behind other such, is gone already.
                    self.spans.pop(node, None)
                case Load(node, part):
                    self.spans[node] = self.files[part.key][part.first : part.last]
                    if part.key in self.breaks:
                        unread[node] = "it is broken"
                case Erase(key):
                    del self.files[key]
                case Move() | Await():
                    pass
        for node in unread:
            self.spans.pop(node, None)
        return unread

    def _compute(self, plan: Plan) -> torch.Tensor | None:
        if not plan.sequences:
            return None
        candidates = plan.candidates or [0] * len(plan.sequences)
        logits = torch.zeros(sum(candidates) + len(candidates), VOCABULARY)
        pasts = [len(self.caches[sequence]) for sequence in plan.sequences]
        if alone := self._turns.keys() & set(plan.sequences):
            # Compressed at the end of its prompt, and nowhere else: then single tokens follow.
            (_,), (new,), turn = plan.sequences, map(len, plan.tokens), self._turns[alone.pop()]
            assert pasts[0] + new <= turn or (pasts[0] >= turn and new == 1 + candidates[0])
        row = 0
        assert self.leader._pass is not None
        for sequence, tokens, count, part in zip(
            plan.sequences, plan.tokens, candidates, self.leader._pass.parts, strict=True
        ):
            assert list(self.caches[sequence]) == part.answer.tokens[: part.answer.cached]
            self.caches[sequence] += tokens
            assert self._copies is None or len(plan.sequences) == 1
            for behind in range(count, -1, -1):
                known = self.caches[sequence][: len(self.caches[sequence]) - behind]
                logits[row, next_token(known, self._quotes)] = 1.0
                row += 1
        counts = [len(tokens) for tokens in plan.tokens]
        decodes = [part.answer.state == "decoding" for part in self.leader._pass.parts]
        self.now += self.machine.seconds(pasts, counts, decodes)
        return logits

    def check_answers(self) -> None:
        """Those that were not cancelled are as they are alone."""
        for name, stream in self.streams.items():
            assert stream.finished is not None, name
            expected = answer_alone(stream.prompt, stream.new, self._quotes)
            if stream.finished.why == "length":
                assert stream.tokens == expected, name
            else:
                assert stream.tokens == expected[: len(stream.tokens)], name

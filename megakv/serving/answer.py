"""One answer under way: its tokens, how many are in its cache, where in the tree it is, and its part of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from megakv.injection.policy import RopeSides
from megakv.serving.lookups import StreamLookup
from megakv.serving.pass_times import PassSize
from megakv.serving.prefix_node import BEYOND, Node, Tokens
from megakv.serving.prefix_node import common as alike
from megakv.serving.request import Request
from megakv.serving.sampler import Sampler
from megakv.serving.turns import Reader, Served

LEAST_SHARED = 16
"""So many tokens that another prompt is about to read are waited for, rather than read twice."""
NEW_TOKEN = 2
"""Tokens of a prompt that a token of an answer counts as: it takes a pass."""
EXPECTED_TOKENS = 256
"""Tokens that an answer is expected to have still, at most: its limit is often far beyond its end."""


@dataclass(eq=False)
class Answer:
    """What rank 0 knows of a request.

    Of its `tokens`, the prompt's and then its own, the first `cached` are in its cache, and those up to the end of
    `node` are kept in the tree. It waits, then `loading` what is on disk, `reading` what is not cached and `decoding`.
    """

    request: Request
    arrival: int
    submitted: float
    node: Node
    sampler: Sampler
    sides: RopeSides | None
    """Those of the model, where a pass is of one side of its original length."""
    alone: bool = False
    """Whether its passes have no other sequence."""
    kept: bool = True
    """Whether its cache is of use to others, and theirs to it."""
    tokens: list[int] = field(default_factory=list)
    state: Literal["waiting", "loading", "reading", "decoding"] = "waiting"
    number: int = 0
    """By which ranks know its cache; another one each time that it is admitted."""
    cached: int = 0
    hits: int = 0
    failures: int = 0
    counted: bool = False
    """Whether its prompt is part of what was counted, and its client knows that it runs."""
    scored: int = 1
    """Tokens of the prompt whose log probabilities were told, where they are wanted: the first one has none."""
    token_at: float | None = None
    lookup: StreamLookup | None = None
    """None where its next tokens are not looked up."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def scores(self) -> bool:
        """Whether log probabilities of its prompt's tokens are still to be told."""
        return self.request.prompt_logprobs is not None and self.scored < len(self.request.prompt)

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def user(self) -> str:
        return self.request.user

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def new(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def most(self) -> int:
        """Tokens that it may come to."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def proposable(self) -> int:
        """Candidates for its next tokens at most: behind them comes one more."""
        return self.most - len(self.tokens) - 1

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        return self.request.stop_ids

    @property
    def left(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def ahead(self) -> int:
        """Tokens that it will be served still, as far as can be said."""
        return self.left + NEW_TOKEN * min(self.request.max_new_tokens - self.new, EXPECTED_TOKENS)

    @property
    def side(self) -> int:
        """The side of the original length on which its next token is computed, as `RopeSides.of` has it.

        A prompt is on one side as a whole; then every token is of the length that it makes.
        """
        if self.sides is None:
            return 0
        return self.sides.of(
            len(self.tokens) if self.sides.restarts else max(len(self.request.prompt), self.cached + 1)
        )

    @property
    def began(self) -> int:
        """The side of its first tokens."""
        return self.side if self.sides is None or self.sides.restarts else self.sides.of(len(self.request.prompt))

    @property
    def run(self) -> int:
        """Its next tokens that are on the same side, and can be computed in one pass."""
        if self.sides is None or self.sides.restarts:
            return self.left
        end, prompt = len(self.tokens), len(self.request.prompt)
        if not self.side:
            end = min(end, self.sides.original)
        elif self.sides.exact:
            end = max(prompt, self.cached + 1)
        return end - self.cached

    @property
    def common(self) -> int:
        """Of its first tokens, those with keys that others, on the side on which it began, have too."""
        if not self.kept or self.sides is None or self.sides.restarts:
            return len(self.tokens) if self.kept else 0
        if not self.began:
            return self.sides.original
        return 0 if self.sides.exact else len(self.tokens)

    @property
    def reusable(self) -> Tokens:
        """What it could find of its tokens in the tree: the last one has to be computed, for what comes next."""
        return self.ids(0, min(len(self.tokens) - 1, self.common))

    def ids(self, first: int, last: int) -> Tokens:
        """Some of its tokens, as the tree has them: beyond the original length they are others."""
        ids = np.array(self.tokens[first:last], dtype=np.int32)
        return ids | BEYOND if self.began else ids

    def reader(self, served: Served) -> Reader:
        """As the scheduler sees it, where its key and its user were served so much lately."""
        return Reader(self.priority, self.user, self.arrival, self.cached, self.run, self.key, served)

    def shares(self, other: Answer) -> bool:
        """Whether it and another one that is at the same node go on alike, for long enough to wait for it."""
        least = min(LEAST_SHARED, self.left - 1)
        first = self.ids(self.cached, self.cached + least)
        return least > 0 and alike(first, other.ids(other.cached, other.cached + least)) >= least

    def wait(self, root: Node) -> None:
        """It has no cache any more."""
        self.state, self.node, self.cached, self.hits, self.number = "waiting", root, 0, 0, 0


@dataclass
class Part:
    """An answer in a pass: so many of its tokens, and candidates for those that follow."""

    answer: Answer
    new: int
    candidates: list[int] = field(default_factory=list)
    scored: int = 0
    """So many rows of logits before that of its last token are wanted, too."""
    row: int = 0
    """Of the logits behind its last token, or behind the last candidate that has come true."""


@dataclass
class Outcome:
    """What came of a plan, on rank 0."""

    seconds: float
    logits: Tensor | None = None
    unread: dict[int, str] = field(default_factory=dict)
    """Nodes that could not be read from disk by some rank."""


@dataclass
class Pass:
    """What a plan computes."""

    parts: list[Part]
    size: PassSize
    awaited: list[Node]

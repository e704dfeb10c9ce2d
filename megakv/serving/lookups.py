"""Which tokens of streams are proposed before they are drawn: looked up in each stream's own, as far as that pays.

What a candidate is worth are the tokens that it adds to a pass, and what it costs the time that it adds, as measured.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Protocol

from megakv.engine.lookup import TokenLookup
from megakv.serving.pass_times import PassSize, PassTimes

PRIORS = (0.1, 0.2, 0.5, 0.75, 0.9)
"""How often what is looked up comes true before anything is known of a stream: behind 1, 2, 4, 8 and 16 tokens that
were found again."""
WEIGHT = 2.0
"""Tokens that a prior counts as."""
DECAY = 0.9
"""What a stream's earlier tokens count for with each that comes: about the last ten hold."""
LEAST_GAIN = 1.02
"""Times as many tokens in a second as without, for which a pass has candidates."""
SURE = 0.75
PROBE = 32
"""Of so many passes that might have had candidates as good as sure, one has: what they cost may have been measured on
a busy machine."""
ASK = 16
"""Passes of as many streams between two looks at how long they take."""
STREAMS = 8
"""With each so many streams more, one token more comes between two looks at a stream where nothing is found."""


class StreamLookup:
    """What is looked up in one stream's tokens, and how often it came true."""

    def __init__(self, most: int):
        self.most = most
        self.tokens = TokenLookup(most)
        self._right, self._seen = [0.0] * len(PRIORS), [0.0] * len(PRIORS)

    def add(self, tokens: Sequence[int]) -> None:
        """More tokens of it have come."""
        matched = self.tokens.matched
        right, missed = self.tokens.add(tokens)
        for number in range(right + missed):
            kind = _kind(matched + number)
            self._right[kind] = DECAY * self._right[kind] + (number < right)
            self._seen[kind] = DECAY * self._seen[kind] + 1.0

    def chances(self, count: int) -> list[float]:
        """Of so many candidates, how likely each is right together with all before it."""
        kinds = (_kind(self.tokens.matched + number) for number in range(count))
        each = ((self._right[at] + WEIGHT * PRIORS[at]) / (self._seen[at] + WEIGHT) for at in kinds)
        return list(accumulate(each, lambda before, own: before * own))


def _kind(matched: int) -> int:
    """Which of the priors are for a guess behind so many tokens."""
    return min(matched.bit_length(), len(PRIORS)) - 1


class Stream(Protocol):
    """What is looked at of an answer under way; `lookup` is None where nothing is looked up in its tokens."""

    tokens: list[int]
    lookup: StreamLookup | None

    @property
    def proposable(self) -> int:
        """Candidates that it may have at most."""

    @property
    def stop_ids(self) -> Collection[int]:
        """Tokens behind which nothing comes."""


class Proposals:
    """Candidates of the streams of a pass, by the times of passes so far."""

    def __init__(self, times: PassTimes):
        self._times, self._refused = times, 0
        # Of passes of so many streams, without candidates, with one and with two; to be asked for again.
        self._seconds: tuple[int, list[float]] = (0, [])
        self._asked = 0

    def of(self, streams: Sequence[Stream], size: PassSize) -> list[list[int]]:
        """Those of each stream in a pass that has no prompts: so many in all as give the most tokens in a second."""
        none: list[list[int]] = [[] for _ in streams]
        if all(stream.lookup is None for stream in streams):
            return none
        count, probes = len(streams), self._refused >= PROBE
        without_s, one_s, two_s = self._costs(size)
        least = LEAST_GAIN * count / without_s
        if (count + 1) / one_s < least and not probes:
            # Not even one that is sure is worth it.
            self._refused += 1
            return none
        self._refused = 0
        guesses = [_guess(stream, 1 + count // STREAMS) for stream in streams]
        # The likeliest come first, and none before those of its stream that it follows.
        order = heapq.merge(
            *(
                [(-chance, at) for chance in stream.lookup.chances(len(guess))]
                for at, (stream, guess) in enumerate(zip(streams, guesses, strict=True))
                if stream.lookup is not None and guess
            )
        )
        most = self._times.trusted_candidates
        if count < self._times.few:
            # Beyond, layers take another way.
            most = int(min(most, self._times.few - count))
        expected, taken, chosen = float(count), 0, list[int]()
        for number, (chance, at) in enumerate(islice(order, most), 1):
            expected -= chance
            chosen.append(at)
            rate = expected / (one_s + (number - 1) * (two_s - one_s))
            if rate > least or (probes and -chance >= SURE):
                least, taken = max(rate, least), number
        if taken and one_s <= without_s:
            # None was measured yet: this one is.
            self._asked = 0
        widths = Counter(chosen[:taken])
        return [guess[: widths[at]] for at, guess in enumerate(guesses)]

    def _costs(self, size: PassSize) -> list[float]:
        """What such a pass takes without candidates, with one and with two: asked for now and then, as what is learned
        of passes takes some time to be worked out.
        """
        if self._seconds[0] != size.sequences or self._asked % ASK == 0:
            found = [max(self._times.seconds(replace(size, candidates=count)), 1e-9) for count in range(3)]
            self._seconds, self._asked = (size.sequences, found), 0
        self._asked += 1
        return self._seconds[1]


def _guess(stream: Stream, every: int) -> list[int]:
    """What may come next of a stream; where little was found, it is looked at for so many new tokens at a time."""
    if stream.lookup is None:
        return []
    found = stream.lookup.tokens
    new = len(stream.tokens) - found.length
    if found.matched <= 1 and 0 < new < every:
        return []
    stream.lookup.add(stream.tokens[found.length :])
    return found.guess(min(stream.proposable, stream.lookup.most), stream.stop_ids)

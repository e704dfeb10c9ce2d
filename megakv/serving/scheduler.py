"""What the next pass computes, and how much of each prompt it reads, so that nobody's stream stalls.

Prompts are read in chunks that take no longer than the gap that is allowed between two tokens of a stream (chunked
prefill). Each token of all streams comes in the same pass, or, where both together take longer, in a pass behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megakv.serving.lookups import Proposals
from megakv.serving.pass_times import PassSize, PassTimes
from megakv.serving.settings import ServingSettings
from megakv.serving.turns import Reader, allot, turns

LEAST_CHUNK = 16
"""New prompt tokens that a pass has in any case, however long it takes."""
GAP_SHARE = 0.95
"""Part of the gap that a pass is planned to take: planning and handing out tokens take some, too."""
ALONE_GAPS = 4
"""Gaps that a pass of prompts alone takes at most, where nobody has a stream: whoever comes waits for its end."""
NEAR = 1.1
"""A shorter one is taken where each token takes no more than so many times as long in it."""


@dataclass(frozen=True)
class Choice:
    """The next pass: how many new tokens of each prompt, and whether a token of each stream."""

    chunks: list[int]
    decodes: bool = True


class Scheduler:
    """How large the next pass is, for the settings and the times of passes so far.

    `most_mixed` are the tokens that a pass of prompts and streams has at most. `proposals` are candidates for streams'
    next tokens, in passes without prompts.
    """

    def __init__(self, settings: ServingSettings, times: PassTimes, *, most_mixed: float = math.inf):
        self._settings, self._times, self._most_mixed = settings, times, most_mixed
        self.proposals = Proposals(times)
        # Seconds that decoding is behind its share.
        self._owed = 0.0
        # Streams wait for the end of a pass of prompts alone.
        self._waits = False

    def measured(self, size: PassSize, seconds: float, *, reading: bool) -> None:
        """A pass took so long; `reading` says whether a prompt was to be read at that time."""
        if size.sequences and reading:
            # It advanced every stream by a token, for which decoding alone takes so long; one too many is made up for.
            alone = seconds
            if size.prompt_tokens:
                alone = self._times.seconds(PassSize(sequences=size.sequences, context=size.context)) or seconds
            self._owed = max(-alone, self._owed + self._settings.decode_share * seconds - alone)
        elif self._waits:
            self._owed += self._settings.decode_share * seconds
        else:
            self._owed = 0.0
        self._times.add(size, seconds)

    def next(self, readers: Sequence[Reader], decoding: PassSize) -> Choice:
        """The next pass, given what of it would decode."""
        waited, self._waits = self._waits, False
        if not readers:
            return Choice([])
        order = turns(readers)
        if not decoding.sequences:
            # Nobody waited.
            self._owed = 0.0
            return Choice(self._alone(readers, order))
        if waited or self._owed > 0:
            return Choice([0] * len(readers))
        choice = self._beside(readers, order, decoding)
        self._waits = not choice.decodes
        return choice

    def _alone(self, readers: Sequence[Reader], order: Sequence[int]) -> list[int]:
        """What is read where nobody has a stream: within a gap, unless prompts are read sooner in longer passes."""
        short, long = (self._chunks(readers, order, PassSize(), gaps * self._gap) for gaps in (1, ALONE_GAPS))

        def each_s(chunks: Sequence[int]) -> float:
            return self._times.seconds(_size(PassSize(), readers, chunks)) / sum(chunks)

        return short if each_s(short) <= NEAR * each_s(long) else long

    def _beside(self, readers: Sequence[Reader], order: Sequence[int], decoding: PassSize) -> Choice:
        """What is read beside a token of each stream within the gap: in the same pass, where that reads it sooner."""
        share, step = self._settings.decode_share, self._times.seconds(decoding)

        def seconds(choice: Choice) -> float:
            """Of the pass, and of the streams' that follows it."""
            own = self._times.seconds(_size(decoding if choice.decodes else PassSize(), readers, choice.chunks))
            return own if choice.decodes else own + step

        def each_s(choice: Choice) -> float:
            """For each token of prompts, with what decoding is owed for them."""
            own = seconds(choice)
            return (own + max(share * own - step, 0.0) / (1 - share)) / sum(choice.chunks)

        choices = [Choice(self._chunks(readers, order, PassSize(), self._gap - step), decodes=False)]
        if (most := self._most_mixed - decoding.sequences) >= 1:
            choices.append(Choice(self._chunks(readers, order, decoding, self._gap, most)))
        if min(map(seconds, choices)) > self._gap:
            # Two passes may take too long where one does not, be it slower for its size.
            choices.append(Choice(self._chunks(readers, order, decoding, self._gap)))
        return min(choices, key=each_s)

    def chunk(self, reader: Reader, *, others: bool) -> int:
        """How much of its prompt one reads in a pass of its own: within a gap, if there are `others`."""
        seconds = self._gap if others else math.inf
        return self._chunks([reader], [0], PassSize(), seconds)[0]

    @property
    def _gap(self) -> float:
        """Seconds that are planned for a pass of prompts and streams."""
        return self._settings.max_gap_s * GAP_SHARE / self._times.margin

    def _chunks(
        self,
        readers: Sequence[Reader],
        order: Sequence[int],
        decoding: PassSize,
        seconds: float,
        most: float = math.inf,
    ) -> list[int]:
        """As many tokens of prompts, at most so many, as fit into so many seconds beside what decodes."""
        left = sum(reader.left for reader in readers)
        limit = int(min(self._settings.chunk_tokens, self._times.trusted_prompt, left, most))

        def fits(total: int) -> bool:
            return self._times.seconds(_size(decoding, readers, allot(readers, order, total))) <= seconds

        return allot(readers, order, _largest(min(LEAST_CHUNK, limit), limit, fits))


def _size(decoding: PassSize, readers: Sequence[Reader], chunks: Sequence[int]) -> PassSize:
    size = decoding
    for reader, new in zip(readers, chunks, strict=True):
        size = size.with_prompt(reader.past, new)
    return size


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, and `least` in any case."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low

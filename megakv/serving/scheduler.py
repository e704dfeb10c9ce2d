"""What the next pass computes, and how much of each prompt it reads, so that nobody's stream stalls.

Where little of prompts is left, it is read beside one token of each stream, within the gap that is allowed. More is
read in as short passes, shared with streams, where those are about as fast for each token of it; else in long chunks
without streams: such a pass pauses in its layers, where streams have their tokens, and newcomers their first chunks, in
passes of their own (layered prefill), unless what the pass reads would wait longer in all than they.
Where decoding is to keep a share of the time, a pause has as many of them as that takes. Prompts and streams do not
share a pass that takes longer than one of each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megakv.serving.pass_times import PassSize, PassTimes
from megakv.serving.settings import ServingSettings
from megakv.serving.slices import Slices
from megakv.serving.turns import Reader, allot, is_due, turns

LEAST_CHUNK = 16
"""New prompt tokens that a pass has in any case, however long it takes."""
GAP_SHARE = 0.95
"""Part of the gap that a pass is planned to take: planning and handing out tokens take some, too."""
CHOICES = 32
"""Of how many numbers of tokens the best is taken, for parts of layers to fill the time between pauses."""
LATEST = 3
"""Passes with pauses that say by how much the next one will exceed what is predicted: each has more behind it."""
MOST_EXCESS = 2.0
"""How much that is at most."""
LEAST_SLICE = 0.25
"""Part of the gap for which a pass goes on between two pauses in any case, however long the streams' tokens take."""
LEAST_GAIN = 1.15
"""How many times as long short passes take for a prompt that began with them before one that pauses takes their place:
that is predicted less well."""


@dataclass(frozen=True)
class Choice:
    """The next pass: how many new tokens of each prompt, and whether a token of each stream."""

    chunks: list[int]
    decodes: bool = True
    stops: int | None = None
    """As of `megakv.serving.plan.Plan`."""


class Scheduler:
    """How large the next pass is, for the settings, the layers of the model, and the times of passes so far.

    `most_mixed` are the tokens that a pass of prompts and streams has at most.
    """

    def __init__(self, settings: ServingSettings, times: PassTimes, layers: int = 1, *, most_mixed: float = math.inf):
        self._settings, self._times, self._layers, self._most_mixed = settings, times, layers, most_mixed
        # Seconds that decoding is behind its share.
        self._owed = 0.0
        # Of passes that pause: how far to the next one, by how much the latest ones exceeded what was predicted, and
        # what has had its turn in this pause.
        self._slices, self._ahead = Slices(layers), 1
        self._exceeds: deque[float] = deque(maxlen=LATEST)
        self._decoded = self._read = False
        # Of whom it reads how much.
        self._paused: list[tuple[Reader, int]] = []
        # Seconds that streams have waited when it ended, since its last pause.
        self._waited_s = 0.0
        # Streams wait for the end of a short pass of prompts alone.
        self._due = self._waits = False
        # Of which prompt most was left, by its arrival, and whether short passes were best for it at first.
        self._first_way = (-1, False)
        # Those prompts had their turn that end within a gap, before all others.
        self._ended = False

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

    def measured_with_pauses(self, size: PassSize, seconds: float, *, last: float) -> None:
        """A pass that paused has ended: seconds without its pauses, and of them those behind the last one."""
        if expected := self._times.seconds(size):
            # One that took far longer, as on a machine that was busy, says nothing of the next one.
            self._exceeds.append(min(seconds / expected, MOST_EXCESS))
        self._times.add(size, seconds)
        self._owed += self._settings.decode_share * last
        self._waited_s += last

    def next(self, readers: Sequence[Reader], decoding: PassSize) -> Choice:
        """The next pass, given what of it would decode."""
        due, self._due, self._waits = self._due, False, False
        waited_s, self._waited_s = self._waited_s, 0.0
        if not decoding.sequences:
            # Nobody waited.
            self._owed = waited_s = 0.0
        if not readers:
            return Choice([])
        first = Choice([0] * len(readers))
        if decoding.sequences and (due or self._owed > 0):
            return first
        order = turns(readers)
        least = self._short(readers, order, decoding)
        slice_s, exceeds = self._slice(decoding), max(self._exceeds, default=1.0)
        planned_s = slice_s / exceeds
        most = self._chunks(readers, order, PassSize(), self._layers * planned_s)
        if sum(most) <= sum(least):
            return first if waited_s else self._beside(least, decoding)
        ending = [new if new == reader.left else 0 for reader, new in zip(readers, least, strict=True)]
        if any(ending) and not self._ended:
            self._ended = not waited_s
            return first if waited_s else self._beside(ending, decoding)
        self._ended = False
        chunks = self._filling(readers, order, sum(most), slice_s, decoding)
        if decoding.sequences and self._mixes(least, decoding):
            short_s = self._short_s(readers, least, decoding)
            paused_s = self._paused_s(readers, chunks, decoding)
            longest = max(readers, key=lambda reader: reader.left).arrival
            if self._first_way[0] != longest:
                self._first_way = longest, short_s < paused_s
            if short_s < paused_s * (LEAST_GAIN if self._first_way[1] else 1.0):
                return first if waited_s else self._beside(least, decoding)
        seconds = self._times.seconds(_size(PassSize(), readers, chunks))
        stops = self._slices.begin(sum(chunks), seconds * exceeds, slice_s - waited_s)
        if stops is None and waited_s:
            return first
        self._waited_s = waited_s
        self._paused = [(reader, new) for reader, new in zip(readers, chunks, strict=True) if new]
        return Choice(chunks, decodes=False, stops=stops or 0)

    def within(self, readers: Sequence[Reader], decoding: PassSize, parts: Sequence[float] | None) -> Choice:
        """The next pass within one that pauses: streams come first, then prompts once, then the rest of what decoding
        is owed.

        `parts` are how long the pass went on from stop to stop before this pause, with the first call in each.
        """
        self._waits = False
        if parts is not None:
            self._decoded, self._read, self._waited_s = False, False, 0.0
            self._slices.went(parts)
            self._ahead = self._slices.ahead(self._slice(decoding))
            self._owed = self._owed + self._settings.decode_share * sum(parts) if decoding.sequences else 0.0
        chunks = self._short(readers, turns(readers), decoding) if readers and not self._read else []
        reads = bool(chunks) and self._comes_first(readers, chunks)
        if decoding.sequences and (not self._decoded or (self._owed > 0 and not reads)):
            self._decoded = True
            behind = (1 - self._settings.decode_share) * self._times.seconds(decoding) < self._owed
            return Choice([0] * len(readers), stops=None if reads or behind else self._ahead)
        if reads:
            self._read = True
            if decoding.sequences and not self._mixes(chunks, decoding):
                # Their tokens come behind it.
                self._decoded, self._waits = False, True
                return Choice(chunks, decodes=False)
            return Choice(chunks, stops=None if self._settings.decode_share else self._ahead)
        return Choice([0] * len(readers), decodes=False, stops=self._ahead)

    def _comes_first(self, readers: Sequence[Reader], chunks: Sequence[int]) -> bool:
        """Whether these are read before the pass under way goes on: in their turn, or for less waiting in all."""
        new = [(reader, count) for reader, count in zip(readers, chunks, strict=True) if count]
        mine, theirs = (max(reader.priority for reader, _ in some) for some in (new, self._paused))
        if mine > theirs or (
            mine == theirs and any(is_due(reader, self._paused) for reader, _ in new if reader.priority == mine)
        ):
            return True
        # A part of a prompt is worth as much of its first token.
        ended, held_up = (sum(count / reader.left for reader, count in some) for some in (new, self._paused))
        return ended * self._slices.left_s > held_up * self._times.seconds(_size(PassSize(), readers, chunks))

    def _short(self, readers: Sequence[Reader], order: Sequence[int], decoding: PassSize) -> list[int]:
        """What is read beside a token of each stream within the gap: in the same pass, where that reads it sooner."""
        if not decoding.sequences:
            return self._chunks(readers, order, decoding, self._gap)
        choices = [self._chunks(readers, order, PassSize(), self._gap - self._times.seconds(decoding))]
        if (most := self._most_mixed - decoding.sequences) >= 1:
            choices.append(self._chunks(readers, order, decoding, self._gap, most))
        return min(choices, key=lambda chunks: self._short_s(readers, chunks, decoding))

    def _short_s(self, readers: Sequence[Reader], chunks: Sequence[int], decoding: PassSize) -> float:
        """Seconds for each token of prompts that are read beside a token of each stream."""
        if self._mixes(chunks, decoding):
            seconds = self._times.seconds(_size(decoding, readers, chunks))
        else:
            seconds = self._times.seconds(_size(PassSize(), readers, chunks)) + self._times.seconds(decoding)
        return self._with_share(seconds, 1, decoding) / sum(chunks)

    def _paused_s(self, readers: Sequence[Reader], chunks: Sequence[int], decoding: PassSize) -> float:
        """The same, of those that are read in a pass that pauses for streams."""
        seconds = self._times.seconds(_size(PassSize(), readers, chunks)) * max(self._exceeds, default=1.0)
        pauses = self._slices.pauses(sum(chunks), seconds, self._slice(decoding))
        return self._with_share(seconds + pauses * self._times.seconds(decoding), pauses, decoding) / sum(chunks)

    def _with_share(self, seconds: float, steps: float, decoding: PassSize) -> float:
        """With what decoding is owed for them, given so many tokens of each stream meanwhile."""
        share = self._settings.decode_share
        return seconds + max(share * seconds - steps * self._times.seconds(decoding), 0.0) / (1 - share)

    def _beside(self, chunks: list[int], decoding: PassSize) -> Choice:
        """Chunks, and a token of each stream: in one pass, or in the next one."""
        self._due = self._waits = decoding.sequences > 0 and not self._mixes(chunks, decoding)
        return Choice(chunks, decodes=not self._due)

    def _mixes(self, chunks: Sequence[int], decoding: PassSize) -> bool:
        return sum(chunks) + decoding.sequences <= self._most_mixed

    def chunk(self, reader: Reader, *, others: bool) -> int:
        """How much of its prompt one reads in a pass of its own: within a gap, if there are `others`."""
        seconds = self._gap if others else math.inf
        return self._chunks([reader], [0], PassSize(), seconds)[0]

    def _filling(
        self, readers: Sequence[Reader], order: Sequence[int], most: int, slice_s: float, decoding: PassSize
    ) -> list[int]:
        """What a pass that pauses reads, at most so many tokens, for all to be read soonest.

        Whole parts of layers fill the time between pauses more or less well, by how many tokens they are of. Fewer may
        make for fewer pauses; but whatever it reads, each further pass takes some time.
        """
        left = sum(reader.left for reader in readers)
        if not decoding.sequences:
            # As many in every pass.
            return allot(readers, order, math.ceil(left / math.ceil(left / most)))
        pause_s, exceeds = self._times.seconds(decoding), max(self._exceeds, default=1.0)
        start_s = max(2 * self._times.seconds(PassSize(most)) - self._times.seconds(PassSize(2 * most)), 0.0)

        def wasted(tokens: int) -> float:
            """Seconds in which nothing is read, if all is read in passes of so many tokens."""
            size = _size(PassSize(), readers, allot(readers, order, tokens))
            pauses = self._slices.pauses(tokens, self._times.seconds(size) * exceeds, slice_s)
            return math.ceil(left / tokens) * start_s + left / tokens * pauses * pause_s

        choices = {max(most * part // CHOICES, LEAST_CHUNK) for part in range(CHOICES // 4, CHOICES + 1)}
        return allot(readers, order, min(choices, key=wasted))

    def _slice(self, decoding: PassSize) -> float:
        """Seconds from one pause to the next that leave time for a token of each stream."""
        gap = self._settings.max_gap_s * GAP_SHARE
        return max(gap - (self._times.seconds(decoding) if decoding.sequences else 0.0), LEAST_SLICE * gap)

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

"""Places that a pass takes in all layers at once hold what each store would, whatever else is asked of caches."""

import ctypes
import random
from collections.abc import Sequence

import numpy as np
import torch

from megakv.attention.compiled import RowTables
from megakv.cache.cache import ShardedCache
from megakv.cache.joined import JoinedCache
from megakv.distributed.layouts import balanced, replicated
from megakv.distributed.sharding import Layout, new_tokens

LAYERS, HEADS, DIM = 3, 2, 5
Rows = list[torch.Tensor]
"""Of a layer's sequence, each ``[2, K, D]``."""


def new_rows(count: int) -> list[Rows]:
    return [[torch.randn(2, HEADS, DIM) for _ in range(count)] for _ in range(LAYERS)]


def floats(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


class Lying:
    """Rows where tables say that they lie."""

    def __init__(self, tables: RowTables):
        def whole(address: int, count: int) -> list[int]:
            return list((ctypes.c_int64 * count).from_address(address))

        self.rows = list[list[list[list[np.ndarray]]]]()
        for sequences, bounds_at, first_at, runs_at, runs in tables.stepped.tolist():
            bounds, words = whole(bounds_at, sequences + 1), np.array(whole(runs_at, 9 * runs)).reshape(-1, 9)
            assert bounds[-1] == runs and len(whole(first_at, sequences)) == sequences
            self.rows.append([self._of(words[a:b].tolist()) for a, b in zip(bounds, bounds[1:], strict=False)])

    @staticmethod
    def _of(words: list[list[int]]) -> list[list[np.ndarray]]:
        """For each row its keys and values, ``[K, D]`` views."""
        found = []
        for k, v, tokens, k_head, k_step, v_head, v_step, k_size, v_size in words:
            for head, step, size in ((k_head, k_step, k_size), (v_head, v_step, v_size)):
                assert not tokens or (HEADS - 1) * head + (tokens - 1) * step + DIM <= size
            for row in range(tokens):
                places = ((k + 4 * row * k_step, k_head), (v + 4 * row * v_step, v_head))
                found.append([[floats(at + 4 * head * each, DIM) for head in range(HEADS)] for at, each in places])
        return found

    def fill(self, sequence: int, rows: list[Rows]) -> None:
        for layer, own in enumerate(rows):
            for places, row in zip(self.rows[layer][sequence][-len(own) :] if own else [], own, strict=True):
                for kind, heads in enumerate(places):
                    for head, place in enumerate(heads):
                        place[:] = row[kind, head].numpy()

    def check(self, sequence: int, plain: list[Rows]) -> None:
        for layer, own in enumerate(plain):
            found = [np.array(places) for places in self.rows[layer][sequence]]
            assert len(found) == len(own) and all(map(np.array_equal, found, own))


class Checked:
    """A cache of one sequence, and what it must hold."""

    def __init__(self, size: int, rank: int):
        self.cache = ShardedCache(LAYERS, size=size, rank=rank)
        self.cache.forgets = False
        self.plain: list[Rows] = [[] for _ in range(LAYERS)]
        self.slots: list[int] = []
        """Those of the rows."""

    def check(self) -> None:
        for layer in range(LAYERS):
            store = self.cache.store(layer)
            assert not self.plain[0] or store.rows(0) == len(self.plain[layer])
            pairs = store.runs(0) if self.plain[0] else []
            found = [row for k, v in pairs for row in torch.stack([k, v]).unbind(2)]
            assert len(found) == len(self.plain[layer]) and all(map(torch.equal, found, self.plain[layer]))

    def twin(self) -> "Checked":
        twin = Checked(self.cache.size, self.cache.rank)
        twin.cache, twin.plain, twin.slots = self.cache.fork(), [list(own) for own in self.plain], list(self.slots)
        return twin

    def cut(self, slots: int) -> None:
        self.cache.cut_back(slots)
        self.slots = [slot for slot in self.slots if slot < slots]
        self.plain = [own[: len(self.slots)] for own in self.plain]


def step(chosen: Sequence[Checked], counts: Sequence[int], *, fails: bool) -> None:
    """A pass over so many new tokens of each, of which every rank knows all."""
    lengths = [each.cache.length for each in chosen]
    joint = JoinedCache([each.cache for each in chosen])
    mask = np.arange(max(counts)) < np.array(counts)[:, None]
    positions = np.array(lengths)[:, None] + np.arange(max(counts))
    new, size, rank = new_tokens(mask, positions, np.array(lengths)), joint.size, joint.rank
    held = joint.table.counts()
    layout: Layout = replicated(new, size, held) if size > 1 else balanced(new, 1)
    joint.begin(layout, len(chosen))
    kept = layout.stored[rank]
    stored = np.diff(kept.bounds).tolist()
    like = torch.empty(HEADS, 1, DIM)
    tables = joint.places(stored, (like, like))
    assert tables is not None
    lying = Lying(tables)
    for sequence, each in enumerate(chosen):
        rows = new_rows(stored[sequence])
        lying.fill(sequence, rows)
        lying.check(sequence, [[*own, *more] for own, more in zip(each.plain, rows, strict=True)])
        if not fails:
            for own, more in zip(each.plain, rows, strict=True):
                own += more
            each.slots += kept.slot[kept.run(sequence)].tolist()
    if fails:
        joint.undo()
    else:
        joint.commit(0)
    assert [each.cache.length for each in chosen] == [
        length + (0 if fails else count) for length, count in zip(lengths, counts, strict=True)
    ]


def test_sequences_that_come_and_go_share_rows_and_fail() -> None:
    for size in (1, 1, 2, 3):
        rank = random.randrange(size)
        every = [Checked(size, rank) for _ in range(random.randint(1, 9))]
        for _ in range(60):
            chosen = random.sample(every, random.randint(1, len(every)))
            single = random.random() < 0.8
            counts = [1 if single else random.randint(1, 30) for _ in chosen]
            step(chosen, counts, fails=random.random() < 0.1)
            one, length = chosen[0], chosen[0].cache.length
            match random.choice(["nothing"] * 8 + ["join", "fork", "end", "cut", "span", "look", "expect"]):
                case "join":
                    every.append(Checked(size, rank))
                case "fork":
                    every.append(one.twin())
                case "end" if len(every) > 1:
                    every.remove(one)
                    one.cache.reset()
                case "cut":
                    one.cut(random.randint(max(0, length - 9), length))
                case "span" if length:
                    other, last = Checked(size, rank), random.randint(1, length)
                    other.cache.append_span(one.cache.span(0, last))
                    other.slots = [slot for slot in one.slots if slot < last]
                    other.plain = [own[: len(other.slots)] for own in one.plain]
                    every.append(other)
                case "look":
                    one.check()
                case "expect":
                    one.cache.preallocate([length + random.randint(0, 40) for _ in range(LAYERS)])
            del every[12:]
        for each in every:
            each.check()


def test_a_step_asks_no_store_while_there_are_places() -> None:
    one = Checked(1, 0)
    step([one], [20], fails=False)
    asked = list[int]()
    before = ShardedCache.store

    class Watched(ShardedCache):
        def store(self, layer: int):
            asked.append(layer)
            return before(self, layer)

    one.cache.__class__ = Watched
    for _ in range(64):
        step([one], [1], fails=False)
    assert len(asked) <= 4 * LAYERS
    one.check()


def test_rows_of_another_type_are_for_the_stores() -> None:
    one = Checked(1, 0)
    step([one], [3], fails=False)
    like = torch.empty(HEADS, 1, DIM, dtype=torch.bfloat16)
    assert one.cache.places([1], (like, like)) is None
    one.check()

"""Tables of a prompt that is spread over ranks, against each token's definition."""

import ctypes

import numpy as np
import pytest

from megakv.attention.spread import SpreadRows
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import TokenBlock, TokenTable


def drawn(rng: np.random.Generator, starts: list[int], batch: int) -> TokenBlock:
    """New tokens, perhaps none, of each sequence behind what it has."""
    counts = rng.integers(0, 40, batch)
    counts[0] += 8
    sequence = np.repeat(np.arange(batch), counts)
    slot = np.concatenate([starts[b] + np.sort(rng.choice(60, counts[b], replace=False)) for b in range(batch)])
    return TokenBlock(sequence, slot.astype(np.int64), slot.astype(np.int64), batch)


def numbers(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(ctypes.c_int64)), (count,))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("seed", range(4))
def test_each_row_sees_the_keys_up_to_its_own(seed: int, window: int | None, ranks: int) -> None:
    rng, batch = np.random.default_rng(seed), 1 + seed % 3
    table = TokenTable(ranks, batch)
    for turn in range(2):
        layout = balanced(drawn(rng, [60 * turn] * batch, batch), ranks, table.counts() if turn else None)
        table.extend(layout)
    held = table.tokens() if window is None else table.tokens_since(layout.first_slots - window + 1)
    for rank in range(ranks):
        tokens, given = layout.tokens[rank], table.counts()[rank]
        rows = SpreadRows(tokens, held, rank, given, window)
        sequences, counts, count, before, pieces, length, bounds, low, high, own = numbers(rows.address, 10)
        assert (sequences, count, own) == (batch, ranks * batch, len(tokens))
        assert rows.rows == max(map(len, held))
        sent = numbers(counts, count).reshape(ranks, batch)
        assert (numbers(before, batch) + sent[rank] == given).all()
        parts, bounds = numbers(pieces, 3 * length).reshape(length, 3), numbers(bounds, batch + 1)
        for at, (sequence, slot) in enumerate(zip(tokens.sequence, tokens.slot, strict=True)):
            slots = [
                held[source].slot[held[source].run(sequence)][first : first + several]
                for source, first, several in parts[bounds[sequence] : bounds[sequence + 1]]
            ]
            seen = np.concatenate(slots)[numbers(low, own)[at] : numbers(high, own)[at]]
            every = np.sort(np.concatenate([block.slot[block.run(sequence)] for block in held]))
            expected = every[(every <= slot) & (every > slot - (window or 1000))]
            assert seen.tolist() == expected.tolist()

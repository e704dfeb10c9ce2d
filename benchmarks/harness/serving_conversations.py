"""Traces of conversations in the format of Mooncake's: a line for each request, with ids of its prompt's blocks.

What is generated has the published statistics of Mooncake's conversation trace (FAST '25): 12,035 prompt
tokens in the mean, 85,401 at the 99th percentile, 36.6% of them shared with earlier prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

BLOCK = 512
"""Tokens of a block."""
GOES_ON = 0.375
"""Share of requests that go on a conversation. This and what follows is fitted to the published statistics."""
FIRST, LATER = (8.4, 1.2), (8.0, 1.1)
"""Mean and deviation of the logarithm of the length of a first turn, and of what a later one adds."""
SYSTEM = 500
"""Tokens with which all conversations begin."""
OPEN = 30
"""Conversations that may go on."""
OUTPUT = (5.5, 0.8)


@dataclass(frozen=True)
class TraceRequest:
    """So many tokens, of which each `block` tokens have an id: equal ones are equal, and follow equal ones."""

    length: int
    output: int
    blocks: tuple[int, ...]


def read_trace(path: Path, count: int) -> list[TraceRequest]:
    """The first requests of a JSONL with `input_length`, `output_length` and `hash_ids`."""
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(islice(file, count), 1):
            try:
                values: dict[str, Any] = json.loads(line)
                length, output = int(values["input_length"]), int(values["output_length"])
                blocks = tuple(int(block) for block in values["hash_ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"--trace {path}: line {number} is none of Mooncake's: {error!r}") from error
            found.append(TraceRequest(length, output, blocks))
    return found


def generated(count: int, seed: int) -> list[TraceRequest]:
    """Conversations that begin alike and go on in turns."""
    return list(islice(_requests(Random(seed)), count))


def _requests(random: Random) -> Iterator[TraceRequest]:
    conversations: list[TraceRequest] = []
    blocks = SYSTEM // BLOCK + 1
    while True:
        before = random.randrange(len(conversations)) if conversations and random.random() < GOES_ON else None
        earlier = TraceRequest(0, 0, (0,)) if before is None else conversations[before]
        length = max(1, earlier.length + int(random.lognormvariate(*(FIRST if before is None else LATER))))
        # The last block of before was not full: its id is another one now. All begin with the system's.
        kept = earlier.blocks[: max(1, earlier.length // BLOCK)]
        more = range(blocks, blocks + max(0, -(-length // BLOCK) - len(kept)))
        blocks += len(more)
        request = TraceRequest(length, max(1, int(random.lognormvariate(*OUTPUT))), (*kept, *more))
        if before is None:
            conversations.append(request)
            conversations = conversations[-OPEN:]
        else:
            conversations[before] = request
        yield request

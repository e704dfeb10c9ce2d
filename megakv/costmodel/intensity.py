"""How much attention a rank computes while a message comes: all that `auto` needs of a machine without a profile."""

from __future__ import annotations

import time

import numpy as np
import torch

from megakv.attention.partial import KVPart, PackedAttention, Scoring
from megakv.distributed.comm import Communicator
from megakv.distributed.sharding import TokenBlock

HEADS, QUERIES, KEYS, DIM = 4, 256, 512, 64
"""Of the attention that is timed: a millisecond or a few."""
MESSAGE_BYTES = 1 << 20
TRIALS = 5


def flops_per_byte(comm: Communicator, dtype: torch.dtype) -> float:
    """Operations of attention to numbers of a type in the time that a byte takes to the next context-parallel rank.

    Collective over those ranks; each has its own result.
    """
    q_HLD, k_KSD = (torch.ones((HEADS, rows, DIM), dtype=dtype, device="cpu") for rows in (QUERIES, KEYS))
    slots = np.arange(KEYS)
    block = TokenBlock(np.zeros(QUERIES, dtype=np.int64), slots[-QUERIES:], slots[-QUERIES:], 1)
    send, receive = (torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
    messages, computing = [], []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        comm.shift(send, receive, operation="control", layer=None).wait()
        messages.append(time.perf_counter() - begun)
    for _ in range(TRIALS):
        begun = time.perf_counter()
        attention = PackedAttention(q_HLD, block, Scoring(DIM**-0.5), DIM)
        attention.add(KVPart(0, k_KSD, k_KSD, slots, slots))
        attention.result()
        computing.append(time.perf_counter() - begun)
    # Of keys that come behind a query half are not computed.
    pairs = QUERIES * (KEYS - QUERIES / 2)
    return 4 * DIM * HEADS * pairs / min(computing) / (MESSAGE_BYTES / min(messages))

"""The tokens with the highest scores, over heads and tokens that are spread over ranks, without gathering scores.

The k-th largest of a group's keys is found digit by digit: ranks count how many of their keys have each value of the
next digit, add the counts up, and go on with the keys that share the digits found so far. Keys are 63-bit numbers made
of a token's score, its slot and its head, so no two are equal: scores tie-break by the lower slot, then the lower head,
and exactly k keys are at or above the threshold. The result does not depend on where the tokens and heads are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megakv.base.device import upload
from megakv.distributed.sharding import IntArray
from megakv.fairkv.budgets import HeadBudgets

SLOT_BITS, HEAD_BITS = 24, 8
SLOTS, HEADS = 1 << SLOT_BITS, 1 << HEAD_BITS
KEY_BITS, DIGIT_BITS = 63, 9
DIGITS = 1 << DIGIT_BITS
NOTHING = (1 << KEY_BITS) - 1

AddUp = Callable[[Tensor], Tensor]
"""Sums a tensor of counts over some ranks."""


def ranking_keys(scores_KS: Tensor, slots: Tensor, heads_K: Tensor) -> Tensor:
    """``[K, S]`` numbers that order tokens by score (0 or more; NaN counts as 0), then by lower slot, then head.

    Slots are ``[S]``, or ``[K, S]`` where each head has other tokens.
    """
    scores = scores_KS.float().nan_to_num(0.0, posinf=torch.inf).abs()
    # Floats that are not negative order as their bits do.
    bits = scores.contiguous().view(torch.int32).long()
    key = (bits << SLOT_BITS) + (SLOTS - 1 - slots)
    return (key << HEAD_BITS) + (HEADS - 1 - heads_K)[:, None]


def thresholds(keys: Tensor, groups: Tensor, wanted: Tensor, add_up: AddUp, counted: Tensor | None = None) -> Tensor:
    """``[G]`` for every group the least key that belongs to its `wanted` largest, over all ranks.

    `keys` and `groups` ``[n]`` are this rank's keys and the group of each; `counted` ``[n]`` says which of them there
    are. Where none is wanted the result is above every key; of a group that has fewer all belong to it.
    """
    found = torch.zeros_like(wanted)
    left = wanted
    # Those that share the digits so far. They are marked, not taken out: how many there are, only the device knows.
    alike = torch.ones_like(keys) if counted is None else counted.long()
    for shift in range(KEY_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        digit = (keys >> shift) & (DIGITS - 1)
        counts = keys.new_zeros(len(wanted) * DIGITS).index_add_(0, groups * DIGITS + digit, alike)
        at_least = add_up(counts.view(-1, DIGITS)).flip(1).cumsum(1).flip(1)
        # A group that has fewer keys than wanted gives all it has.
        left = torch.minimum(left, at_least[:, 0])
        choice = (at_least >= left[:, None]).sum(1) - 1
        above = torch.cat([at_least[:, 1:], at_least.new_zeros(len(wanted), 1)], dim=1)
        left = left - above.gather(1, choice[:, None]).squeeze(1)
        found = (found << DIGIT_BITS) + choice
        alike = alike * (digit == choice[groups])
    return torch.where(wanted > 0, found, torch.full_like(found, NOTHING))


def choose(
    scores: Sequence[Tensor],
    slots: Sequence[IntArray],
    budgets: Sequence[HeadBudgets],
    heads: IntArray,
    *,
    counted: IntArray,
    over_tokens: AddUp,
    over_all: AddUp,
    there: Sequence[Tensor] | None = None,
    divided: bool = False,
) -> list[Tensor]:
    """Which tokens of a layer are kept: per sequence ``[K, n]``.

    Scores ``[K, n]`` and slots ``[n]`` are those of this rank's tokens and KV heads; budgets those of all heads of the
    layer. `counted` are local indices of the heads that this rank counts, of its copies only one does. `over_tokens`
    sums counts over the ranks that hold other tokens of the same heads, `over_all` over all ranks.

    Where each head has other tokens, slots are ``[K, n]``, and masks `there` say where there is one. `divided` says
    that ranks which hold the same head have other tokens of it, too.
    """
    device = scores[0].device
    local = upload(heads, device)
    keys = [ranking_keys(score, upload(slot, device), local) for score, slot in zip(scores, slots, strict=True)]
    # Heads are counted by their number on this rank, or in the layer.
    index = local if divided else torch.arange(len(heads), device=device)
    floors = [budget.floors if divided else budget.floors[heads] for budget in budgets]
    count = len(floors[0])
    groups = [index[:, None].expand_as(key) + row * count for row, key in enumerate(keys)]
    least = thresholds(
        torch.cat([key.reshape(-1) for key in keys]),
        torch.cat([group.reshape(-1) for group in groups]),
        upload(np.concatenate(floors), device),
        over_all if divided else over_tokens,
        None if there is None else torch.cat([mask.reshape(-1) for mask in there]),
    ).view(len(keys), count)
    kept = [key >= bound[index, None] for key, bound in zip(keys, least, strict=True)]
    if there is not None:
        kept = [mask & present for mask, present in zip(kept, there, strict=True)]
    pools = [budget.total - int(budget.floors.sum()) for budget in budgets]
    if not any(pools):
        return kept
    own = upload(counted, device)
    rest = [key[own].reshape(-1) for key in keys]
    rows = [torch.full_like(key, row) for row, key in enumerate(rest)]
    free = [~mask for mask in kept] if there is None else [a & ~mask for a, mask in zip(there, kept, strict=True)]
    free_here = torch.cat([mask[own].reshape(-1) for mask in free])
    pooled = thresholds(torch.cat(rest), torch.cat(rows), upload(np.array(pools), device), over_all, free_here)
    return [mask | ((key >= bound) & others) for mask, key, bound, others in zip(kept, keys, pooled, free, strict=True)]

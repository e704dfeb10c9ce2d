"""The paper's Equation 4: the largest load of a rank, summed over all layers, made as small as it can be.

That is what a rank's memory holds, not how long a token takes: ranks meet in every layer, not once per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakv.fairkv.arrangement import arrange, memory_of
from megakv.fairkv.assignment import NODES, TOLERANCE, lower_bound
from megakv.fairkv.copying import Split, map_layer
from megakv.fairkv.layer import LayerMapping
from megakv.fairkv.limits import CopyLimits
from megakv.fairkv.splitting import split_heads

Weights = Sequence[Sequence[float]]

DEEPEST = 512
"""KV heads of all layers up to which they are searched: one call inside the other for each, and more prove nothing."""


@dataclass(frozen=True)
class TotalSolution:
    """Mappings of all layers, the largest total of a rank, and a bound that no mappings are below."""

    mappings: list[LayerMapping]
    largest: float
    bound: float


class _Whole:
    """Heads of all layers on ranks, none copied; every rank has one of each layer or more."""

    def __init__(self, budgets: Weights, tp_size: int):
        self.tp_size = tp_size
        self.items = [(w, layer, head) for layer, row in enumerate(budgets) for head, w in enumerate(row)]
        self.items.sort(key=lambda item: (-item[0], item[1], item[2]))
        self.heads = len(budgets[0])
        self.place = [0] * len(self.items)
        self.bound = lower_bound([item[0] for item in self.items], tp_size, tp_size)
        self.start()

    def start(self) -> None:
        """Nobody has anything."""
        layers = len(self.items) // self.heads
        self.totals = [0.0] * self.tp_size
        self.count = [[0] * self.tp_size for _ in range(layers)]
        self.empty = [self.tp_size] * layers
        self.left = [self.heads] * layers

    def choices(self, index: int) -> list[int]:
        """Ranks that the item may go to, the emptiest first."""
        layer = self.items[index][1]
        ranks = sorted(range(self.tp_size), key=self.totals.__getitem__)
        if self.left[layer] > self.empty[layer]:
            return ranks
        return [rank for rank in ranks if not self.count[layer][rank]]

    def put(self, index: int, rank: int) -> None:
        weight, layer, _ = self.items[index]
        self.place[index] = rank
        self.totals[rank] += weight
        self.empty[layer] -= not self.count[layer][rank]
        self.count[layer][rank] += 1
        self.left[layer] -= 1

    def take(self, index: int, before: float) -> None:
        _, layer, _ = self.items[index]
        rank = self.place[index]
        self.totals[rank] = before
        self.count[layer][rank] -= 1
        self.empty[layer] += not self.count[layer][rank]
        self.left[layer] += 1

    def improve(self) -> None:
        """Move heads off the fullest rank, or exchange them for others, until that helps no more."""
        while True:
            totals = self.totals
            full = max(range(self.tp_size), key=totals.__getitem__)
            best = totals[full] * (1 - TOLERANCE)
            step: tuple[int, int | None, int] | None = None
            mine = [i for i, rank in enumerate(self.place) if rank == full]
            for one in mine:
                weight, layer, _ = self.items[one]
                alone = self.count[layer][full] == 1
                for other, rank in enumerate(self.place):
                    if rank == full:
                        continue
                    second, second_layer, _ = self.items[other]
                    lone = self.count[second_layer][rank] == 1
                    if second_layer != layer and (alone or lone):
                        continue
                    change = weight - second
                    value = max(totals[full] - change, totals[rank] + change)
                    if change > 0 and value < best:
                        best, step = value, (one, other, rank)
                if not alone:
                    for rank in range(self.tp_size):
                        value = max(totals[full] - weight, totals[rank] + weight)
                        if rank != full and weight > 0 and value < best:
                            best, step = value, (one, None, rank)
            if step is None:
                return
            one, partner, rank = step
            self._move(one, full, rank)
            if partner is not None:
                self._move(partner, rank, full)

    def _move(self, index: int, source: int, goal: int) -> None:
        weight, layer, _ = self.items[index]
        self.place[index] = goal
        self.totals[source] -= weight
        self.totals[goal] += weight
        self.count[layer][source] -= 1
        self.count[layer][goal] += 1

    def solve(self, nodes: int) -> tuple[list[int], float, float]:
        """Places, the largest total, and a bound."""
        for index in range(len(self.items)):
            self.put(index, self.choices(index)[0])
        self.improve()
        self.best, self.found = max(self.totals), list(self.place)
        self.nodes, self.limit = 0, nodes
        proven = self.best <= self.bound * (1 + TOLERANCE)
        if not proven and len(self.items) <= DEEPEST:
            self.start()
            self._visit(0)
            proven = self.nodes <= self.limit
        return self.found, self.best, self.best if proven else min(self.bound, self.best)

    def _visit(self, index: int) -> bool:
        """Whether to stop."""
        if index == len(self.items):
            self.best, self.found = max(self.totals), list(self.place)
            return self.best <= self.bound * (1 + TOLERANCE)
        self.nodes += 1
        if self.nodes > self.limit:
            return True
        tried = set()
        for rank in self.choices(index):
            before = self.totals[rank]
            if before + self.items[index][0] >= self.best * (1 - TOLERANCE):
                break
            # Ranks that hold equally many heads of every layer and equally much are the same.
            state = (before, *(row[rank] for row in self.count))
            if state in tried:
                continue
            tried.add(state)
            self.put(index, rank)
            stop = self._visit(index + 1)
            self.take(index, before)
            if stop:
                return True
        return False


def least_total(budgets: Weights, limits: CopyLimits, split: Split = "free", *, nodes: int = NODES) -> TotalSolution:
    """Mappings whose fullest rank, over all layers, has least: Equation 4.

    Without copies exact unless the search is cut off at `nodes`. With copies the better of that and of the layers
    mapped one by one; replicas with free shares then divide what is left between the ranks, in all layers at once.

    Parameters
    ----------
    budgets : [layers][heads]
    limits : CopyLimits
        Checked against the number of heads.
    split : {"free", "even"}
    nodes : int
    """
    size = limits.tp_size
    even_bound = sum(map(sum, budgets)) / size
    found: list[TotalSolution] = []
    if len(budgets[0]) >= size:
        whole = _Whole(budgets, size)
        places, largest, bound = whole.solve(nodes)
        held: list[list[tuple[int, ...]]] = [[()] * len(row) for row in budgets]
        for (_, layer, head), rank in zip(whole.items, places, strict=True):
            held[layer][head] = (rank,)
        mappings = [LayerMapping.even(row) for row in held]
        if not limits.most(len(budgets[0])):
            return TotalSolution(mappings, largest, bound)
        found.append(_copied(mappings, budgets, limits) if split == "free" else TotalSolution(mappings, largest, bound))
    single = arrange([map_layer(row, limits, split, nodes=nodes).mapping for row in budgets], budgets, size)
    if split == "free":
        single = _reshared(single, budgets, size)
    found.append(TotalSolution(single, max(memory_of(single, budgets, size)), even_bound))
    best = min(found, key=lambda solution: solution.largest)
    return TotalSolution(best.mappings, best.largest, min(best.largest, even_bound))


def _reshared(mappings: Sequence[LayerMapping], budgets: Weights, size: int) -> list[LayerMapping]:
    """The same placements, shares chosen over all layers at once."""
    weights = [weight for row in budgets for weight in row]
    _, parts = split_heads(weights, [held for mapping in mappings for held in mapping.ranks], size)
    shared, first = [], 0
    for mapping in mappings:
        shared.append(mapping.with_shares(parts[first : first + len(mapping.ranks)]))
        first += len(mapping.ranks)
    return shared


def _copied(mappings: list[LayerMapping], budgets: Weights, limits: CopyLimits) -> TotalSolution:
    """Copy heads of the fullest rank to the emptiest until all are equal, or the copies are used up."""
    size, mappings = limits.tp_size, list(mappings)
    even_bound = sum(map(sum, budgets)) / size
    while True:
        totals = memory_of(mappings, budgets, size)
        largest = max(totals)
        if largest <= even_bound * (1 + TOLERANCE):
            break
        full, lean = totals.index(largest), totals.index(min(totals))
        gap = min(largest - even_bound, even_bound - totals[lean])
        choice = None
        for layer, (mapping, row) in enumerate(zip(mappings, budgets, strict=True)):
            for head, held in enumerate(mapping.ranks):
                if full not in held or lean in held:
                    continue
                counts = [len(other) + (index == head) for index, other in enumerate(mapping.ranks)]
                room = row[head] * mapping.shares[head][held.index(full)]
                # The one that just suffices: larger ones may be needed for other pairs of ranks.
                rating = (room < gap, room if room >= gap else -room)
                if limits.allow(counts) and room > 0 and (choice is None or rating < choice[0]):
                    choice = (rating, layer, head)
        if choice is None:
            break
        _, layer, head = choice
        ranks = [(*held, lean) if index == head else held for index, held in enumerate(mappings[layer].ranks)]
        trial = list(mappings)
        trial[layer] = LayerMapping.even(ranks)
        trial = _reshared(trial, budgets, size)
        if max(memory_of(trial, budgets, size)) >= largest * (1 - TOLERANCE):
            break
        mappings = trial
    return TotalSolution(mappings, max(memory_of(mappings, budgets, size)), even_bound)

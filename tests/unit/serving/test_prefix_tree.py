"""The tree of prefixes against a dictionary of all prefixes that were ever kept, and what it tells ranks to do."""

import math
import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from megakv.serving.plan import Drop, Erase, Keep, Load, Move, Split, StoredPart, Write
from megakv.serving.prefix_node import FoundPrefix, Node, Tokens, common, walk
from megakv.serving.prefix_tree import PrefixTree

TOKEN_BYTES = 10


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, dtype=np.int32)


@dataclass
class Ranks:
    """What ranks hold that do as they are told: tokens in the place of their keys and values."""

    spans: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    files: dict[str, tuple[int, ...]] = field(default_factory=dict)
    coming: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def follow(self, tree: PrefixTree, caches: dict[int, tuple[int, ...]]) -> None:
        commands, tree.commands = tree.commands, []
        for command in commands:
            match command:
                case Split(node, head, at):
                    held = self.coming if node in self.coming else None
                    if held is not None:
                        held[head], held[node] = held[node][:at], held[node][at:]
                    else:
                        tokens, tier = self.spans[node]
                        self.spans[head], self.spans[node] = (tokens[:at], tier), (tokens[at:], tier)
                case Keep(node, sequence, first, last):
                    self.spans[node] = caches[sequence][first:last], "device"
                    assert len(self.spans[node][0]) == last - first
                case Write(node, key):
                    self.files[key] = self.spans[node][0]
                case Move(node, to_host):
                    tokens, tier = self.spans[node]
                    assert tier == ("device" if to_host else "host")
                    self.spans[node] = tokens, "host" if to_host else "device"
                case Drop(node):
                    assert (self.spans.pop(node, None) is None) != (self.coming.pop(node, None) is None)
                case Load(node, part):
                    self.coming[node] = self.files[part.key][part.first : part.last]
                case Erase(key):
                    del self.files[key]

    def check(self, tree: PrefixTree) -> None:
        """They hold what the tree says they do, no more and no less."""
        nodes = {node.id: node for node in walk(tree.root) if node is not tree.root}
        in_memory = {id: (tuple(node.tokens), node.memory) for id, node in nodes.items() if node.memory is not None}
        assert in_memory == self.spans
        assert {id for id, node in nodes.items() if node.loading} == self.coming.keys() == tree.loading.keys()
        parts = [node.stored for node in nodes.values() if node.stored is not None]
        assert {part.key for part in parts} == self.files.keys()
        for node in nodes.values():
            assert node.memory is not None or node.stored is not None
            if node.stored is not None:
                file = self.files[node.stored.key]
                assert tuple(node.tokens) == file[node.stored.first : node.stored.last]
            assert node.parent is not None and node.end == node.parent.end + len(node.tokens)
            # What is on disk is found there again only if all before it is.
            assert node.stored is None or node.parent is tree.root or node.parent.stored is not None
            assert node.uses <= node.parent.uses or node.parent is tree.root
        held = tree.held
        for tier in ("device", "host"):
            kept = sum(len(node.tokens) for node in nodes.values() if node.memory == tier)
            coming = sum(len(node.tokens) for node in nodes.values() if node.loading) if tier == "device" else 0
            assert held[tier] == kept + coming
        assert held["disk"] == sum(len(node.tokens) for node in nodes.values() if node.stored is not None)
        assert tree.used_tokens == sum(len(node.tokens) for node in nodes.values() if node.uses)


def random_tokens(known: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Few tokens to choose from, and often a beginning of what came before."""
    tail = tuple(random.choices(range(3), k=random.randint(1, 12)))
    if not known or random.random() < 0.2:
        return tail
    before = random.choice(known)
    return before[: random.randint(0, len(before))] + tail


def reference(prefixes: set[tuple[int, ...]], tokens: tuple[int, ...]) -> int:
    """How many of the first tokens any sequence that was kept begins with."""
    return max((n for n in range(len(tokens) + 1) if tokens[:n] in prefixes), default=0)


def test_unbounded_tree_is_a_dictionary_of_all_prefixes() -> None:
    tree, ranks = PrefixTree(), Ranks()
    known: list[tuple[int, ...]] = []
    prefixes: set[tuple[int, ...]] = {()}
    for number in range(400):
        tokens = random_tokens(known)
        path, matched = tree.match(ids(*tokens))
        assert matched == reference(prefixes, tokens)
        path = tree.take(ids(*tokens), tree.root, number)
        at = path[-1] if path else tree.root
        assert at.end == matched
        assert tuple(np.concatenate([tree.root.tokens, *(node.tokens for node in path)])) == tokens[:matched]
        # In chunks, as a prompt is read.
        while at.end < len(tokens):
            chunk = ids(*tokens[at.end : at.end + random.randint(1, 5)])
            at = tree.insert(at, chunk, number, sequence=1)[-1]
        ranks.follow(tree, {1: tokens})
        tree.release(at, number)
        ranks.check(tree)
        known.append(tokens)
        prefixes |= {tokens[:n] for n in range(len(tokens) + 1)}
    assert tree.held["device"] == len(prefixes) - 1


@dataclass
class Running:
    number: int
    tokens: tuple[int, ...]
    node: Node


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("disk", [0, 60, 10_000])
def test_bounded_tree_keeps_its_bounds_and_ranks_follow(host: int, disk: int) -> None:
    limit = 50
    # The disk keeps up, or not, or takes a little.
    room = partial(random.choice, (0, 0, 50, math.inf))
    tree, ranks = PrefixTree(host, disk * TOKEN_BYTES, token_bytes=TOKEN_BYTES, room=room), Ranks()
    running: list[Running] = []
    known: list[tuple[int, ...]] = []
    for number in range(600):
        action = random.random()
        caches = {each.number: each.tokens for each in running}
        if action < 0.5 and len(running) < 4:
            tokens = random_tokens(known)[:20]
            known = [*known[-30:], tokens]
            path = tree.take(ids(*tokens), tree.root, number)
            running.append(Running(number, tokens, path[-1] if path else tree.root))
            caches[number] = tokens
            tree.fetch(path)
        elif action < 0.8 and running:
            each = random.choice(running)
            if tree.has(each.node) and not any(node.loading for node in each.node.path()):
                chunk = ids(*each.tokens[each.node.end : each.node.end + random.randint(1, 9)])
                path = tree.insert(each.node, chunk, number, sequence=each.number)
                each.node = path[-1] if path else each.node
        elif running:
            each = running.pop(random.randrange(len(running)))
            tree.release(each.node, number)
        for node in list(tree.loading.values()):
            if random.random() < 0.5 and node.loading:
                ranks.follow(tree, caches)
                if (success := random.random() < 0.8) and node.id in ranks.coming:
                    ranks.spans[node.id] = ranks.coming.pop(node.id), "device"
                else:
                    ranks.coming.pop(node.id, None)
                tree.loaded(node, success)
        for each in running:
            if not tree.has(each.node):
                tree.release(each.node, number)
                each.node = tree.root
        tree.shrink(limit)
        ranks.follow(tree, caches)
        ranks.check(tree)
        held = tree.held
        # What is being read cannot leave, though the sequence that it is for may have ended.
        coming = sum(len(node.tokens) for node in tree.loading.values() if not node.uses)
        assert held["device"] <= max(limit, tree.used_tokens + coming)
        assert held["host"] <= host
    assert (held["disk"] > 0) == (disk > 0)


def test_least_recently_used_goes_first_and_children_before_parents() -> None:
    tree, ranks = PrefixTree(), Ranks()
    caches = {1: (1, 2, 3, 4, 5, 6), 2: (1, 2, 3, 7, 8, 9)}
    for sequence, tokens in caches.items():
        path = tree.take(ids(*tokens), tree.root, 0)
        at = path[-1] if path else tree.root
        at = tree.insert(at, ids(*tokens[at.end :]), sequence, sequence=sequence)[-1]
        tree.release(at, sequence)
        ranks.follow(tree, caches)
    # The first branch was used last.
    tree.release(tree.take(ids(1, 2, 3, 4, 5, 6), tree.root, 3)[-1], 3)
    tree.shrink(7)
    assert tree.match(ids(1, 2, 3, 7, 8, 9))[1] == 3
    assert tree.match(ids(1, 2, 3, 4, 5, 6))[1] == 6
    tree.shrink(4)
    assert tree.match(ids(1, 2, 3, 4, 5, 6))[1] == 3


def test_used_nodes_stay() -> None:
    tree = PrefixTree()
    at = tree.insert(tree.root, ids(1, 2, 3), 0, sequence=1)[-1]
    tree.shrink(0)
    assert tree.held["device"] == 3
    tree.release(at, 1)
    tree.shrink(0)
    assert tree.held["device"] == 0
    assert not tree.root.children


def test_what_was_on_disk_comes_back() -> None:
    """In any order of branches, cut anywhere, and with a file whose parent is gone."""
    sequences = [tuple(random.choices(range(3), k=random.randint(5, 40))) for _ in range(12)]
    described: dict[str, tuple[Tokens, StoredPart | None]] = {}

    def describe(key: str, tokens: Tokens, behind: StoredPart | None) -> None:
        described[key] = tokens.copy(), behind

    tree, ranks = PrefixTree(0, 1 << 30, token_bytes=TOKEN_BYTES, describe=describe), Ranks()
    for number, tokens in enumerate(sequences):
        path = tree.take(ids(*tokens), tree.root, number)
        at = path[-1] if path else tree.root
        while at.end < len(tokens):
            chunk = ids(*tokens[at.end : at.end + random.randint(1, 9)])
            at = tree.insert(at, chunk, number, sequence=1)[-1]
        tree.release(at, number)
        ranks.follow(tree, {1: tokens})
    found = [
        FoundPrefix(key, tokens, None if behind is None else behind.key, 0 if behind is None else behind.last, 2, 99, 0)
        for key, (tokens, behind) in described.items()
    ]
    orphan = FoundPrefix("f" * 24, ids(1, 1), "e" * 24, 1, 2, 99, 0)
    again = PrefixTree(0, 1 << 30, token_bytes=TOKEN_BYTES)
    again.restore([*found, orphan])
    assert again.commands == [Erase(orphan.key)]
    for tokens in sequences:
        path, matched = again.match(ids(*tokens))
        assert matched == len(tokens)
    ranks.spans.clear()
    again.commands.clear()
    ranks.check(again)


def test_memory_that_is_forgotten_leaves_what_is_on_disk() -> None:
    room = iter((1, 0))
    tree = PrefixTree(0, 1 << 30, token_bytes=TOKEN_BYTES, room=lambda: next(room))
    at = tree.insert(tree.root, ids(1, 2, 3), 0, sequence=1)[-1]
    tree.insert(at, ids(4, 5), 0, sequence=1)
    tree.forget_memory()
    assert tree.held == {"device": 0, "host": 0, "disk": 3}
    assert tree.used_tokens == 0
    assert tree.match(ids(1, 2, 3, 4, 5))[1] == 3


def test_what_the_disk_had_no_time_for_is_written_with_what_follows_it() -> None:
    described: list[tuple[str, tuple[int, ...], str | None]] = []

    def describe(key: str, tokens: Tokens, behind: StoredPart | None) -> None:
        described.append((key, tuple(tokens), None if behind is None else behind.key))

    # There is room for the first tokens alone, which are one node, when another sequence begins alike; then for all.
    room = iter((0, 0, 1, 1 << 10))
    tree = PrefixTree(0, 1 << 30, token_bytes=TOKEN_BYTES, describe=describe, room=lambda: next(room))
    ranks, caches = Ranks(), {1: (1, 2, 3, 4, 5), 2: (1, 2, 3, 4, 6)}
    at = tree.root
    for last in (3, 5):
        at = tree.insert(at, ids(*caches[1][at.end : last]), 0, sequence=1)[-1]
    tree.release(at, 1)
    assert tree.held["disk"] == 0
    at = tree.take(ids(*caches[2]), tree.root, 2)[-1]
    for on_disk in (3, 5):
        at = [at, *tree.insert(at, ids(*caches[2][at.end :]), 2, sequence=2)][-1]
        assert tree.held["disk"] == on_disk
    ranks.follow(tree, caches)
    ranks.check(tree)
    first, second, third = (key for key, _, _ in described)
    assert described == [(first, (1, 2, 3), None), (second, (4,), first), (third, (6,), second)]


def test_nothing_is_written_behind_what_could_not_be_read() -> None:
    tree, ranks = PrefixTree(0, 1 << 30, token_bytes=TOKEN_BYTES), Ranks()
    tree.release(tree.insert(tree.root, ids(1, 2, 3), 0, sequence=1)[-1], 0)
    tree.shrink(0)
    (node,) = tree.take(ids(1, 2, 3), tree.root, 1)
    assert tree.fetch([node]) == [node]
    tree.loaded(node, False)
    ranks.follow(tree, {1: (1, 2, 3)})
    # A sequence has its tokens all the same, and goes on.
    tree.insert(node, ids(4, 5), 1, sequence=2)
    assert not [command for command in tree.commands if isinstance(command, Write)]
    assert tree.held["disk"] == 0


def test_what_waits_to_be_told_takes_room() -> None:
    tree = PrefixTree(0, 1 << 30, token_bytes=TOKEN_BYTES, room=lambda: 4 * TOKEN_BYTES)
    for first in range(3):
        tree.insert(tree.root, ids(first, 0, 0), 0, sequence=first)
    assert len([command for command in tree.commands if isinstance(command, Write)]) == 2
    tree.commands.clear()
    tree.insert(tree.root, ids(3, 0, 0), 0, sequence=3)
    assert tree.held["disk"] == 9


def test_common() -> None:
    for _ in range(50):
        first, second = (random.choices(range(2), k=random.randint(0, 6)) for _ in range(2))
        expected = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        assert common(ids(*first), ids(*second)) == (min(len(first), len(second)) if expected is None else expected)

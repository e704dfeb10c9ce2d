"""The tree of kept prefixes, on rank 0: which tokens lie behind which, where they are kept, and what goes first.

A radix tree over tokens: sequences that begin alike share nodes, and a node is split where they part, to a token. What
ranks are to do with the spans of nodes comes out as commands.

Life of a node: `insert` (kept in device memory, perhaps written to disk), `use` and `release` by running sequences,
then, least recently used first, to host memory, to disk alone, and away. A node outlives its descendants in each tier.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from megakv.serving.plan import Command, Drop, Erase, Keep, Load, Move, Split, StoredPart, Write
from megakv.serving.prefix_node import FoundPrefix, Node, StoredFiles, Tokens, common, walk
from megakv.tracking.served import Tier


class PrefixTree:
    """What is kept, within so many tokens of host memory and bytes of disk; those of the device are told to `shrink`.

    A token takes `token_bytes` on disk, over all ranks, of which `cp` are context-parallel. `describe` is told what
    will be in a file, and behind which part of another that comes; `room` says how many bytes may be written now.
    `commands` is what ranks are to do, in order; whoever tells them clears it.
    """

    def __init__(
        self,
        host_tokens: int = 0,
        disk_bytes: int = 0,
        *,
        token_bytes: int = 0,
        cp: int = 1,
        describe: Callable[[str, Tokens, StoredPart | None], None] = lambda key, tokens, behind: None,
        room: Callable[[], float] = lambda: math.inf,
    ):
        self.root = Node(0, np.zeros(0, dtype=np.int32), None, 0)
        self.commands: list[Command] = []
        self.used_tokens = 0
        """Tokens of nodes that running sequences use."""
        self.loading: dict[int, Node] = {}
        """What ranks are reading from disk."""
        self._host_tokens, self._disk_bytes = host_tokens, disk_bytes
        self._token_bytes, self._cp, self._describe, self._room = token_bytes, cp, describe, room
        self._ids = itertools.count(1)
        self._memory = {"device": 0, "host": 0}
        # Unused nodes in memory, the least recently used first: parents behind their children, as in files.
        self._idle: dict[Tier, OrderedDict[int, Node]] = {"device": OrderedDict(), "host": OrderedDict()}
        self._files = StoredFiles()

    @property
    def held(self) -> dict[Tier, int]:
        """Tokens by tier."""
        return {"device": self._memory["device"], "host": self._memory["host"], "disk": self._files.tokens}

    # Finding

    def match(self, tokens: Tokens, node: Node | None = None) -> tuple[list[Node], int]:
        """The nodes behind `node` that `tokens` begin with, of the last perhaps a part, and how many tokens that is."""
        node, done, path = node or self.root, 0, []
        while done < len(tokens) and (child := node.children.get(int(tokens[done]))) is not None:
            alike = common(child.tokens, tokens[done:])
            path.append(child)
            done += alike
            if alike < len(child.tokens):
                break
            node = child
        return path, done

    def has(self, node: Node) -> bool:
        """Whether a node is still there: what could not be read is not, nor what came behind it."""
        while (parent := node.parent) is not None:
            if parent.children.get(int(node.tokens[0])) is not node:
                return False
            node = parent
        return True

    def take(self, tokens: Tokens, node: Node, now: float) -> list[Node]:
        """Use what `match` finds, for a sequence that uses `node` already; a node of which it is a part is split."""
        path = self._whole(tokens, node)
        for each in path:
            each.hits += 1
        self._use(path, now)
        return path

    def _whole(self, tokens: Tokens, node: Node) -> list[Node]:
        """What `match` finds, the last node split so that all of its tokens are alike."""
        path, done = self.match(tokens, node)
        if path and (over := path[-1].end - node.end - done) > 0:
            path[-1] = self._split(path[-1], len(path[-1].tokens) - over)
        return path

    def fetch(self, nodes: Sequence[Node]) -> list[Node]:
        """Bring nodes that are used into device memory; returns those that have yet to be read from disk."""
        for node in nodes:
            if node.memory == "host":
                self._enter(node, "device")
                self.commands.append(Move(node.id, to_host=False))
            elif node.memory is None and not node.loading:
                assert node.stored is not None
                node.loading = True
                self.loading[node.id] = node
                self._memory["device"] += len(node.tokens)
                self.commands.append(Load(node.id, node.stored))
        return [node for node in nodes if node.loading]

    def loaded(self, node: Node, success: bool) -> None:
        """What is behind a node has been read, or could not be: then it is gone, and all behind it."""
        if not node.loading:
            return
        node.loading = False
        del self.loading[node.id]
        self._memory["device"] -= len(node.tokens)
        if success:
            self._enter(node, "device")
        else:
            self._remove(node)

    # Growing

    def insert(self, node: Node, tokens: Tokens, now: float, *, sequence: int) -> list[Node]:
        """Keep tokens behind `node` that a sequence has in its cache, and use them for it; returns their nodes.

        Those that are there already are not kept again. What of them, and before them, is not on disk yet is written.
        """
        path = self._whole(tokens, node)
        at = path[-1] if path else node
        done = at.end - node.end
        if done < len(tokens):
            fresh = self._grow(at, tokens[done:])
            fresh.memory = "device"
            self._memory["device"] += len(fresh.tokens)
            self.commands.append(Keep(fresh.id, sequence, at.end, fresh.end))
            path.append(fresh)
        self._use(path, now)
        if self._disk_bytes:
            self._write(path[-1] if path else node)
        return path

    def _write(self, node: Node) -> None:
        """Put all up to a used node on disk that is not there yet, from the first on, while there is room."""
        # What ranks have yet to be told of waits as well.
        room = self._room() - sum(self._files.size(each.key) for each in self.commands if isinstance(each, Write))
        for each in node.path():
            if each.stored is not None:
                continue
            # What could not be read is nowhere, though a sequence that has it in its cache may be behind it.
            if room <= 0 or each.memory is None:
                break
            assert each.parent is not None
            key, size = secrets.token_hex(12), len(each.tokens)
            self.commands.append(Write(each.id, key))
            self._describe(key, each.tokens, each.parent.stored)
            self._files.add(each, StoredPart(key, 0, size, self._cp), size * self._token_bytes)
            room -= size * self._token_bytes
        self._shrink_disk()

    def restore(self, found: Iterable[FoundPrefix]) -> None:
        """Take in what an earlier server left on disk, parents first."""
        ends: dict[str, Node] = {}
        lengths: dict[str, int] = {}
        for file in found:
            before = self.root.tokens
            if file.parent is not None and file.parent in ends:
                end = ends[file.parent]
                begin = end.end - lengths[file.parent]
                before = np.concatenate([node.tokens for node in end.path()])[: begin + file.at]
            path = self._whole(np.concatenate([before, file.tokens]), self.root)
            at = path[-1] if path else self.root
            done = at.end - len(before)
            if not 0 <= done < len(file.tokens) or (file.parent is not None and file.parent not in ends):
                self.commands.append(Erase(file.key))
                continue
            fresh = ends[file.key] = self._grow(at, file.tokens[done:])
            lengths[file.key] = len(file.tokens)
            fresh.used_at = file.used_at
            self._files.add(fresh, StoredPart(file.key, done, len(file.tokens), file.cp), file.nbytes)
        for leaf in sorted(self.leaves(), key=lambda node: node.used_at):
            for node in reversed(leaf.path()):
                self._files.use(node)
        self._shrink_disk()

    def _grow(self, node: Node, tokens: Tokens) -> Node:
        fresh = Node(next(self._ids), tokens.copy(), node, node.end + len(tokens))
        node.children[int(tokens[0])] = fresh
        return fresh

    def _split(self, node: Node, at: int) -> Node:
        """Put the first tokens of a node into a new one, its parent from now on."""
        assert node.parent is not None
        head = Node(next(self._ids), node.tokens[:at].copy(), node.parent, node.end - len(node.tokens) + at)
        head.memory, head.loading, head.uses = node.memory, node.loading, node.uses
        head.used_at, head.hits = node.used_at, node.hits
        node.parent.children[int(head.tokens[0])] = head
        node.tokens, node.parent = node.tokens[at:].copy(), head
        head.children[int(node.tokens[0])] = node
        self._files.split(node, head)
        if node.loading:
            self.loading[head.id] = head
        if node.memory is not None or node.loading:
            self.commands.append(Split(node.id, head.id, at))
        if node.memory is not None and not head.uses:
            self._idle[node.memory][head.id] = head
        return head

    # Using

    def _use(self, nodes: Sequence[Node], now: float) -> None:
        for node in nodes:
            node.uses += 1
            node.used_at = now
            if node.uses == 1:
                self.used_tokens += len(node.tokens)
                if node.memory is not None:
                    self._idle[node.memory].pop(node.id, None)

    def release(self, node: Node, now: float) -> None:
        """A sequence does not use a node any more, nor those before it."""
        while node.parent is not None:
            node.uses -= 1
            node.used_at = now
            if not node.uses:
                self.used_tokens -= len(node.tokens)
                if node.memory is not None:
                    self._idle[node.memory][node.id] = node
            self._files.use(node)
            node = node.parent

    # Shrinking

    def shrink(self, device_tokens: int) -> None:
        """Let what is unused leave the device until so many tokens are there, as far as that goes."""
        idle = self._idle["device"]
        while self._memory["device"] > device_tokens and idle:
            node = next(iter(idle.values()))
            if self._host_tokens >= len(node.tokens):
                self.commands.append(Move(node.id, to_host=True))
                self._enter(node, "host")
            else:
                self._leave_memory(node)
        idle = self._idle["host"]
        while self._memory["host"] > self._host_tokens and idle:
            self._leave_memory(next(iter(idle.values())))

    def _enter(self, node: Node, tier: Tier) -> None:
        """A node's span moves between tiers of memory, or comes there from disk."""
        if node.memory is not None:
            self._memory[node.memory] -= len(node.tokens)
            self._idle[node.memory].pop(node.id, None)
        node.memory = tier
        self._memory[tier] += len(node.tokens)
        if not node.uses:
            self._idle[tier][node.id] = node

    def _leave_memory(self, node: Node) -> None:
        if node.stored is None:
            self._remove(node)
            return
        assert node.memory is not None
        self.commands.append(Drop(node.id))
        self._memory[node.memory] -= len(node.tokens)
        self._idle[node.memory].pop(node.id, None)
        node.memory = None

    def _shrink_disk(self) -> None:
        for file in self._files if self._files.nbytes > self._disk_bytes else ():
            # A used node may be about to be read.
            if self._files.nbytes > self._disk_bytes and not any(node.uses for node in file.nodes):
                for node in list(file.nodes):
                    self._leave_disk(node)
                    if node.memory is None:
                        self._remove(node)

    def _leave_disk(self, node: Node) -> None:
        if (key := self._files.leave(node)) is not None:
            self.commands.append(Erase(key))

    def _remove(self, node: Node) -> None:
        """Forget a node and all behind it. Sequences that use it have it in their caches."""
        if node.parent is None or node.parent.children.get(int(node.tokens[0])) is not node:
            return
        del node.parent.children[int(node.tokens[0])]
        for each in list(walk(node)):
            self._leave_disk(each)
            if each.memory is not None or each.loading:
                self.commands.append(Drop(each.id))
                self._memory[each.memory or "device"] -= len(each.tokens)
            if each.memory is not None:
                self._idle[each.memory].pop(each.id, None)
            self.loading.pop(each.id, None)
            each.memory, each.loading = None, False

    def forget_memory(self) -> None:
        """Nothing is in memory any more, on no rank, and nothing in use; what is on disk stays."""
        self.commands = [command for command in self.commands if isinstance(command, Erase)]
        for node in list(walk(self.root)):
            node.uses, node.memory, node.loading = 0, None, False
        self.used_tokens = 0
        self.loading.clear()
        self._memory["device"] = self._memory["host"] = 0
        for idle in self._idle.values():
            idle.clear()
        for node in list(walk(self.root)):
            if node.stored is None and node.parent is not None:
                node.parent.children.pop(int(node.tokens[0]), None)

    def leaves(self) -> Iterator[Node]:
        """The last nodes of all branches."""
        return (node for node in walk(self.root) if not node.children and node is not self.root)

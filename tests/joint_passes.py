"""Several sequences that share prefixes, read in joined passes of chunks and single tokens, against the plain model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megakv.base.errors import MegaKVError
from megakv.cache.cache import ShardedCache
from megakv.cache.span import CacheSpan
from megakv.weights.placement.attention import attention_modules


@dataclass
class Row:
    """A sequence: its tokens, of which the first `common` are those of the document, and what the plain model says."""

    tokens: list[int]
    common: int
    expected: torch.Tensor
    cache: ShardedCache | None = None

    @property
    def done(self) -> int:
        return 0 if self.cache is None else self.cache.length

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


class BrokenError(RuntimeError):
    """What a model raises that is made to fail."""


class Interleaving:
    """Sequences of an engine; all ranks with one seed do the same. `folder` is where spans are saved and read back.

    The first ones may begin `together`: as many, with as many tokens each, as leave no rank behind.
    """

    def __init__(
        self,
        engine: Any,
        plain: Any,
        seed: int,
        folder: Path,
        sequences: int | None = None,
        length: int = 70,
        *,
        together: bool = False,
    ):
        self.engine, self.folder, self.random = engine, folder, np.random.default_rng(seed)
        self._together = together
        vocabulary = plain.config.get_text_config().vocab_size
        document = self.random.integers(3, vocabulary, size=length).tolist()
        self.rows, self.worst = [], 0.0
        least = 8 if together else 2
        for _ in range(int(self.random.integers(5, 10)) if sequences is None else sequences):
            common = int(self.random.integers(0, length + 1))
            tokens = document[:common] + self.random.integers(3, vocabulary, self.random.integers(least, 40)).tolist()
            with torch.no_grad():
                expected = plain(torch.tensor([tokens])).logits[0].float()
            self.rows.append(Row(tokens, common, expected))

    def run(self) -> None:
        """Passes until all is read, of which one fails."""
        failing, passes = int(self.random.integers(1, 6)), 0
        if self._together:
            size = self.engine.mesh.cp_size
            first = self.rows[: len(self.rows) // size * size]
            for row in first:
                row.cache = self.engine.new_cache(forgets=False)
            self._extend(first, [min(row.left for row in first)] * len(first))
        while ready := [row for row in self.rows if row.left]:
            chosen = [row for row in ready if self.random.random() < 0.7] or ready[:1]
            single = self.random.random() < 0.4
            for row in chosen:
                if row.cache is None:
                    self._begin(row)
            counts = [1 if single or self.random.random() < 0.5 else int(self.random.integers(1, 31)) for _ in chosen]
            counts = [min(count, row.left) for count, row in zip(counts, chosen, strict=True)]
            passes += 1
            if passes == failing:
                self._fail(chosen, counts)
            self._extend(chosen, counts)

    def _begin(self, row: Row) -> None:
        """With what another sequence has read, if it begins alike."""
        row.cache = cache = self.engine.new_cache(forgets=False)
        if self.random.random() < 0.5:
            cache.preallocate([len(row.tokens)] * len(cache.layers))
        for other in self.rows:
            known = min(row.common, other.common, other.done, len(row.tokens) - 1)
            if other is row or other.cache is None or not known:
                continue
            if self.random.random() < 0.3:
                row.cache = other.cache.fork()
                row.cache.cut_back(known)
                return
            known = int(self.random.integers(1, known + 1))
            span = other.cache.span(0, known)
            if self.random.random() < 0.5:
                span = self._read_back(span)
            for part in span.split(int(self.random.integers(0, known + 1))):
                cache.append_span(part)
            return

    def _read_back(self, span: CacheSpan) -> CacheSpan:
        mesh, number = self.engine.mesh, len(list(self.folder.glob("*-0-0")))
        paths = [self.folder / f"{number}-{rank}-{mesh.tp_rank}" for rank in range(mesh.cp_size)]
        self.engine.agreement.together(lambda: None)
        span.save(paths[mesh.cp_rank])
        self.engine.agreement.together(lambda: None)
        return CacheSpan.load(paths, mesh.cp_rank, mesh.cp_size, mesh.device)

    def _extend(self, rows: list[Row], counts: list[int]) -> None:
        given = [row.tokens[row.done : row.done + count] for row, count in zip(rows, counts, strict=True)]
        before = [row.done for row in rows]
        if self.random.random() < 0.4 and all(before):
            self._extend_by_candidates(rows, given)
            return
        logits = self.engine.extend([row.cache for row in rows], given).float()
        for row, first, count, found in zip(rows, before, counts, logits, strict=True):
            assert row.done == first + count
            self._compare(row, row.done, found)

    def _extend_by_candidates(self, rows: list[Row], given: list[list[int]]) -> None:
        """Some of the last tokens are candidates, which may be wrong from one on; those are taken back."""
        before, counts, right = [row.done for row in rows], list[int](), list[int]()
        for own in given:
            counts.append(int(self.random.integers(0, min(len(own), 9))))
            right.append(int(self.random.integers(0, counts[-1] + 1)))
            if right[-1] < counts[-1]:
                at = len(own) - counts[-1] + right[-1]
                own[at] = 3 + (own[at] - 2) % 90
        caches = [row.cache for row in rows]
        logits = self.engine.extend(caches, given, candidates=counts).float()
        flat = iter(logits)
        for row, first, own, count, wanted in zip(rows, before, given, counts, right, strict=True):
            assert row.cache is not None and row.done == first + len(own)
            for number in range(count + 1):
                found = next(flat)
                if number <= wanted:
                    self._compare(row, first + len(own) - count + number, found)
            if wanted < count:
                row.cache.cut_back(row.done - count + wanted)

    def _compare(self, row: Row, done: int, found: torch.Tensor) -> None:
        expected = row.expected[done - 1]
        self.worst = max(self.worst, float((found - expected).abs().max() / expected.abs().max()))

    def _fail(self, rows: list[Row], counts: list[int]) -> None:
        """A pass in which the model of the last rank raises, and which no cache remembers."""
        before = [row.done for row in rows]
        broken = self.engine.mesh.rank == self.engine.mesh.world_size - 1
        last = attention_modules(self.engine.module)[-1]

        def fail(*_: Any) -> None:
            raise BrokenError

        hooks = [last.register_forward_hook(fail)] if broken else []
        try:
            self._extend(rows, counts)
        except (BrokenError, MegaKVError):
            pass
        else:
            raise AssertionError("the pass did not fail")
        finally:
            for hook in hooks:
                hook.remove()
        assert [row.done for row in rows] == before

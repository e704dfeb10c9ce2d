"""A conversation whose keys and values stay where they are between turns."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megakv.base.device import without_autograd
from megakv.base.errors import MegaKVError
from megakv.cache.cache import ShardedCache
from megakv.cache.saved_tokens import FORMAT
from megakv.distributed.agreement import Agreement
from megakv.distributed.mesh import Mesh
from megakv.engine.generation import check_tokens, given_option, pad_left
from megakv.engine.session_files import (
    HeadsHere,
    SessionMeta,
    check_meta,
    fingerprint,
    read_cache,
    read_meta,
    read_tokens,
    write_shard,
)
from megakv.engine.session_folder import PendingSave

logger = logging.getLogger(__name__)


class SessionEngine(Protocol):
    """What a session needs of its engine."""

    module: PreTrainedModel
    mesh: Mesh
    agreement: Agreement
    weights_digest: str
    heads_here: HeadsHere

    def check_open(self) -> None: ...
    def generate_into(self, cache: ShardedCache, ids: Tensor | None, **options: Any) -> Any: ...


class Session:
    """Turns of one conversation, or of a batch of them.

    Made by `MegaKVEngine.session`; every rank must take the same turns. `input_ids` and `attention_mask` are ``[B, S]``
    all tokens so far, prompts and outputs; None before the first turn.
    """

    def __init__(self, engine: SessionEngine, cache: ShardedCache):
        self._engine: SessionEngine | None = engine
        self._cache = cache
        self.input_ids: Tensor | None = None
        self.attention_mask: Tensor | None = None
        self._noted = False

    @property
    def length(self) -> int:
        """Slots whose keys and values are cached. The last generated token is not among them yet."""
        return self._cache.length

    @without_autograd
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """One turn: append tokens, then generate.

        ``[B, T]`` are the turn's new tokens, and a mask that is 0 where one is padding; `options` are those of
        `transformers.GenerationMixin.generate`. Returned is what transformers returns for the whole conversation:
        ``[B, S]`` tokens, history included.

        A turn with beams goes on from a copy of what is cached, which is dropped with all beams: its tokens are
        computed again with the next turn.

        Raises
        ------
        MegaKVError
            If the session or its engine was closed.
        ValueError
            If the batch differs from that of earlier turns, or several sequences are asked for. The session stays as it
            was.
        """
        engine = self._open()
        with engine.agreement.call():
            returned = given_option("num_return_sequences", options, engine.module) or 1
            if returned > 1:
                raise ValueError(f"num_return_sequences = {returned} is not supported in a session; use 1")
            beams = given_option("num_beams", options, engine.module) or 1
            ids, mask = self._extended(input_ids, attention_mask)
            before, cache = self._cache.length, self._cache if beams == 1 else self._cache.fork()
            if beams > 1:
                cache.batch_repeat_interleave(beams)
            try:
                output = engine.generate_into(cache, ids, attention_mask=mask, **options)
            except BaseException:
                self._cut_cache(before)
                raise
            finally:
                if beams > 1:
                    cache.reset()
            self.input_ids = sequences = output if isinstance(output, Tensor) else output.sequences
            grown = sequences.shape[1] - mask.shape[1]
            self.attention_mask = torch.cat([mask, mask.new_ones((mask.shape[0], grown))], dim=1)
            return output

    @without_autograd
    def cut_back(self, slots: int) -> None:
        """Forget everything from slot `slots` on; a ValueError, and nothing forgotten, if the session is shorter.

        Where sliding windows have left behind what the tokens that stay would see, or some of it was evicted while
        decoding, the next turn reads these anew.
        """
        self._open()
        if not isinstance(slots, Integral):
            raise ValueError(f"cannot cut back to {slots!r} tokens: a whole number is needed")
        slots = int(slots)
        total = 0 if self.input_ids is None else self.input_ids.shape[1]
        if not 0 <= slots <= total:
            raise ValueError(f"cannot cut back to {slots} tokens: the session has {total}")
        self._cut_cache(slots)
        if self.input_ids is not None and self.attention_mask is not None:
            self.input_ids = self.input_ids[:, :slots]
            self.attention_mask = self.attention_mask[:, :slots]

    @without_autograd
    def fork(self) -> Session:
        """A second conversation with the same history; memory is shared until either goes on."""
        twin = Session(self._open(), self._cache.fork())
        twin.input_ids, twin.attention_mask = self.input_ids, self.attention_mask
        return twin

    @without_autograd
    def save(self, folder: str | Path) -> None:
        """Write the session to a folder that every rank can reach, whole or not at all.

        A session that was saved there before is replaced in one step, when the new one is complete on the disk: whoever
        is killed at whatever moment, one of the two is there. No more than one layer of a sequence is copied at a time.
        The folder, of which rank 0's word holds, is new, empty, or a saved session; or a link to one.

        Raises
        ------
        ValueError
            If there is nothing to save yet, or the folder holds something else or cannot be had: before anything is
            written.
        MegaKVError
            If any rank cannot write. What was saved there before stays.
        """
        engine, first = self._open(), self._open().mesh.rank == 0
        if self.input_ids is None or self.attention_mask is None or self.input_ids.shape[1] == 0:
            raise ValueError("this session has no tokens yet: there is nothing to save")
        meta, ids, mask = self._meta(engine), self.input_ids, self.attention_mask
        with engine.agreement.call(), ExitStack() as saving:
            pending: list[PendingSave] = []

            def begin() -> Path:
                pending.append(saving.enter_context(closing(PendingSave(folder))))
                return pending[0].data

            data = engine.agreement.decide(begin)
            tokens = {"input_ids": ids.long(), "attention_mask": mask.long()} if first else {}
            engine.agreement.together(lambda: write_shard(data, self._cache, engine.mesh.tp_rank, len(ids), tokens))
            engine.agreement.together(lambda: pending[0].commit(asdict(meta)) if first else None)

    @classmethod
    @without_autograd
    def restore(cls, engine: SessionEngine, cache: ShardedCache, folder: Path) -> Session:
        """Continue a saved session on top of an empty cache; see `MegaKVEngine.restore_session`."""
        session, device = cls(engine, cache), engine.mesh.device
        # Another job may save to the folder meanwhile.
        meta = engine.agreement.decide(lambda: read_meta(folder))

        def read() -> None:
            check_meta(meta, folder, session._meta(engine))
            # Copies, for what was read is mapped from files that may go.
            ids, mask = (tokens.to(device, copy=True) for tokens in read_tokens(folder, meta))
            vocabulary = engine.module.config.get_text_config().vocab_size
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise MegaKVError(f"{folder} is broken: it holds tokens that are not among the model's {vocabulary}")
            session.input_ids, session.attention_mask = ids, mask
            read_cache(folder, meta, cache, engine.heads_here, device)

        engine.agreement.together(read)
        return session

    @without_autograd
    def close(self) -> None:
        """Free the cache."""
        self._cache.reset()
        self._engine = None

    def _cut_cache(self, slots: int) -> None:
        # The latest token may not be cached yet.
        kept = min(self._cache.length, slots)
        self._cache.cut_back(slots)
        if self._cache.length < kept and not self._noted and self._open().mesh.rank == 0:
            self._noted = True
            logger.warning(
                "cut back to %d tokens, some of which are not held any more (sliding windows have left them behind, or "
                "they were evicted while decoding): the next turn reads all of them anew, which takes as long as a "
                "prompt",
                slots,
            )

    def _meta(self, engine: SessionEngine) -> SessionMeta:
        """What `session.json` would hold now."""
        batch = 0 if self.input_ids is None else len(self.input_ids)
        compressed = self._cache.compressed if self._cache.length else [()] * batch
        return SessionMeta(
            format=FORMAT,
            model=fingerprint(engine.module),
            weights=engine.weights_digest,
            cp=engine.mesh.cp_size,
            tp=engine.mesh.tp_size,
            layers=len(self._cache),
            batch=batch,
            length=self._cache.length,
            dtype=str(engine.module.dtype),
            compressed=[[list(span) for span in ranges] for ranges in compressed],
            heads=engine.heads_here.heads,
            divided=engine.heads_here.divided,
            copies=engine.heads_here.copies,
            gone=list(self._cache.gone),
            reach=self._cache.reach,
        )

    def _open(self) -> SessionEngine:
        if self._engine is None:
            raise MegaKVError("this session is closed; make a new one with engine.session()")
        self._engine.check_open()
        return self._engine

    def _extended(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        check_tokens(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask must have the shape {list(input_ids.shape)} of the turn's input_ids")
        # Of the turn alone: what came before stays where it was, cached or not.
        input_ids, mask = pad_left(input_ids, mask)
        if self.input_ids is None or self.attention_mask is None:
            return input_ids, mask
        if len(input_ids) != len(self.input_ids):
            raise ValueError(f"this session holds {len(self.input_ids)} sequences, input_ids has {len(input_ids)}")
        return torch.cat([self.input_ids, input_ids], dim=1), torch.cat([self.attention_mask, mask], dim=1)

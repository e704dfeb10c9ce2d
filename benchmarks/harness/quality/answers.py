"""Answers of a real model to long prompts: exact ones token by token, and those from compressed caches.

Compression methods share the reading of a prompt. All but its last tokens are read once, into a dense cache that is
forked for every method and budget; the method's own engine reads the rest, as the last piece of the same turn, and
compresses all of it: it keeps what it would keep if it had read the whole prompt (docs/fairkv.md#compression).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

import megakv
from megakv.cache.cache import ShardedCache
from megakv.fairkv import methods
from megakv.fairkv.method import EVERYTHING
from megakv.fairkv.observation import Turn
from megakv.forward.pass_plan import Generation

from ..launch import Rows
from ..methods import Peer, Peers
from ..models import DTYPES
from ..world import World
from .ruler import EXACT, METHODS, Item

Items = dict[tuple[int, str], list[Item]]
SECTIONS: dict[str, dict[str, Any]] = {
    EXACT: {},
    "kv4": {"offload": {"enabled": True, "method": "stream", "kv_bits": 4, "host_gb": 1.0}},
    **{form: {"weights": {"format": form}} for form in ("int8", "q4_1", "fp8")},
}
"""Ways without a budget."""
LAST_TOKENS = 64  # Of a prompt, read by every method for itself: no fewer than the window that any of them observes
PIECE_TOKENS = 2048  # Columns of a batch that are read at a time


@dataclass(frozen=True)
class Way:
    """A method and its budget: what a KV head keeps on average."""

    method: str
    budget: int | None = None
    importance: str | None = None  # File, for HeadKV

    @property
    def name(self) -> str:
        return self.method if self.budget is None else f"{self.method}-{self.budget}"

    @property
    def _own(self) -> dict[str, Any]:
        return {"importance": self.importance} if self.method == "headkv" else {}

    @property
    def section(self) -> dict[str, Any]:
        """Section of the JSON that asks for it."""
        if self.budget is None:
            return SECTIONS[self.method]
        return {"fairkv": {"method": self.method, "budget": float(self.budget), **self._own}}

    @property
    def observes(self) -> tuple[int, ...] | None:
        """Observations that it needs of the tokens before the last; ways with the same share a reading."""
        if self.budget is None:
            return () if self.method == EXACT else None
        observed = methods.METHODS[self.method](**self._own).observed
        return (observed,) if observed == EVERYTHING else ()


class Found(StoppingCriteria):
    """Ends a row when its score cannot rise any more."""

    def __init__(self, items: Sequence[Item], prompt: int, tokenizer: PreTrainedTokenizerBase):
        self._items, self._prompt, self._tokenizer = items, prompt, tokenizer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._prompt :], skip_special_tokens=True)
        return torch.tensor([item.score(text) == 1 for item, text in zip(self._items, texts, strict=True)])


@dataclass(frozen=True)
class Answer:
    """Text of an answer, and how many tokens of the prompt a KV head held on average, of so many."""

    text: str
    score: float
    kept: float
    tokens: int


class Batch:
    """Prompts of one task, which are read together, and ways to answer them."""

    def __init__(self, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase):
        self._items, self._tokenizer = items, tokenizer
        encoded = tokenizer([item.text for item in items], return_tensors="pt", padding=True, padding_side="left")
        self.ids, self.mask = encoded.input_ids, encoded.attention_mask

    def _answers(self, engine: megakv.MegaKVEngine, cache: ShardedCache, ids: Tensor) -> list[str]:
        """The text behind the prompts, of which a cache holds all, some or nothing, and `ids` perhaps a token more."""
        grown = ids.shape[1] - self.ids.shape[1]
        found = engine.generate_into(
            cache,
            ids,
            attention_mask=torch.nn.functional.pad(self.mask, (0, grown), value=1),
            max_new_tokens=self._items[0].new_tokens - grown,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Found(self._items, self.ids.shape[1], self._tokenizer)]),
        )
        return self._tokenizer.batch_decode(found[:, self.ids.shape[1] :], skip_special_tokens=True)

    def _read(self, engine: megakv.MegaKVEngine, cache: ShardedCache, turn: Turn, stop: int) -> Tensor:
        """Logits behind the columns before `stop`, which are read on top of a cache."""
        # `generate` counts positions without padding, a plain pass would not.
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        ends = [*range(cache.length + PIECE_TOKENS, stop, PIECE_TOKENS), stop]
        engine._runtime.generation = Generation(cache, turn)
        try:
            for end in ends:
                own = slice(cache.length, end)
                pieces = {"input_ids": self.ids[:, own], "position_ids": positions[:, own]}
                mask = self.mask[:, :end]
                output = engine(**pieces, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
        finally:
            engine._runtime.generation = None
        logits: Tensor = output.logits[:, -1]
        return logits

    def whole(self, engine: megakv.MegaKVEngine) -> list[Answer]:
        """Answers of an engine that reads the prompts itself."""
        texts = self._answers(engine, engine.new_cache(), self.ids)
        return self._scored(texts, None)

    def compressed(self, engines: Mapping[str, megakv.MegaKVEngine], ways: Sequence[Way]) -> dict[str, list[Answer]]:
        """Answers by way, of ways that share a reading."""
        first = next((way for way in ways if way.budget is not None), ways[0])
        width = self.ids.shape[1]
        read, turn = engines[first.name].new_cache(), Turn(0, width)
        self._read(engines[first.name], read, turn, width - LAST_TOKENS)
        found = {}
        for way in ways:
            engine, cache = engines[way.name], read.fork()
            if way.budget is None:
                found[way.name] = self._scored(self._answers(engine, cache, self.ids), None)
                continue
            logits = self._read(engine, cache, Turn(0, width, dict(turn.seen)), width)
            ids = torch.cat([self.ids, logits.argmax(-1, keepdim=True)], dim=1)
            kept = torch.tensor(cache.head_tokens(), dtype=torch.float64).mean().item() / len(self._items)
            found[way.name] = self._scored(self._answers(engine, cache, ids), kept)
        return found

    def _scored(self, texts: Sequence[str], kept: float | None) -> list[Answer]:
        lengths = self.mask.sum(1).tolist()
        return [
            Answer(text, item.score(text), float(length) if kept is None else kept, length)
            for text, item, length in zip(texts, self._items, lengths, strict=True)
        ]


def load_model(folder: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with transformers' own fastest attention, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa")
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder)


def ways_of(names: Sequence[str], budgets: Sequence[int], importance: Path) -> list[Way]:
    """Every method that has one at every budget."""
    return [
        Way(name, budget, str(importance)) for name in names for budget in (budgets if name in METHODS else (None,))
    ]


def answer(
    peers: Peers, ways: Sequence[Way], items: Sequence[Item], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[dict[str, Any]]]:
    """Answers by way; ways that observe the same share a reading."""
    groups: dict[Any, list[Way]] = {}
    for way in ways:
        groups.setdefault(way.name if way.observes is None else way.observes, []).append(way)
    batch, found = Batch(items, tokenizer), {}
    for group in groups.values():
        engines = {way.name: peers.engine(way.name, {}, **way.section) for way in group}
        if group[0].observes is None:
            found[group[0].name] = batch.whole(engines[group[0].name])
            # Its memory off the accelerator, or its own weights.
            peers.drop(group[0].name)
        else:
            found |= batch.compressed(engines, group)
    return {name: [asdict(each) for each in several] for name, several in found.items()}


def exact_tokens(generate: Callable[..., Any], item: Item, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a greedy answer."""
    ids = tokenizer(item.text, return_tensors="pt").input_ids
    options = {"max_new_tokens": item.new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens: list[int] = generate(ids, **options)[0, ids.shape[1] :].tolist()
    return tokens


def counted(arguments: argparse.Namespace, asked: int, context: int) -> int:
    """Items of a length: of a longer one fewer, as many tokens together."""
    return max(1, asked * int(arguments.context[0]) // context)


def measure_exact(arguments: argparse.Namespace, world: World, model: Any, tokenizer: Any, items: Items) -> Rows:
    """Tokens of every exact item: of MegaKV on these ranks, and on one rank of transformers too."""
    asked = {
        f"{EXACT}-{world.size}-{context}-{task}-{index}": item
        for (context, task), several in items.items()
        for index, item in enumerate(several[: counted(arguments, arguments.exact_items, context)])
    }
    with Peers(model, world) as peers:
        ways = {"megakv": peers.engine(EXACT, {}).generate}
        if world.size == 1:
            ways["transformers"] = Peer(model).model.generate
        return [
            {"name": name, "tokens": {way: exact_tokens(generate, item, tokenizer) for way, generate in ways.items()}}
            for name, item in tqdm(asked.items(), desc=f"exact, {world.size} rank(s)", disable=world.rank > 0)
        ]


def measure_compressed(arguments: argparse.Namespace, world: World, model: Any, tokenizer: Any, items: Items) -> Rows:
    """Answers of every batch in every way; at longer lengths only by ways that share a reading."""
    ways = ways_of([EXACT, *arguments.methods], arguments.budgets, Path(arguments.profile or ""))
    rows: Rows = []
    with Peers(model, world) as peers:
        for (context, task), several in tqdm(items.items(), desc="compressed", unit="task"):
            count = counted(arguments, arguments.items, context)
            asked = ways if context == arguments.context[0] else [way for way in ways if way.observes == ()]
            for start in range(0, min(count, len(several)), arguments.batch):
                batch = several[start : min(count, start + arguments.batch)]
                name = f"compressed-{context}-{task}-{start}"
                rows.append({"name": name, "answers": answer(peers, asked, batch, tokenizer)})
    return rows

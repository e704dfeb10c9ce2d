"""Perplexity of a text behind a prompt, in every way that may lose something, beside exact."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import megakv

from ..document import DOCUMENT
from ..launch import Rows
from ..methods import Peers
from ..world import World
from .answers import PIECE_TOKENS, Way
from .ruler import EXACT


def losses(engine: megakv.MegaKVEngine, ids: Tensor, prompt: int) -> Tensor:
    """Minus the logarithm of each token's probability, ``[N]`` in float64, of all behind the first `prompt`.

    The prompt is a turn of its own, behind which a method compresses what it does; the tokens behind it are read on top
    of what that has left.
    """
    cache = engine.new_cache()
    engine.generate_into(cache, ids[:, :prompt], max_new_tokens=1, do_sample=False)
    found = []
    # The first is told by the prompt's last token, which a cache has not kept the logits of.
    for start in range(prompt, ids.shape[1] - 1, PIECE_TOKENS):
        own = slice(start, min(start + PIECE_TOKENS, ids.shape[1] - 1))
        logits = engine(ids[:, own], past_key_values=cache).logits[0]
        found.append(F.cross_entropy(logits.double(), ids[0, own.start + 1 : own.stop + 1], reduction="none"))
    return torch.cat(found)


def measure_perplexity(
    arguments: argparse.Namespace, world: World, model: Any, tokenizer: Any, ways: list[Way]
) -> Rows:
    """A row for each way."""
    ids = tokenizer(DOCUMENT.read_text(), return_tensors="pt").input_ids[:, : model.config.max_position_embeddings]
    prompt = max(1, ids.shape[1] - arguments.scored - 1)
    rows: Rows = []
    with Peers(model, world) as peers:
        for way in tqdm(ways, desc="perplexity", unit="way", disable=world.rank > 0):
            found = losses(peers.engine(way.name, {}, **way.section), ids, prompt)
            rows.append(
                {"name": f"perplexity-{way.name}", "method": way.method, "budget": way.budget, "prompt": prompt,
                 "scored": len(found), "loss": float(found.mean()), "perplexity": math.exp(found.mean())}
            )  # fmt: skip
            peers.drop(way.name)
    return rows


def over_exact(rows: Rows) -> dict[str, float]:
    """Perplexity over exact's, by way."""
    own = {row["name"].removeprefix("perplexity-"): row["perplexity"] for row in rows}
    return {name: value / own[EXACT] for name, value in own.items() if name != EXACT}

"""A check of properties.py: several tokens in a step, whatever each rank's own random state and assistant are."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LogitsProcessor

from megakv.base.errors import MegaKVError

NEW = 20
LOOKUP = {"prompt_lookup_num_tokens": 6}


class Quoting(LogitsProcessor):
    """Has tokens come as in a text, but for some; and another one at a length of its own."""

    def __init__(self, text: Tensor, otherwise: int = 0):
        self._text, self._otherwise = text[0].tolist(), otherwise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        token = self._text[length % len(self._text)] + (length % 7 == 0) + (length == self._otherwise)
        return scores.index_fill(1, torch.tensor([token]), float(scores.max()) + 1)


def candidates(context: Any) -> dict[str, Any]:
    """Which answers are transformers' own, and what ranks say whose processors differ."""
    folder = context.folder("llama")
    engine, plain = context.engine(folder), context.plain(folder)
    equal = {}
    ids = torch.randint(3, 120, (1, 30), generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    asked = {"max_new_tokens": NEW, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    quoted = {**asked, "do_sample": False, "logits_processor": [Quoting(ids)]}
    expected = plain.generate(ids, **quoted)
    # Whoever runs the assistant, no other one is asked.
    own = plain if context.rank == 0 else copy.deepcopy(plain).apply(_spoil)
    for name, how, here in (
        ("lookup", LOOKUP, LOOKUP),
        ("assistant", {"assistant_model": plain}, {"assistant_model": own}),
    ):
        sampled = {**asked, "do_sample": True, "temperature": 0.5}
        torch.manual_seed(7)
        wanted = plain.generate(ids, **sampled, **how)
        torch.manual_seed(7 + context.rank)
        equal[f"{name}, sampled"] = torch.equal(engine.generate(ids, **sampled, **here), wanted)
        equal[f"{name}, greedy"] = torch.equal(engine.generate(ids, **quoted, **here), expected)
        counts = engine.report().candidates
        equal[f"{name}, counted"] = counts is not None and counts.steps + counts.accepted == NEW
    equal["fewer steps"] = _turn(engine, plain, ids, quoted, expected)
    message = ""
    odd = Quoting(ids, otherwise=ids.shape[1] + 9 if context.rank else 0)
    try:
        engine.generate(ids, **{**quoted, "logits_processor": [odd]}, **LOOKUP)
    except MegaKVError as error:
        message = str(error)
    messages: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    equal["after the error"] = torch.equal(engine.generate(ids, **quoted, **LOOKUP), expected)
    engine.destroy()
    return {"equal": equal, "messages": messages}


def _turn(engine: Any, plain: Any, ids: Tensor, quoted: dict[str, Any], expected: Tensor) -> bool:
    """Whether a second turn is right, and takes fewer steps."""
    session, turn = engine.session(), {**quoted, "attention_mask": None}
    session.generate(ids, **turn, **LOOKUP)
    whole = torch.cat([expected, ids], dim=1)
    wanted = plain.generate(whole, **{**quoted, "attention_mask": torch.ones_like(whole)})
    right = torch.equal(session.generate(ids, **turn, **LOOKUP), wanted)
    return right and engine.report().candidates.steps < NEW


def _spoil(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.zero_()

"""Plain transformers on one process, asked the same as a session: its tokens, and where they part, its logits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.engine.engine import MegaKVEngine
from megakv.engine.loading import build_model
from megakv.injection.policy import depends_on_length
from megakv.tracking.measurements import LogitComparison
from megakv.weights.folder import adapter_directory, local_directory, model_class, read_config
from megakv.weights.gguf import gguf_of
from megakv.weights.packed_linear import unpack_modules

SCORES_BYTES = 1 << 28
"""Attention weights that a step of an eager pass may take for one layer."""
WITH_LOGITS: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
"""Options of a call of `generate` for `given_turn`."""
MOST = 1e12
"""Largest difference that a report holds."""


@dataclass(frozen=True)
class GivenTurn:
    """A turn of a session, as the engine answered it."""

    prompt: Tensor  # ``[1, P]`` the whole conversation up to the answer.
    tokens: Tensor  # ``[N]`` of the answer.
    logits: Tensor  # ``[N, V]`` that they were chosen by.


def compare_turns(
    model: str, engine: MegaKVEngine, turns: Sequence[GivenTurn], options: dict[str, Any], seed: int
) -> tuple[list[bool], LogitComparison | None]:
    """Whether plain transformers gives the same tokens, turn by turn, and how logits compare where tokens part.

    The plain model keeps its own cache from turn to turn, as the session does, and has all cores: other ranks are done.
    Where tokens part, contexts differ from then on. So logits are compared along one sequence of tokens, the session's.
    """
    print("megakv: running plain transformers on one process, to compare", flush=True)
    directory, device = local_directory(model), engine.mesh.device
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = read_config(directory)
    plain = _plain_model(directory, config, engine.module.dtype).to(device)
    if (adapter := adapter_directory(model, engine._config.megakv.adapter)) is not None:
        plain.load_adapter(str(adapter))
        for module in plain.modules():
            if hasattr(module, "merged_adapters"):
                module.merge()
    # What both cannot do alike is left out of both.
    plain.generation_config = engine.module.generation_config
    # How tokens are sampled goes by how many are checked in a step; which is the most likely one does not.
    unasked = {"prefill_chunk_size", *(() if options["do_sample"] else ("prompt_lookup_num_tokens",))}
    whole = {name: value for name, value in options.items() if name not in unasked}
    whole |= WITH_LOGITS
    found: list[GivenTurn] = []
    cache = None
    for index, turn in enumerate(tqdm(turns, desc="plain transformers", unit="answer")):
        torch.manual_seed(seed + index)
        # Without a mask, transformers would hide every token that happens to be the one for padding.
        given = {"attention_mask": torch.ones_like(turn.prompt), "past_key_values": cache}
        output = plain.generate(turn.prompt, **given, **whole)
        found.append(given_turn(turn.prompt, output))
        # What follows another answer is computed from the start, and so is what transformers checks candidates for.
        equal = torch.equal(found[-1].tokens, turn.tokens)
        cache = output.past_key_values if equal and "prompt_lookup_num_tokens" not in whole else None
    same = [torch.equal(own.tokens, turn.tokens) for own, turn in zip(found, turns, strict=True)]
    return same, None if all(same) else _compare_logits(plain, turns, found, sampled=options["do_sample"])


def _plain_model(directory: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model as transformers has it, with the weights of a GGUF file unpacked.

    So are those of a format for which transformers lacks a package.
    """
    if gguf_of(directory) is None:
        with suppress(ImportError):
            return model_class(config).from_pretrained(directory, config=config, dtype=dtype).eval()
    loaded = build_model(directory, dtype=dtype, all_reduce=lambda tensor: tensor)
    unpack_modules(loaded.module, dtype)
    return loaded.module


def given_turn(prompt: Tensor, output: Any) -> GivenTurn:
    """The turn that a call of `generate` with logits made of a whole ``[1, P]`` prompt."""
    tokens = output.sequences[0, prompt.shape[1] :].cpu()
    return GivenTurn(prompt, tokens, torch.cat(output.logits)[: len(tokens)].float().cpu())


@torch.no_grad()
def _compare_logits(
    plain: PreTrainedModel, turns: Sequence[GivenTurn], found: Sequence[GivenTurn], *, sampled: bool
) -> LogitComparison:
    """Logits of the session and of plain transformers, and of plain transformers in several ways to run it."""
    print("megakv: tokens part: running it along the answers, to compare logits", flush=True)
    ids = torch.cat([turns[-1].prompt, turns[-1].tokens[None].to(turns[-1].prompt.device)], dim=1)
    # The last token of an earlier answer may be left out of the conversation; what chose it is before it.
    places = [torch.arange(len(turn.tokens)) + turn.prompt.shape[1] - 1 for turn in turns]
    wanted, own = torch.cat(places), torch.cat([turn.logits for turn in turns])
    logits = _logits_along(plain, ids, wanted, ids.shape[1])
    plain.set_attn_implementation("eager")
    spread = _most(_logits_along(plain, ids, wanted, _eager_rows(plain, ids.shape[1])) - logits)
    # Rows in which either prefers another token, with both tokens.
    rows = (own.argmax(1) != logits.argmax(1)).nonzero()[:, 0]
    pairs = [torch.stack([rows, own[rows].argmax(1), logits[rows].argmax(1)], dim=1)]
    gap = _gap(logits, pairs[0])
    first, start = None, 0
    for number, (turn, plainly) in enumerate(zip(turns, found, strict=True), 1):
        shared = min(len(turn.tokens), len(plainly.tokens))
        parted = (turn.tokens[:shared] != plainly.tokens[:shared]).nonzero()
        at = int(parted[0]) if len(parted) else shared
        # Up to there both had the same context, and plain transformers came token by token.
        known = min(at + 1, shared)
        spread = max(spread, _most(plainly.logits[:known] - logits[start : start + known]))
        if at < shared:
            first = first or (number, at + 1)
            pair = torch.tensor([[start + at, turn.tokens[at], plainly.tokens[at]]])
            pairs.append(pair)
            if not sampled:
                gap = max(gap, _gap(plainly.logits, pair - torch.tensor([start, 0, 0])))
        start += len(turn.tokens)
    at, *tokens = torch.cat(pairs).T
    moved = max(_most(own[at, token] - logits[at, token]) for token in tokens)
    answer, token = first or (1, 1)
    return LogitComparison(
        answer=answer, token=token, gap=gap, moved=moved, difference=_most(own - logits), spread=spread
    )


def _logits_along(plain: PreTrainedModel, ids: Tensor, wanted: Tensor, rows: int) -> Tensor:
    """``[N, V]`` logits behind ascending places of ``[1, S]`` tokens, which go in so many at a time."""
    found, cache, end = [], None, int(wanted[-1]) + 1
    for begin in range(0, end, rows):
        tokens = ids[:, begin : min(begin + rows, end)]
        here = wanted[(wanted >= begin) & (wanted < begin + rows)] - begin
        output = plain(tokens, past_key_values=cache, use_cache=True, logits_to_keep=here.to(ids.device))
        cache = output.past_key_values
        found.append(output.logits[0].float().cpu())
    return torch.cat(found)


def _eager_rows(plain: PreTrainedModel, length: int) -> int:
    """Tokens of a step, such that the attention weights of one layer stay few."""
    if depends_on_length(plain):
        return length
    # Scores and, in float32, their softmax.
    return max(1, SCORES_BYTES // (8 * plain.config.get_text_config().num_attention_heads * length))


def _gap(logits: Tensor, pairs: Tensor) -> float:
    """How far apart the logits of two tokens are, at most, given rows and both tokens."""
    at, one, other = pairs.T
    return _most(logits[at, one] - logits[at, other])


def _most(differences: Tensor) -> float:
    """Largest of some differences; tokens that can never be are no difference."""
    found = differences.abs().nan_to_num(nan=0.0, posinf=MOST)
    return float(found.max()) if found.numel() else 0.0

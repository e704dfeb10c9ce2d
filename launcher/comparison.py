"""Plain transformers on one process, asked the same as a session."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megakv.engine import MegaKVEngine
from megakv.weights.folder import local_directory, read_config
from megakv.weights.model_class import model_class


def plain_turns(
    model: str, engine: MegaKVEngine, turns: Sequence[tuple[Tensor, Tensor]], options: dict[str, Any], seed: int
) -> list[bool]:
    """Of every turn, its whole ``[1, S]`` prompt and what came of it, whether plain transformers makes the same of it.

    The plain model keeps its own cache from turn to turn, as the session does, and has all cores: other ranks are done.
    """
    print("megakv: running plain transformers on one process, to compare", flush=True)
    directory, device = local_directory(model), engine.mesh.device
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = read_config(directory)
    plain = model_class(config).from_pretrained(directory, config=config, dtype=engine.module.dtype).eval().to(device)
    # What both cannot do alike is left out of both.
    plain.generation_config = engine.module.generation_config
    # How tokens are sampled goes by how many are checked in a step; which is the most likely one does not.
    unasked = {
        "prefill_chunk_size",
        "return_dict_in_generate",
        *(() if options["do_sample"] else ("prompt_lookup_num_tokens",)),
    }
    whole = {name: value for name, value in options.items() if name not in unasked}
    found, cache = [], None
    for index, (prompt, sequences) in enumerate(tqdm(turns, desc="plain transformers", unit="answer")):
        torch.manual_seed(seed + index)
        # Without a mask, transformers would hide every token that happens to be the one for padding.
        given = {"attention_mask": torch.ones_like(prompt), "past_key_values": cache}
        output = plain.generate(prompt, return_dict_in_generate=True, **given, **whole)
        found.append(torch.equal(output.sequences, sequences))
        # What follows another answer is computed from the start, and so is what transformers checks candidates for.
        cache = output.past_key_values if found[-1] and "prompt_lookup_num_tokens" not in whole else None
    return found

"""Measure a budget profile: what every rank of ``megakv fairkv profile`` runs.

On several hosts start them by hand:
``deepspeed --hostfile FILE --module megakv.launcher.budget_ranks --model DIR --prompts ... --json P``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import megakv
from megakv.distributed.launchers import read_launch
from megakv.engine.config import MegaKVConfig
from megakv.fairkv.figures import draw_profile
from megakv.fairkv.profile import BudgetProfile, MeasuredPrompt, ModelIdentity, kept_tokens, last_part, make_profile
from megakv.launcher.commands.fairkv_profile import add_arguments, budget_config, check_budgets, picture_path
from megakv.launcher.conversation import Turns, read_tokenizer
from megakv.launcher.process import own_rank, rank_arguments
from megakv.launcher.prompts import Prompt, read_prompts
from megakv.weights.folder import local_directory, read_config
from megakv.weights.placement import contiguous_head_map, head_counts


def tokenized(
    arguments: argparse.Namespace, config: MegaKVConfig, prompts: Sequence[Prompt], *, new_tokens: int = 0
) -> list[tuple[Prompt, Tensor]]:
    """Prompts as ``[1, S]`` tokens; refused are those too short to be compressed, or with what is to be generated too
    long for the model.
    """
    turns = Turns(read_tokenizer(arguments.model), chat=not arguments.no_chat_template)
    text = read_config(local_directory(arguments.model, weights=False)).get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    fairkv = config.megakv.fairkv
    assert fairkv.budget is not None
    found = []
    for prompt in prompts:
        ids = turns.first(prompt.text)
        length = ids.shape[1]
        where = f"--prompts {prompt.source}: the prompt has {length} tokens"
        if positions is not None and length + new_tokens > positions:
            behind = f" and {new_tokens} more are to be generated" if new_tokens else ""
            raise ValueError(f"{where}{behind}, the model takes {positions}; shorten it or leave it out")
        if length < fairkv.min_tokens:
            raise ValueError(
                f"{where}, fewer than megakv.fairkv.min_tokens = {fairkv.min_tokens}: it would not be compressed; "
                "leave it out"
            )
        if fairkv.budget > length:
            raise ValueError(f"{where}, fewer than --budget {fairkv.budget:g}; leave it out or lower the budget")
        found.append((prompt, ids))
    return found


def measure(engine: megakv.MegaKVEngine, prompts: Sequence[tuple[Prompt, Tensor]]) -> list[MeasuredPrompt]:
    """Read every prompt, and see what is kept. Every rank must call it."""
    heads = contiguous_head_map(*head_counts(engine.module.config), engine.mesh.tp_size)
    found = []
    for prompt, ids in tqdm(prompts, desc="prompts", unit="prompt", disable=own_rank() != 0):
        engine.generate(ids.to(engine.mesh.device), max_new_tokens=1, do_sample=False)
        found.append(MeasuredPrompt(prompt.data_set, ids.shape[1], kept_tokens(engine.report(), heads)))
    return found


def print_tables(profile: BudgetProfile) -> None:
    """The paper's Tables 1 and 2: similarity of data sets, and busy rates of ranks that hold neighbouring heads."""
    sets = profile.data_sets or ()
    width = max(map(len, ["data set", *(each.name for each in sets)]))
    mean = statistics.fmean(value for row in profile.budgets for value in row)
    print(f"\n{last_part(profile.model)}, {profile.method}: {mean:.0f} tokens kept by a KV head on average")
    print("\nTable 1: cosine similarity of a data set's budgets with the mean of the others'")
    print(f"{'data set':{width}}  prompts  similarity")
    for each in sets:
        similarity = "-" if each.similarity is None else f"{each.similarity:.3f}"
        print(f"{each.name:{width}}  {each.prompts:7}  {similarity:>10}")
    known = [each.similarity for each in sets if each.similarity is not None]
    if known:
        print(
            f"mean {statistics.fmean(known):.3f}, largest {max(known):.3f}, smallest {min(known):.3f}, "
            f"standard deviation {statistics.pstdev(known):.3f}"
        )
    else:
        print("one data set only: nothing to compare it with")
    print("\nTable 2: busy rate of ranks with neighbouring heads, in percent of the attention time")
    every = profile.busy_rates or {}
    print("  ".join([f"{'data set':{width}}", *(f"TP = {size}" for size in sorted(every))]).rstrip())
    for name, rates in [*((each.name, each.busy_rates) for each in sets), ("all", every)]:
        print("  ".join([f"{name:{width}}", *(f"{100 * rates[size]:6.1f}" for size in sorted(every))]).rstrip())
    if not every:
        print("the model has one KV head: no ranks to divide heads among")


def main() -> None:
    """Entry of every rank."""
    with rank_arguments(__doc__, add_arguments) as arguments:
        torch.set_num_threads(arguments.threads)
        config = budget_config(arguments, read_launch().world_size)
        if own_rank() == 0:
            check_budgets(arguments)
        prompts = tokenized(arguments, config, read_prompts(arguments.prompts, field=arguments.field))
        engine = megakv.init_inference(arguments.model, config)
        measured, identity = measure(engine, prompts), ModelIdentity.of_model(engine.module)
        if own_rank() == 0:
            profile = make_profile(arguments.model, config.megakv.fairkv.method, measured, identity)
            picture = picture_path(arguments)
            profile.save(arguments.json)
            draw_profile(profile, picture)
            print_tables(profile)
            print(f"profile: {Path(arguments.json).resolve()}, picture: {Path(picture).resolve()}", flush=True)
        engine.destroy()


if __name__ == "__main__":
    main()

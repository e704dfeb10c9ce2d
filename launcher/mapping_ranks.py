"""Profile a model's heads, map them, and measure what that gains: what every rank of ``megakv fairkv place`` runs.

On several hosts start them by hand:
``deepspeed --hostfile FILE --module megakv.launcher.mapping_ranks --model DIR --prompts ... --tp N``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import megakv
from megakv.engine.config import MegaKVConfig
from megakv.fairkv.figures import draw_mapping, draw_profile
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.mapping import HeadMapping
from megakv.fairkv.profile import BudgetProfile, ModelIdentity, make_profile
from megakv.launcher.budget_ranks import measure, print_tables, tokenized
from megakv.launcher.commands.fairkv_map import step_times
from megakv.launcher.commands.fairkv_place import RESULT, add_rank_arguments, check, read_budgets
from megakv.launcher.conversation import read_tokenizer
from megakv.launcher.gain import Gain
from megakv.launcher.job import JobParser, generation_options, print_files
from megakv.launcher.placements import Placement, read_in_turn
from megakv.launcher.process import own_rank, quiet_libraries, report_errors
from megakv.launcher.prompts import Prompt, read_prompts
from megakv.launcher.settings import run_config, run_settings
from megakv.tracking.files import write_whole
from megakv.tracking.page import Picture, page
from megakv.tracking.report import report_to_json
from megakv.tracking.tracker import log_runs
from megakv.tracking.wandb_run import check_wandb_installed
from megakv.weights.folder import local_directory, read_config

Prompts = Sequence[tuple[Prompt, Tensor]]


class Folder:
    """The folder that rank 0 writes; `written` are its files by kind."""

    def __init__(self, path: str):
        self.path = Path(path).resolve()
        self.written: dict[str, Path] = {}

    @property
    def mapping(self) -> Path:
        """Where the mapping goes, for all ranks to read."""
        return self.path / "mapping.json"

    def at(self, kind: str, name: str) -> Path:
        """Where the file of a kind goes."""
        self.written[kind] = self.path / name
        return self.written[kind]

    def write(self, kind: str, name: str, text: str) -> None:
        """Write the file of a kind; a name may be an absolute path."""
        write_whole(self.at(kind, name), text.encode())


def profiled(
    engine: megakv.MegaKVEngine, arguments: argparse.Namespace, prompts: Prompts, method: str
) -> tuple[BudgetProfile, Prompts]:
    """What heads keep, and the prompts to compare placements with: those that did not make the profile.

    Of measured prompts every other one is held out, but one alone is both. Every rank must call it.
    """
    if arguments.budgets is None:
        found, identity = measure(engine, prompts[::2]), ModelIdentity.of_model(engine.module)
        return make_profile(arguments.model, method, found, identity), prompts[1::2] or prompts

    def read() -> BudgetProfile:
        config = read_config(local_directory(arguments.model, weights=False))
        profile = read_budgets(arguments.budgets, arguments.model, config)
        other = None if profile.identity is None else profile.identity.other_weights(engine.module)
        if other is not None:
            raise ValueError(f"--budgets = {arguments.budgets!r} is the profile of another model: {other}")
        return profile

    with engine.agreement.call():
        return engine.agreement.same_file("--budgets", read), prompts


def mapped(
    engine: megakv.MegaKVEngine, arguments: argparse.Namespace, profile: BudgetProfile, folder: Folder
) -> HeadMapping:
    """The placement that a profile asks for; rank 0 finds and writes it. Every rank must call it."""

    def find() -> HeadMapping:
        print_tables(profile)
        times, tp_size = None, engine.mesh.tp_size
        if arguments.hardware is not None:
            directory = local_directory(arguments.model, weights=False)
            times = step_times(arguments.hardware, str(directory), tp_size=tp_size)
        mapping = map_heads(profile, tp_size=tp_size, copies=arguments.copies, times=times)
        if arguments.budgets is None:
            profile.save(folder.at("profile", "budgets.json"))
        mapping.save(folder.at("mapping", folder.mapping.name))
        draw_profile(profile, folder.at("kept tokens", "budgets.png"))
        draw_mapping(mapping, folder.at("loads of ranks", "mapping.png"))
        return mapping

    with engine.agreement.call():
        return engine.agreement.decide(find)


def run_values(arguments: argparse.Namespace, config: MegaKVConfig, mapping: str | None) -> dict[str, Any]:
    """The run's JSON: what was given, the compression, and the mapping where there is one."""
    values, compression = run_settings(arguments), config.megakv.fairkv
    fairkv = {"method": compression.method} | compression.model_dump(exclude_unset=True)
    values.setdefault("megakv", {})["fairkv"] = fairkv | ({} if mapping is None else {"mapping": mapping})
    return values


@dataclass
class Outcome:
    """What was found."""

    profile: BudgetProfile
    mapping: HeadMapping
    gain: Gain
    placements: list[Placement]  # Contiguous heads first; only they where the mapping was declined.
    prompts: int  # That the placements were compared on.
    tokens_equal: bool | None  # None where the mapping was declined.


def compare(arguments: argparse.Namespace, config: MegaKVConfig, prompts: Prompts, folder: Folder) -> Outcome:
    """Profile, map, and measure both placements. Every rank must call it."""
    engine = megakv.init_inference(arguments.model, config)
    profile, held_out = profiled(engine, arguments, prompts, config.megakv.fairkv.method)
    mapping = mapped(engine, arguments, profile, folder)
    found = Outcome(profile, mapping, Gain.predict(mapping), [Placement("contiguous", engine)], len(held_out), None)
    if not found.gain.declined:
        other = config.model_copy(deep=True)
        other.megakv.fairkv.mapping = str(folder.mapping)
        found.placements.append(Placement("mapped", megakv.init_inference(arguments.model, other)))
        # Steps are what is measured: no answer ends early.
        options = generation_options(arguments, read_tokenizer(arguments.model), engine.module)
        options["min_new_tokens"] = arguments.max_new_tokens
        reading = {"repeats": arguments.repeats, "seed": arguments.seed}
        found.tokens_equal = read_in_turn(found.placements, held_out, options, **reading)
        before, after = found.placements
        found.gain = found.gain.measure(before.median_s / after.median_s, before.shared_cores())
    return found


def publish(found: Outcome, arguments: argparse.Namespace, config: MegaKVConfig, folder: Folder) -> None:
    """Write what was found, and say it; the result comes last. Rank 0 calls it."""
    gain, placements = found.gain, [each for each in found.placements if each.step_s]
    run = run_values(arguments, config, str(folder.mapping) if gain.taken else None)
    folder.write("run's JSON", "config.json", json.dumps(run, indent=2) + "\n")
    if placements:
        print(f"\n{'heads':<12} {'ms a step':>10}  utilisation by kept tokens")
        for each in placements:
            print(f"{each.name:<12} {1e3 * each.median_s:>10.2f}  {each.utilisation:.3f}")
        print(f"tokens of both are {'equal' if found.tokens_equal else 'DIFFERENT'}")
        tokenizer = read_tokenizer(arguments.model)
        settings = {name: value for name, value in vars(arguments).items() if value is not None}
        runs = [(each.name, each.report(tokenizer, settings)) for each in placements]
        for name, report in runs:
            folder.write(f"report, {name}", f"{name}.json", report_to_json(report))
        pictures = (
            Picture.of(partial(draw_mapping, found.mapping), "loads of ranks, contiguous and mapped"),
            Picture.of(partial(draw_profile, found.profile), "tokens kept by KV heads"),
        )
        folder.write("page", "page.html", page(runs, [gain.sentence(), *pictures]))
        wandb = run_config(arguments).megakv.tracking.wandb
        if wandb.enabled:
            folder.written["W&B run"] = log_runs(runs, wandb)
    values = {
        "format": "megakv fairkv",
        "model": arguments.model,
        "mesh": {"cp": config.cp_size, "tp": config.tp_size},
        "copies": found.mapping.copies,
        "prompts": {"profile": len(found.profile.prompts or ()), "compared": found.prompts},
        "tokens_equal": found.tokens_equal,
        **gain.values(),
        "placements": {each.name: each.values() for each in placements},
    }
    result = folder.at("result", RESULT if arguments.json is None else str(Path(arguments.json).resolve()))
    files = {kind: str(file) for kind, file in folder.written.items()}
    write_whole(result, (json.dumps({**values, "files": files}, indent=1) + "\n").encode())
    print_files(folder.written.items(), None)
    print(f"result: {gain.sentence()}", flush=True)


def main() -> None:
    """Entry of every rank."""
    parser = JobParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory, GGUF file or hub id of the model")
    add_rank_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    quiet_libraries()
    with report_errors():
        arguments = parser.parse_args()
        config, folder = check(arguments), Folder(arguments.out)
        check_wandb_installed(run_config(arguments).megakv.tracking.wandb)
        texts = read_prompts(arguments.prompts, field=arguments.field)
        prompts = tokenized(arguments, config, texts, new_tokens=arguments.max_new_tokens)
        found = compare(arguments, config, prompts, folder)
        if own_rank() == 0:
            publish(found, arguments, config, folder)
        for each in reversed(found.placements):
            each.engine.destroy()
        if found.tokens_equal is False and own_rank() == 0:
            raise SystemExit(1)


if __name__ == "__main__":
    main()

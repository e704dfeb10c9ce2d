"""The main job: ranks read a document together and answer a question about it."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from megakv.build import init_inference
from megakv.launcher.comparison import plain_turns
from megakv.launcher.conversation import Turns, end_answer, read_tokenizer
from megakv.launcher.process import own_rank
from megakv.launcher.prompts import Question
from megakv.launcher.settings import check_job_arguments, make_folders, run_config
from megakv.tracking.files import write_whole
from megakv.tracking.page import page
from megakv.tracking.report import RunReport
from megakv.tracking.tables import operations, passes_by_plan
from megakv.weights.placement.plan import decoder_layers

MEGABYTE = 1 << 20
RANK_KEYS = ("rank", "host", "tokens", "kv_bytes", "head_tokens", "bytes_sent", "traffic", "peak_bytes")
"""Of a rank's report, what the main job's JSON has."""


@dataclass
class Answer:
    """One turn of a job, the same on every rank but for `tokens_equal`, which rank 0 alone knows."""

    question: str
    answer: str  # The generated text.
    tokens: list[int]
    prompt_tokens: int  # Computed in this turn: the first one's hold the document.
    new_tokens: int
    ttft_s: float | None
    ttit_s: float | None
    # Whether the tokens are those of a single-process transformers run; None where that was not asked for.
    tokens_equal: bool | None = None


@dataclass
class Outcome:
    """What a job produced."""

    answers: list[Answer]
    reports: list[RunReport]  # Of every turn.

    @property
    def answer(self) -> str:
        """The first answer's text."""
        return self.answers[0].answer

    @property
    def report(self) -> RunReport:
        """That of the turn that read the document."""
        return self.reports[0]

    @property
    def tokens_equal(self) -> bool | None:
        """Whether those of all answers are; None where that was not asked for."""
        found = [answer.tokens_equal for answer in self.answers]
        return None if None in found else all(found)

    def to_json(self, **more: Any) -> dict[str, Any]:
        """The main job's JSON."""
        report = self.report
        keys = ("ttft_s", "ttit_s", "prompt_tokens", "new_tokens", "mesh")
        return {
            "answer": self.answer,
            "tokens_equal": self.tokens_equal,
            **more,
            "answers": list(map(asdict, self.answers)),
            **{key: getattr(report, key) for key in keys},
            "prefill": None if report.prefill is None else asdict(report.prefill),
            "ranks": [
                {key: getattr(rank, key) for key in RANK_KEYS} | {"traffic": list(map(asdict, rank.traffic))}
                for rank in report.ranks
            ],
            "versions": report.versions,
            "machine": report.machine,
        }


class JobParser(argparse.ArgumentParser):
    """Raises what it complains about, so that it is said like any other error; helps on rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists all arguments")

    def print_help(self, file: Any = None) -> None:
        if own_rank() == 0:
            super().print_help(file)


def generation_options(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Of `generate`, as the arguments of `add_settings_arguments` ask for them."""
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if options["do_sample"]:
        options |= {"temperature": arguments.temperature, "top_p": arguments.top_p}
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    return options


@contextmanager
def prefill_bar(model: PreTrainedModel, *, shown: bool) -> Iterator[None]:
    """Show how many layers of the first forward pass are done, on one rank."""
    with ExitStack() as stack:
        if shown:
            _, layers = decoder_layers(model)
            bar = stack.enter_context(tqdm(total=len(layers), desc="prefill", unit="layer"))

            def count(*_: Any) -> None:
                bar.update(1)
                if bar.n >= len(layers):
                    stack.close()

            for layer in layers:
                stack.callback(layer.register_forward_hook(count).remove)
        yield


def run_job(
    model: str,
    arguments: argparse.Namespace,
    make_questions: Callable[[PreTrainedTokenizerBase], Sequence[Question]],
    *,
    chat: bool = True,
) -> Outcome:
    """Start the engine, answer in one session, and report; `arguments` are those of `add_job_arguments`.

    Every rank must call it.
    """
    check_job_arguments(arguments)
    if own_rank() == 0:
        make_folders(arguments)
    config = run_config(arguments)
    if arguments.compare and config.megakv.load == "random":
        raise ValueError("--compare is not possible with megakv.load = 'random': transformers needs a checkpoint")
    if arguments.timeline:
        config.megakv.tracking.timeline = arguments.timeline
    tokenizer = read_tokenizer(model)
    questions, turns = make_questions(tokenizer), Turns(tokenizer, chat=chat)
    prompts = [(turns.next if index else turns.first)(question.prompt) for index, question in enumerate(questions)]
    engine = init_inference(model, config)
    # What stands now stays: looking through it again in the midst of an answer takes as long as many tokens, while all
    # other ranks wait. So does looking through it now, on ranks that may have different errors to report.
    gc.freeze()
    mesh, first = engine.mesh, engine.mesh.rank == 0
    options = generation_options(arguments, tokenizer)
    if first:
        print(f"megakv: {prompts[0].shape[1]} tokens on CP {mesh.cp_size} x TP {mesh.tp_size}", flush=True)
    outcome, asked, session = Outcome([], []), [], engine.session()
    for index, (question, ids) in enumerate(zip(questions, prompts, strict=True)):
        if first and len(questions) > 1:
            print(f"\n> {question.text}", flush=True)
        end_answer(session, engine.module)
        torch.manual_seed(arguments.seed + index)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if first else None
        with prefill_bar(engine.module, shown=first and index == 0):
            sequences = session.generate(ids.to(mesh.device), streamer=streamer, **options)
        report = engine.report()
        end = sequences.shape[1] - report.new_tokens
        asked.append((sequences[:, :end], sequences))
        tokens = sequences[0, end:].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        times = (report.ttft_s, report.ttit_s)
        outcome.answers.append(Answer(question.text, text, tokens, ids.shape[1], len(tokens), *times))
        outcome.reports.append(report)
    if arguments.compare and first:
        equal = plain_turns(model, engine, asked, options, arguments.seed)
        for answer, same in zip(outcome.answers, equal, strict=True):
            answer.tokens_equal = same
    if first:
        engine.tracker.log_report(outcome.report)
    engine.destroy()
    gc.unfreeze()
    return outcome


def print_outcome(outcome: Outcome) -> None:
    """The tables that a user sees at the end."""
    report = outcome.report
    ttft, ttit = ("-" if time is None else f"{time * 1e3:.1f} ms" for time in (report.ttft_s, report.ttit_s))
    print(f"TTFT {ttft}   TTIT {ttit}   {report.prompt_tokens} prompt + {report.new_tokens} new tokens")
    if report.prefill is not None:
        times = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in report.prefill.predicted_s.items())
        print(f"prefill: {report.prefill.chosen}{f' (predicted: {times})' if times else ''}")
    print(f"{'rank':>4} {'cp':>3} {'tp':>3} {'tokens':>8} {'KV MiB':>8} {'peak MiB':>9}  sent (MiB by operation)")
    for rank in report.ranks:
        sent = ", ".join(f"{name} {size / MEGABYTE:.2f}" for name, size in sorted(rank.bytes_sent.items()) if size)
        print(
            f"{rank.rank:>4} {rank.cp_rank:>3} {rank.tp_rank:>3} {rank.tokens:>8} {rank.kv_bytes / MEGABYTE:>8.2f} "
            f"{rank.peak_bytes / MEGABYTE:>9.1f}  {sent or '-'}"
        )
    for number, answer in enumerate(outcome.answers[1:], 2):
        ttft, ttit = ("-" if time is None else f"{time * 1e3:.1f} ms" for time in (answer.ttft_s, answer.ttit_s))
        print(f"answer {number}: TTFT {ttft}   TTIT {ttit}   {answer.prompt_tokens} + {answer.new_tokens} new tokens")
    _print_budgets(report)
    _print_offload(report)
    _print_traffic(report)
    if outcome.tokens_equal is not None:
        word = "equal to" if outcome.tokens_equal else "DIFFERENT FROM"
        lossy = any(step.kv_bits for rank in report.ranks for step in rank.offload)
        why = ", as may be with keys and values in 4 bits" if lossy and not outcome.tokens_equal else ""
        print(f"tokens are {word} those of a single-process transformers run{why}")


def _print_budgets(report: RunReport) -> None:
    """What a compressed cache keeps: tokens per KV head and layer."""
    if all(rank.head_tokens for rank in report.ranks):
        kept = np.concatenate([layer for rank in report.ranks for layer in rank.head_tokens])
        tokens = sum(rank.tokens for rank in report.ranks) // report.mesh["tp"]
        print(
            f"kept by a KV head on a rank: {kept.mean():.0f} tokens on average, {kept.min()} to {kept.max()}; "
            f"{tokens} tokens were read"
        )


def _print_offload(report: RunReport) -> None:
    """What passes over keys and values off the accelerator did, on the first rank that has any."""
    rank = next((rank for rank in report.ranks if rank.offload), None)
    if rank is None:
        return
    last, passes = rank.offload[-1], len(rank.offload)
    kinds = ("resident", "recomputed", "on_host", "streamed", "out_of_window")
    tokens = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind in kinds if (count := getattr(last, kind)))
    come, gone, read = (
        f"{sum(getattr(step, name) for step in rank.offload) / passes / MEGABYTE:.2f} MiB"
        for name in ("bytes_in", "bytes_out", "disk_bytes")
    )
    disk = f", {read} of it from disk" if any(step.disk_bytes for step in rank.offload) else ""
    print(
        f"off the accelerator, rank {rank.rank}: {passes} passes ({passes_by_plan(rank)}); in the last "
        f"{last.cached} cached tokens ({tokens}); in each {come} in{disk} and {gone} out"
    )


def _print_traffic(report: RunReport) -> None:
    """Communication by operation: sums over ranks and layers; times are means over ranks."""
    rows: list[list[Any]] = [*operations(report).rows]
    if rows:
        print(f"{'operation':<16} {'calls':>7} {'MiB':>9} {'ms':>9} {'hidden ms':>10} {'exposed ms':>11}")
    for name, calls, sent, *seconds in rows:
        total, hidden, exposed = (1e3 * time for time in seconds)
        print(f"{name:<16} {calls:>7} {sent / MEGABYTE:>9.2f} {total:>9.1f} {hidden:>10.1f} {exposed:>11.1f}")


def write_outcome(outcome: Outcome, arguments: argparse.Namespace, **more: Any) -> None:
    """Write the files that were asked for, each whole or not at all, and say where the page is; on rank 0 alone."""
    if arguments.json:
        write_whole(arguments.json, json.dumps(outcome.to_json(**more), indent=2).encode())
    if arguments.report:
        names = [f"answer {number}" for number in range(1, len(outcome.reports) + 1)]
        write_whole(arguments.report, page(list(zip(names, outcome.reports, strict=True))).encode())
        print(f"report: {Path(arguments.report).resolve()}")

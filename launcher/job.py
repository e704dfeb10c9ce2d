"""The main job: ranks read a document together and answer a question about it."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from megakv.engine.build import init_inference
from megakv.engine.generation import LengthLimits
from megakv.launcher.comparison import WITH_LOGITS, GivenTurn, compare_turns, given_turn
from megakv.launcher.conversation import Turns, end_answer, read_tokenizer
from megakv.launcher.process import own_rank
from megakv.launcher.prompts import Question
from megakv.launcher.settings import check_files, check_job_arguments, run_config
from megakv.tracking.files import write_whole
from megakv.tracking.overview import methods, token_counts
from megakv.tracking.page import page
from megakv.tracking.report import Answer, RunReport, report_to_json
from megakv.tracking.tables import operations, passes_by_plan
from megakv.weights.folder import adapter_directory
from megakv.weights.placement.plan import decoder_layers

MEGABYTE = 1 << 20


@dataclass
class Outcome:
    """What a job produced; rank 0 alone knows whether tokens are plain transformers', and what was written."""

    report: RunReport  # Of the turn that read the document, with all answers.
    turns: list[RunReport]
    written: dict[str, Path]  # By kind, what the tracker wrote; nothing on other ranks than 0.
    upload: str | None  # The command that uploads an offline W&B run.

    @property
    def answer(self) -> str:
        """The first answer's text."""
        return self.report.answers[0].answer

    @property
    def wrong(self) -> bool:
        """Whether tokens part from those of plain transformers, and rounding does not explain it."""
        report = self.report
        return report.tokens_equal is False and not (report.logits is not None and report.logits.near_tie)


class JobParser(argparse.ArgumentParser):
    """Raises what it complains about, so that it is said like any other error; helps on rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists all arguments")

    def print_help(self, file: Any = None) -> None:
        if own_rank() == 0:
            super().print_help(file)


def generation_options(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> dict[str, Any]:
    """Options of `generate`, as the arguments of `add_settings_arguments`, and `add_lookup_argument`, ask for them.

    What the model's files say of several answers gives way, and rank 0 says so.
    """
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    options |= {"return_dict_in_generate": False}
    for name in ("num_beams", "num_return_sequences"):
        options[name] = 1
        if (given := getattr(model.generation_config, name, None) or 1) > 1 and own_rank() == 0:
            print(f"megakv: {name} = {given} of the model's files is left out: an answer is shown as it comes")
    if options["do_sample"]:
        options |= {"temperature": arguments.temperature, "top_p": arguments.top_p}
    if arguments.prefill_chunk_size is not None:
        options["prefill_chunk_size"] = arguments.prefill_chunk_size
    if (lookup := getattr(arguments, "prompt_lookup", None)) is not None:
        options["prompt_lookup_num_tokens"] = lookup
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
        check_files(arguments)
    config = run_config(arguments)
    if arguments.compare and config.megakv.load == "random":
        raise ValueError("--compare is not possible with megakv.load = 'random': transformers needs a checkpoint")
    if arguments.compare and adapter_directory(model, config.megakv.adapter) and find_spec("peft") is None:
        raise ValueError("--compare with an adapter lets peft merge it: install peft, or leave --compare out")
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
    options = generation_options(arguments, tokenizer, engine.module)
    if len(prompts) > 1:
        check_conversation(prompts, options, LengthLimits(engine.module, config))
    if first:
        print(f"megakv: {prompts[0].shape[1]} tokens on CP {mesh.cp_size} x TP {mesh.tp_size}", flush=True)
    answers: list[Answer] = []
    asked: list[GivenTurn] = []
    reports, session = [], engine.session()
    with_logits = WITH_LOGITS if arguments.compare and first else {}
    for index, (question, ids) in enumerate(zip(questions, prompts, strict=True)):
        if first and len(questions) > 1:
            print(f"\n> {question.text}", flush=True)
        end_answer(session, engine.module)
        torch.manual_seed(arguments.seed + index)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if first else None
        with prefill_bar(engine.module, shown=first and index == 0):
            output = session.generate(ids.to(mesh.device), streamer=streamer, **options | with_logits)
        report = engine.report()
        sequences = output.sequences if with_logits else output
        end = sequences.shape[1] - report.new_tokens
        if with_logits:
            asked.append(given_turn(sequences[:, :end], output))
        reports.append(report)
        answers.append(answer_of(question.text, report, sequences, tokenizer))
    logits = None
    if arguments.compare and first:
        equal, logits = compare_turns(model, engine, asked, options, arguments.seed)
        answers = [replace(answer, tokens_equal=same) for answer, same in zip(answers, equal, strict=True)]
    for turn, given in zip(reports, answers, strict=True):
        turn.answers, turn.tokens_equal = [given], given.tokens_equal
    report = replace(reports[0], answers=answers, tokens_equal=_all_equal(answers), logits=logits)
    report.settings = {name: value for name, value in vars(arguments).items() if value is not None}
    if first:
        engine.tracker.log_report(report)
    tracker = engine.tracker
    outcome = Outcome(report=report, turns=reports, written=tracker.written, upload=tracker.wandb_upload)
    engine.destroy()
    gc.unfreeze()
    return outcome


def answer_of(question: str, report: RunReport, sequences: Tensor, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """The answer at the end of ``[1, S]`` tokens, and what its turn's report says of it."""
    tokens = sequences[0, sequences.shape[1] - report.new_tokens :].tolist()
    return Answer(
        question=question,
        answer=tokenizer.decode(tokens, skip_special_tokens=True),
        tokens=tokens,
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        new_tokens=report.new_tokens,
        ttft_s=report.ttft_s,
        ttit_s=report.ttit_s,
        step_s=report.step_s,
    )


def check_conversation(prompts: Sequence[Tensor], options: dict[str, Any], limits: LengthLimits) -> None:
    """Refuse now what the last question would be refused for, after the document was read."""
    longest = options["max_new_tokens"]
    try:
        limits.check(sum(ids.shape[1] for ids in prompts) + (len(prompts) - 1) * longest, options)
    except ValueError as error:
        raise ValueError(f"{len(prompts)} questions, with answers of up to {longest} tokens each: {error}") from None


def _all_equal(answers: Sequence[Answer]) -> bool | None:
    """Whether all are plain transformers'; None where that was not asked for."""
    found = [answer.tokens_equal for answer in answers]
    return None if None in found else all(found)


def print_outcome(outcome: Outcome) -> None:
    """The tables that a user sees at the end."""
    report = outcome.report
    ttft, ttit = ("-" if time is None else f"{time * 1e3:.1f} ms" for time in (report.ttft_s, report.ttit_s))
    print(f"TTFT {ttft}   TTIT {ttit}   {token_counts(report)} tokens")
    print(f"{'rank':>4} {'cp':>3} {'tp':>3} {'tokens':>8} {'KV MiB':>8} {'peak MiB':>9}  sent (MiB by operation)")
    for rank in report.ranks:
        sent = ", ".join(f"{name} {size / MEGABYTE:.2f}" for name, size in sorted(rank.bytes_sent.items()) if size)
        print(
            f"{rank.rank:>4} {rank.cp_rank:>3} {rank.tp_rank:>3} {rank.tokens:>8} {rank.kv_bytes / MEGABYTE:>8.2f} "
            f"{rank.peak_bytes / MEGABYTE:>9.1f}  {sent or '-'}"
        )
    for number, answer in enumerate(report.answers[1:], 2):
        ttft, ttit = ("-" if time is None else f"{time * 1e3:.1f} ms" for time in (answer.ttft_s, answer.ttit_s))
        print(f"answer {number}: TTFT {ttft}   TTIT {ttit}   {token_counts(answer)} tokens")
    _print_budgets(report)
    _print_offload(report)
    _print_traffic(report)
    if report.tokens_equal is not None:
        _print_equality(outcome)


def _print_equality(outcome: Outcome) -> None:
    """Whether tokens are plain transformers', and how much part of it."""
    report, plain = outcome.report, "those of a single-process transformers run"
    if report.tokens_equal:
        print(f"tokens are equal to {plain}")
    elif not outcome.wrong:
        print(f"tokens part from {plain} at a near tie, which rounding decides")
    else:
        lossy = any(step.kv_bits for rank in report.ranks for step in rank.offload)
        print(f"tokens are DIFFERENT FROM {plain}" + ", as may be with keys and values in 4 bits" * lossy)
    if report.logits is not None:
        print(report.logits)


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


def print_files(files: Iterable[tuple[str, Path]], upload: str | None) -> None:
    """Say where everything is, and how an offline W&B run is uploaded."""
    for kind, file in files:
        print(f"{kind}: {file}")
    if upload is not None:
        print(f"upload the W&B run: {upload}")


def publish(outcome: Outcome, arguments: argparse.Namespace, **judged: Any) -> None:
    """The end of a job on rank 0: writes the files that were asked for, says what served it and where all files are.

    `judged` is what the job knows of its first answer: fields of `Answer`.
    """
    report, files = outcome.report, list(outcome.written.items())
    report.answers[0] = replace(report.answers[0], **judged)
    if arguments.json:
        write_whole(arguments.json, report_to_json(report).encode())
        files.append(("report", Path(arguments.json).resolve()))
    if arguments.report:
        names = [f"answer {number}" for number in range(1, len(outcome.turns) + 1)]
        write_whole(arguments.report, page(list(zip(names, outcome.turns, strict=True))).encode())
        files.append(("page", Path(arguments.report).resolve()))
    for stage, words in methods(report).items():
        print(f"{stage}: {words}")
    print_files(dict.fromkeys(files), outcome.upload)
    if not arguments.report and (found := next((file for kind, file in files if kind == "report"), None)):
        print(f"as a page: megakv report {found} --html {found.with_suffix('.html')}")

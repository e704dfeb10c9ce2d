"""The main job: ranks read a document together and answer a question about it."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from megakv.build import init_inference
from megakv.config import load_config
from megakv.engine import MegaKVEngine
from megakv.launcher.process import own_rank
from megakv.tracking.files import write_whole
from megakv.tracking.report import RunReport
from megakv.tracking.tables import operations, passes_by_plan
from megakv.weights.files import local_directory
from megakv.weights.placement.plan import decoder_layers

MEGABYTE = 1 << 20
RANK_KEYS = ("rank", "host", "tokens", "kv_bytes", "head_tokens", "bytes_sent", "traffic", "peak_bytes")
"""Of a rank's report, what the main job's JSON has."""


@dataclass
class Outcome:
    """What a job produced, the same on every rank but for `tokens_equal`, which rank 0 alone knows."""

    answer: str  # The generated text.
    # Whether the tokens are those of a single-process transformers run; None where that was not asked for.
    tokens_equal: bool | None
    report: RunReport

    def to_json(self, **more: Any) -> dict[str, Any]:
        """The main job's JSON."""
        report = self.report
        keys = ("ttft_s", "ttit_s", "prompt_tokens", "new_tokens", "mesh")
        return {
            "answer": self.answer,
            "tokens_equal": self.tokens_equal,
            **more,
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


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every job takes."""
    parser.add_argument("--config", required=True, help="JSON: a DeepSpeed inference config with a megakv section")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate at most (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus for sampling (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling (default 0)")
    parser.add_argument("--json", help="write the outcome to this file")
    parser.add_argument("--timeline", help="draw compute and communication of every rank to this PNG")
    parser.add_argument(
        "--compare", action="store_true", help="also run plain transformers on rank 0 and compare tokens"
    )


def read_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's directory or hub id."""
    directory = local_directory(model)
    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # a broken tokenizer.json raises a bare Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--model {model}: its tokenizer cannot be read: {reason}") from error


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> Tensor:
    """``[1, S]`` tokens of a prompt, through the model's chat template where it has one."""
    if chat and tokenizer.chat_template is not None:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer(rendered, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(text, return_tensors="pt").input_ids


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
    make_prompt: Callable[[PreTrainedTokenizerBase], str],
    *,
    chat: bool = True,
) -> Outcome:
    """Start the engine, generate, and report; `arguments` are those of `add_job_arguments`. Every rank must call it."""
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens}: allowed: 1 or more")
    if arguments.temperature < 0:
        raise ValueError(f"--temperature {arguments.temperature}: allowed: 0 (greedy) or more")
    config = load_config(arguments.config)
    if arguments.compare and config.megakv.load == "random":
        raise ValueError("--compare is not possible with megakv.load = 'random': transformers needs a checkpoint")
    if arguments.timeline:
        config.megakv.tracking.timeline = arguments.timeline
    tokenizer = read_tokenizer(model)
    ids = prompt_ids(tokenizer, make_prompt(tokenizer), chat=chat)
    engine = init_inference(model, config)
    # What stands now stays: looking through it again in the midst of an answer takes as long as many tokens, while all
    # other ranks wait. So does looking through it now, on ranks that may have different errors to report.
    gc.freeze()
    ids = ids.to(engine.mesh.device)
    first = engine.mesh.rank == 0
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if options["do_sample"]:
        options |= {"temperature": arguments.temperature, "top_p": arguments.top_p}
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    torch.manual_seed(arguments.seed)
    if first:
        print(f"megakv: {ids.shape[1]} tokens on CP {engine.mesh.cp_size} x TP {engine.mesh.tp_size}", flush=True)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if first else None
    with prefill_bar(engine.module, shown=first):
        sequences = engine.generate(ids, streamer=streamer, **options)
    report = engine.report()
    equal = None
    if arguments.compare and first:
        equal = torch.equal(plain_tokens(model, engine, ids, options, arguments.seed), sequences.cpu())
    answer = tokenizer.decode(sequences[0, ids.shape[1] :], skip_special_tokens=True)
    outcome = Outcome(answer=answer, tokens_equal=equal, report=report)
    if first:
        engine.tracker.log_report(report)
    engine.destroy()
    gc.unfreeze()
    return outcome


def plain_tokens(model: str, engine: MegaKVEngine, ids: Tensor, options: dict[str, Any], seed: int) -> Tensor:
    """What a single-process transformers run of the same model generates."""
    print("megakv: running plain transformers on one process, to compare", flush=True)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=engine.module.dtype).eval().to(engine.mesh.device)
    torch.manual_seed(seed)
    return plain.generate(ids, **options).cpu()


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


def write_outcome(path: str, values: dict[str, Any]) -> None:
    """Write the outcome's JSON, whole or not at all."""
    write_whole(path, json.dumps(values, indent=2).encode())

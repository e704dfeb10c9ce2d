"""The ranks of ``megakv chat``: what is typed to rank 0 is answered by all, in sessions that stay sharded."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megakv.launcher.process import importing, leave, own_rank, rank_arguments

with importing():
    from transformers import PreTrainedTokenizerBase, TextStreamer

    from megakv.base.device import on_device
    from megakv.base.errors import MegaKVError, PeerLostError
    from megakv.engine.build import init_inference
    from megakv.engine.engine import MegaKVEngine
    from megakv.engine.session import Session
    from megakv.launcher.chat_input import CHAT_FILE, SESSION_FOLDER, Command, Interrupts, Prompt, SavedChat, complain
    from megakv.launcher.commands.chat import add_arguments
    from megakv.launcher.conversation import Turns, end_answer, read_tokenizer, template_note
    from megakv.launcher.job import generation_options, prefill_bar, print_files
    from megakv.launcher.prompts import read_text
    from megakv.launcher.settings import check_job_arguments, run_config
    from megakv.tracking.files import write_whole
    from megakv.tracking.report import RunReport
    from megakv.weights.placement.plan import decoder_layers

BEAT_S = 2.0
"""How often rank 0 says that it still waits for a line, if ``megakv.timeout_s`` is not shorter."""
BAR_TOKENS = 256
"""Tokens of a turn from which on its progress is shown."""
FIRST = "main"
"""Name of the conversation that a chat begins with."""


@dataclass
class Conversation:
    """A session, and the tokens that it had before each question."""

    session: Session
    document: str = ""
    starts: list[int] = field(default_factory=list)

    @property
    def ids(self) -> Tensor:
        """``[S]`` tokens so far."""
        ids = self.session.input_ids
        return torch.empty(0, dtype=torch.int64) if ids is None else ids[0].cpu()


class Chat:
    """Conversations by name, on every rank; all must follow the same commands."""

    def __init__(self, engine: MegaKVEngine, tokenizer: PreTrainedTokenizerBase, turns: Turns, options: dict[str, Any]):
        self._engine, self._tokenizer, self._turns, self._options = engine, tokenizer, turns, options
        self._first = engine.mesh.rank == 0
        self.interrupts = Interrupts()
        self._all = {FIRST: Conversation(engine.session())}
        self._name, self._notified = FIRST, False

    def names(self) -> list[str]:
        """Of all conversations, the present one first."""
        return [self._name, *sorted(self._all.keys() - {self._name})]

    @property
    def present(self) -> Conversation:
        """The one that questions go to."""
        return self._all[self._name]

    def question(self, text: str) -> Command:
        """What a question is for all ranks."""
        present = self.present
        if present.starts:
            return Command("ask", keep=len(present.ids), ids=self._turns.next(text))
        ids = self._turns.first("\n\n".join(filter(None, [present.document, text])))
        # The document's part is there already.
        held = present.ids
        shared = min(len(held), ids.shape[1] - 1)
        differs = (held[:shared] != ids[0, :shared]).nonzero()
        keep = int(differs[0]) if len(differs) else shared
        return Command("ask", keep=keep, ids=ids[:, keep:])

    def read(self, document: str) -> None:
        """Put a document before the first question, which then finds it cached."""
        self.present.document = document
        self._generate(self._turns.first(document), streamer=None, **{**self._options, "max_new_tokens": 1})

    def follow(self, command: Command) -> None:
        """Do it, on every rank; what fails fails on all, and is said on rank 0."""
        try:
            self._do(command)
        except PeerLostError:
            raise
        except (ValueError, MegaKVError, OSError, torch.OutOfMemoryError) as error:
            if self._first:
                complain(error)

    def _do(self, command: Command) -> None:
        present, engine = self.present, self._engine
        match command.kind:
            case "ask":
                assert command.ids is not None
                present.session.cut_back(command.keep)
                streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
                report = self._generate(command.ids, streamer=streamer if self._first else None, **self._options)
                present.starts.append(command.keep)
                answer = self._tokenizer.decode(present.ids[-report.new_tokens :], skip_special_tokens=True)
                if self._first and not self._notified and not self._turns.keeps(answer):
                    complain("the chat template changes earlier answers; this conversation keeps them as they were")
                    self._notified = True
                end_answer(present.session, engine.module)
            case "undo":
                if not present.starts:
                    raise ValueError("/undo: nothing was asked yet")
                present.session.cut_back(present.starts.pop())
            case "fork":
                self._all[command.name] = replace(present, session=present.session.fork(), starts=list(present.starts))
                self._name = command.name
            case "switch":
                self._name = command.name
            case "save":
                folder, saved = Path(command.name), SavedChat(present.document, present.starts, len(present.ids))
                present.session.save(folder / SESSION_FOLDER)
                with engine.agreement.call():
                    engine.agreement.decide(lambda: write_whole(folder / CHAT_FILE, saved.to_json()))
            case "load":
                self._load(Path(command.name), command.saved)

    def _load(self, folder: Path, saved: SavedChat | None) -> None:
        assert saved is not None
        loaded = Conversation(self._engine.restore_session(folder / SESSION_FOLDER), saved.document, saved.starts)
        if len(loaded.ids) != saved.tokens:
            loaded.session.close()
            raise MegaKVError(f"{folder} is broken: {CHAT_FILE} and the session in it are not of one save")
        self.present.session.close()
        self._all[self._name] = loaded

    def _generate(self, ids: Tensor, *, streamer: TextStreamer | None, **options: Any) -> RunReport:
        engine, session = self._engine, self.present.session
        self.interrupts.begin()
        with ExitStack() as stack:
            stack.enter_context(prefill_bar(engine.module, shown=self._first and ids.shape[1] >= BAR_TOKENS))
            if self._first:
                options["stopping_criteria"] = [self.interrupts.stop]
                for layer in decoder_layers(engine.module)[1]:
                    stack.callback(layer.register_forward_hook(self.interrupts.check).remove)
            session.generate(ids.to(engine.mesh.device), streamer=streamer, **options)
        report = engine.report()
        if self._first:
            stopped = ["stopped"] if self.interrupts.stopped else []
            print(f"[{', '.join(stopped + _speeds(report, ids.shape[1], answered=streamer is not None))}]", flush=True)
            engine.tracker.log_report(report)
        return report


def _speeds(report: RunReport, read: int, *, answered: bool) -> list[str]:
    """What a turn took."""
    parts = [f"{read:,} tokens read" + ("" if report.ttft_s is None else f" in {report.ttft_s:.2f} s")]
    if answered:
        parts.append(f"{report.new_tokens} generated")
    if answered and report.ttit_s:
        parts.append(f"{1 / report.ttit_s:.1f} tokens/s")
    return parts


def next_command(engine: MegaKVEngine, prompt: Prompt | None, beat_s: float) -> Command:
    """What rank 0, which has the prompt, reads, on every rank, however long that takes."""

    def said(command: Command | None) -> Command | None:
        with engine.agreement.call(), on_device(engine.mesh.device):
            return engine.agreement.decide(lambda: command)

    if prompt is not None:
        with _beating(lambda: said(None), beat_s if engine.agreement.shared else None):
            read = prompt.next()
        said(read)
        return read
    while (command := said(None)) is None:
        pass
    return command


@contextmanager
def _beating(beat: Any, seconds: float | None) -> Iterator[None]:
    """Do something every so often meanwhile, in a thread: whoever types may take hours."""
    if seconds is None:
        yield
        return
    done = threading.Event()

    def keep_beating() -> None:
        try:
            while not done.wait(seconds):
                beat()
        except BaseException as error:
            # Nobody else would tell whoever sits before the prompt.
            sys.stderr.write(f"\nmegakv: error: {error}\n")
            leave(1)

    thread = threading.Thread(target=keep_beating, name="megakv-prompt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main() -> None:
    """Entry of every rank."""
    with rank_arguments(__doc__, add_arguments) as arguments:
        check_job_arguments(arguments)
        config = run_config(arguments)
        tokenizer = read_tokenizer(arguments.model)
        document = read_text(arguments.document, "--document").rstrip() if arguments.document else ""
        with init_inference(arguments.model, config) as engine:
            gc.freeze()
            torch.manual_seed(arguments.seed)
            turns = Turns(tokenizer, chat=not arguments.no_chat_template)
            chat = Chat(engine, tokenizer, turns, generation_options(arguments, tokenizer, engine.module))
            prompt = None
            if own_rank() == 0:
                prompt = Prompt(chat.interrupts, chat.question, chat.names)
                chat.interrupts.install()
                if arguments.pid_file:
                    write_whole(arguments.pid_file, str(os.getpid()).encode())
                where = f"CP {engine.mesh.cp_size} x TP {engine.mesh.tp_size}"
                if not arguments.no_chat_template and (note := template_note(arguments.model, tokenizer)):
                    print(f"megakv: {note}", flush=True)
                print(f"megakv: {arguments.model} on {where}; /help lists the commands", flush=True)
            if document:
                chat.read(document)
            beat_s = min(BEAT_S, config.megakv.timeout_s / 4)
            while (command := next_command(engine, prompt, beat_s)).kind != "exit":
                chat.follow(command)
            written, upload = engine.tracker.written, engine.tracker.wandb_upload
        print_files(written.items(), upload)


if __name__ == "__main__":
    main()

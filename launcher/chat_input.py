"""What rank 0 of ``megakv chat`` is told by whoever types: questions, commands and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from megakv.base.errors import MegaKVError

HELP = {
    "/save DIR": "write this conversation to a folder, keys and values included",
    "/load DIR": "go on with a saved conversation in place of this one",
    "/fork NAME": "go on in a copy of this conversation, under that name",
    "/switch NAME": "go on in another conversation; without a name: list them",
    "/undo": "forget the last question and its answer",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does; Ctrl-C ends an answer",
}
CHAT_FILE, SESSION_FOLDER = "chat.json", "session"
"""What the folder of a saved conversation holds."""


@dataclass(frozen=True)
class SavedChat:
    """What a folder holds beside the session."""

    document: str
    starts: list[int]
    """Tokens before each question."""
    tokens: int

    def to_json(self) -> bytes:
        """The content of `CHAT_FILE`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, folder: str) -> SavedChat:
        """That of a folder; a ValueError if it has none, or a broken one."""
        path = Path(folder) / CHAT_FILE
        try:
            saved = cls(**json.loads(path.read_text(encoding="utf-8")))
            counts = [*saved.starts, saved.tokens]
            valid = all(type(count) is int for count in counts) and sorted({-1, *counts}) == [-1, *counts]
        except OSError as error:
            raise ValueError(f"{folder} holds no saved chat: {CHAT_FILE} cannot be read ({error.strerror})") from error
        except (ValueError, TypeError, RecursionError):
            valid = False
        if not valid or not isinstance(saved.document, str):
            raise ValueError(f"{path} is broken: it describes no chat")
        return saved


@dataclass(frozen=True)
class Command:
    """What all ranks do next."""

    kind: Literal["ask", "save", "load", "fork", "switch", "undo", "exit"]
    name: str = ""  # Of a folder or a conversation.
    keep: int = 0
    """Tokens of the session before those of a question."""
    ids: Tensor | None = None
    saved: SavedChat | None = None


class Interrupts:
    """Ctrl-C: at the prompt a KeyboardInterrupt, in an answer its end."""

    def __init__(self) -> None:
        self._at_prompt = self._wanted = self._begun = False

    def install(self) -> None:
        """Handle the signal from now on."""
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._at_prompt:
            raise KeyboardInterrupt
        self._wanted = True

    @contextmanager
    def at_prompt(self) -> Iterator[None]:
        """While a line is read."""
        self._at_prompt = True
        try:
            yield
        finally:
            self._at_prompt = False

    def begin(self) -> None:
        """An answer begins."""
        self._wanted = self._begun = False

    @property
    def stopped(self) -> bool:
        """Whether the answer was ended."""
        return self._wanted and self._begun

    def check(self, *_: Any) -> None:
        """Between the layers of an answer's first pass: give it up, there is nothing of it yet."""
        if self._wanted and not self._begun:
            raise MegaKVError("stopped before the first token: the question is forgotten")

    def stop(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Behind every token: whether it is the last one, as a stopping criterion says it."""
        self._begun = True
        return torch.tensor([self._wanted])


class Prompt:
    """Reads lines, by readline where both ends are a terminal, until one is a command for all ranks."""

    def __init__(self, interrupts: Interrupts, question: Callable[[str], Command], names: Callable[[], list[str]]):
        """`question` makes a command of a question; `names` are those of the conversations, the present one first."""
        self._interrupts, self._question, self._names = interrupts, question, names
        if isinstance(sys.stdin, io.TextIOWrapper):
            # What is no UTF-8 is no reason to end.
            sys.stdin.reconfigure(errors="replace")
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self._terminal:
            with suppress(ImportError):
                # Whoever has it, has a history and can edit lines.
                import readline  # noqa: F401

    def next(self) -> Command:
        """The next command that all ranks follow; what is wrong is said, and the next line read."""
        while True:
            try:
                with self._interrupts.at_prompt():
                    line = self._line()
            except KeyboardInterrupt:
                print("\n/exit or Ctrl-D leaves", flush=True)
                continue
            try:
                command = Command("exit") if line is None else self._command(line)
            except (ValueError, MegaKVError, OSError) as error:
                complain(error)
                continue
            if command is not None:
                return command

    def _line(self) -> str | None:
        if not self._terminal:
            return sys.stdin.readline() or None
        try:
            return input(f"{self._names()[0]}> " if len(self._names()) > 1 else "> ")
        except EOFError:
            print(flush=True)
            return None

    def _command(self, line: str) -> Command | None:
        if not line.startswith("/"):
            return self._question(line.strip()) if line.strip() else None
        name, _, rest = (part.strip() for part in line[1:].partition(" "))
        match name, rest:
            case "help", "":
                print("\n".join(f"{command:<13} {meaning}" for command, meaning in HELP.items()), flush=True)
                return None
            case "switch", "":
                print(", ".join(self._names()), flush=True)
                return None
            case (("exit" | "undo"), ""):
                return Command(name)
            case (("exit" | "undo" | "help"), _):
                raise ValueError(f"/{name} {rest}: /{name} takes no argument")
            case (("save" | "load" | "fork"), ""):
                raise ValueError(f"/{name}: a {'NAME' if name == 'fork' else 'DIR'} is missing")
            case "save", _:
                return Command("save", _new_folder(rest))
            case "load", _:
                folder = _absolute(rest)
                return Command("load", folder, saved=SavedChat.read(folder))
            case "fork", _ if rest in self._names():
                raise ValueError(f"/fork {rest}: there is one of that name; /switch {rest} goes on in it")
            case "switch", _ if rest not in self._names():
                raise ValueError(f"/switch {rest}: allowed: {', '.join(self._names())}")
            case (("fork" | "switch"), _):
                return Command(name, rest)
        raise ValueError(f"/{name} is no command: /help lists them; put a space before a question that begins with /")


def complain(error: BaseException | str) -> None:
    """One line about what could not be done."""
    sys.stderr.write(f"megakv: {(str(error).splitlines() or [type(error).__name__])[0]}\n")
    sys.stderr.flush()


def _absolute(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))


def _new_folder(name: str) -> str:
    """Where a conversation may be saved: nothing that is not one is written into."""
    folder = _absolute(name)
    held = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if CHAT_FILE not in held and (held - {SESSION_FOLDER} or os.path.isfile(folder)):
        raise ValueError(f"/save {name}: it exists and holds no saved chat; name a new or empty folder")
    return folder

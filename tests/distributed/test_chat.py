"""``megakv chat`` on two ranks: by lines from a pipe, and at a terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megakv.engine.session_files import read_meta, read_tokens
from tests.distributed.launch import GRACE_S, ROOT, run_ranks
from tests.distributed.models import prose, save_model, word_tokenizer
from tests.patience import Patience, alive_after, status_within

SCRIPT = Path(__file__).parent / "ranks" / "chat.py"
NEW_TOKENS = 5
TIMEOUT_S, WAIT_S = 12, 15
POSITIONS = 32768
DOCUMENT = prose(300)


class Plain:
    """Plain transformers, given the whole conversation each time."""

    def __init__(self, model: Path):
        self._model, self._tokenizer = AutoModelForCausalLM.from_pretrained(model), word_tokenizer()

    def ask(self, history: Tensor, question: str) -> Tensor:
        """``[1, S]`` the conversation with the answer; an empty one begins with the document."""
        text = question if history.shape[1] else f"{DOCUMENT}\n\n{question}"
        ids = self._tokenizer(f"<user> {text} <assistant>", return_tensors="pt").input_ids
        return self._model.generate(
            torch.cat([history, ids], dim=1), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )

    def text(self, conversation: Tensor) -> str:
        """The last answer's."""
        return str(self._tokenizer.decode(conversation[0, -NEW_TOKENS:], skip_special_tokens=True))


def saved(folder: Path) -> Tensor:
    """The tokens of a saved conversation."""
    return read_tokens(folder / "session", read_meta(folder / "session"))[0]


def test_conversations_from_a_pipe(tmp_path: Path, write_json: Callable[[str, Any], Path]) -> None:
    model = save_model(tmp_path / "model", chat=True, max_position_embeddings=POSITIONS)
    (tmp_path / "document").write_text(DOCUMENT + "\n")
    config = {"dtype": "fp32", "megakv": {"context_parallel": {"size": 2}, "timeout_s": TIMEOUT_S}}
    lines = [
        *("/undo", "aa bb cc", f"/save {tmp_path}/one", "/fork side", "dd ee", f"/save {tmp_path}/side"),
        # Rank 1 waits longer than for any answer.
        [str(tmp_path / "side" / "chat.json"), WAIT_S],
        *("/switch main", "ff", f"/save {tmp_path}/two", "/undo", f"/save {tmp_path}/undone", "", "/help"),
        *("/nonsense", "/switch nowhere", "/fork side", f"/load {tmp_path}", f"/save {tmp_path}"),
        *(prose(POSITIONS), "/save", f"/save {tmp_path}/before"),
        # All of that is done.
        [str(tmp_path / "before" / "chat.json"), 0],
        {"interrupted": prose(POSITIONS // 2)},
        f"/save {tmp_path}/stopped",
        *(f"/load {tmp_path}/one", "gg hh", f"/save {tmp_path}/three", "/undo", "/undo", f"/save {tmp_path}/none"),
        "ii jj",
    ]
    arguments = ["--model", model, "--config", write_json("config.json", config), "--document", tmp_path / "document"]
    typed = write_json("lines.json", lines)
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    result = run_ranks(
        SCRIPT, typed, *arguments, "--max-new-tokens", str(NEW_TOKENS), "--wandb", "p", ranks=2, timeout=120, env=env
    ).check()

    plain, nothing = Plain(model), torch.empty(1, 0, dtype=torch.int64)
    one = plain.ask(nothing, "aa bb cc")
    expected = {"one": one, "side": plain.ask(one, "dd ee"), "two": plain.ask(one, "ff"), "undone": one, "stopped": one}
    expected["three"] = plain.ask(one, "gg hh")
    for name, tokens in expected.items():
        assert torch.equal(saved(tmp_path / name), tokens), name
    # The document stays: it was read before anything was asked.
    assert torch.equal(saved(tmp_path / "none"), one[:, : 1 + 300])
    for conversation in (*expected.values(), plain.ask(nothing, "ii jj")):
        assert plain.text(conversation) in result.stdout
    read = [int(count) for count in re.findall(r"^\[(\d+) tokens read", result.stdout, re.MULTILINE)]
    # The document once, then what is new in each turn.
    assert read == [302, 4, 4, 3, 4, 3]
    complaints = [line for line in result.stderr.splitlines() if line.startswith("megakv: ")]
    assert [complaint.split(":")[1].split()[0] for complaint in complaints] == [
        *("/undo", "/nonsense", "/switch", "/fork", str(tmp_path), "/save", "the", "/save", "stopped"),
    ]
    assert f"the model has positions for {POSITIONS}" in complaints[6]
    assert "/save DIR" in result.stdout
    [directory] = tmp_path.glob("wandb/offline-run-*")
    assert result.stdout.endswith(f"W&B run: {directory}\nupload the W&B run: wandb sync {directory}\n")
    # A picture of every turn that had a first token.
    assert len(list(directory.glob("files/media/images/timeline_*.png"))) == len(read)


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *command: str | Path):
        self._fd, child = pty.openpty()
        self.before = termios.tcgetattr(child)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megakv", *map(str, command)],
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=ROOT,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._child, self._shown = child, ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Wait until what is shown matches; what comes after that is what is looked at next."""
        patience = Patience(seconds)
        while (found := re.search(pattern, self._shown)) is None:
            if select.select([self._fd], [], [], 0.1)[0]:
                self._shown += os.read(self._fd, 1 << 16).decode(errors="replace")
            assert not patience.over, f"no {pattern!r} within {seconds} s in {self._shown!r}"
        self._shown = self._shown[found.end() :]
        return found

    def interrupt(self, pattern: str) -> re.Match[str]:
        """Ctrl-C until it is shown: in the instant in which readline begins, one is only seen with the next key."""
        for _ in range(5):
            self.type("\x03")
            with suppress(AssertionError):
                return self.expect(pattern, 12)
        return self.expect(pattern)

    def end(self) -> int:
        """The exit status; the terminal is as it was."""
        status = status_within(60, self._process)
        assert termios.tcgetattr(self._child) == self.before
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for descriptor in (self._fd, self._child):
            os.close(descriptor)


def test_asked_to_end(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "megakv", "chat", "no-model", "--cp", "2"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, cwd=ROOT, env=env)
    patience = Patience(60)
    while not (family := psutil.Process(process.pid).children(recursive=True)) or not any(tmp_path.iterdir()):
        assert process.poll() is None and not patience.over
        time.sleep(0.05)
    process.terminate()
    assert status_within(30, process) == 128 + signal.SIGTERM
    assert not any(tmp_path.iterdir()) and not alive_after(GRACE_S, family)


def test_terminal(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", chat=True, max_position_embeddings=1 << 20)
    terminal = Terminal("chat", model, "--cp", "2", "--max-new-tokens", "1000000")
    try:
        terminal.expect(r"/help lists the commands\r\n> ", 120)
        terminal.type("aa b")
        terminal.expect("aa b")
        terminal.interrupt(r"/exit or Ctrl-D leaves\r\n> ")
        terminal.type("aa bb cc\r")
        terminal.expect(r"cc\r\n(\w\w ){3}")
        terminal.type("\x03")
        terminal.expect(r"\[stopped, 5 tokens read in .*, \d+ generated, .* tokens/s\]\r\n> ")
        # The line before comes back by the cursor key, and the conversation goes on.
        terminal.type("\x1b[A\r")
        terminal.expect(r"(\w\w ){3}")
        terminal.type("\x03")
        terminal.expect(r"\[stopped, 5 tokens read .*\]\r\n> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()

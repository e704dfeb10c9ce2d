"""The command line of a benchmark: what is wrong is refused before anything is done."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from megakv.tracking.config import check_project
from megakv.tracking.files import check_outputs

DTYPES = ("fp32", "bf16", "fp16")
UNITS = {"K": 1 << 10, "M": 1 << 20}
SHAPE = {
    "layers": (8, "decoder layers"), "hidden": (1024, "hidden size"), "heads": (16, "query heads"),
    "kv_heads": (4, "key-value heads"), "intermediate": (2816, "width of the MLP"), "vocab": (32000, "vocabulary"),
}  # fmt: skip


def check_memory(needed: float, available: float, words: str) -> None:
    """Refuse what does not fit into so many bytes."""
    if needed > available:
        raise ValueError(
            f"{words} needs {needed / 2**30:.1f} GiB; at most {available / 2**30:.1f} GiB are taken here: ask for fewer"
        )


class Options(argparse.ArgumentParser):
    """Options whose types follow from their defaults.

    A default may be several: of the mode ``quick`` or ``gpu``, of a ``--device``, and ``""`` of all others.
    """

    def __init__(self, text: str | None):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        # By destination: name, defaults by mode, and what makes the value of what was given, or refuses it.
        self._known: dict[str, tuple[str, dict[str, Any], Callable[[str, Any], Any] | None]] = {}
        self._shaped = False

    def add(
        self,
        name: str,
        default: Any,
        text: str,
        *,
        kind: Any = None,
        least: float | None = None,
        convert: Callable[[str, Any], Any] | None = None,
        **more: Any,
    ) -> None:
        """A number, which is above 0, or from `least` on; a text; or, where the default is False, a switch."""
        if default is False:
            self.add_argument(name, action="store_true", help=text)
            return
        modes = default if isinstance(default, dict) else {"": default}
        kind = kind or type(next(iter(modes.values())))
        shown = ", ".join(f"{mode}: {value}" if mode else f"{value}" for mode, value in modes.items())
        text = text if default is None else f"{text} (default {shown})"
        dest = self.add_argument(name, type=kind, help=text, **more).dest
        self._known[dest] = name, modes, partial(self._number, least) if kind in (int, float) else convert

    def numbers(self, name: str, default: Any, text: str, *, kind: Any = int, most: float = float("inf")) -> None:
        """A list such as ``1,4`` or ``8K,1M`` of numbers above 0, ascending, each once."""
        self.add(name, default, text, kind=str, convert=partial(self._numbers, kind, most))

    def names(self, name: str, allowed: Collection[str], default: Any, text: str) -> None:
        """A list of some of the names allowed."""
        convert = partial(self.some_of, allowed=allowed)
        self.add(name, default, f"{text}, of {','.join(allowed)}", kind=str, convert=convert)

    def choice(self, name: str, allowed: Sequence[str], default: Any, text: str) -> None:
        """One of the words allowed."""
        self.add(name, default, text, kind=str, choices=allowed)

    def hidden(self, *names: str) -> None:
        """Options that the process that starts the ranks gives them."""
        for name in names:
            self.add_argument(name, help=argparse.SUPPRESS)

    def output(self) -> None:
        self.add("--json", None, "write the results to this file, and charts (PNG) beside it", kind=str)
        self.add("--wandb", None, "log them to this W&B project, offline unless logged in", kind=str)

    def ranks(self, *, timeout_s: float = 3600.0) -> None:
        """Options of every benchmark of several ranks."""
        self.add("--ranks", None, "processes to start on this machine", kind=int, required=True)
        self.add("--threads", 1, "threads of every rank")
        self.add("--timeout", timeout_s, "seconds after which all is ended")
        self.output()
        self.hidden("--part")

    def profile(self, default: Any = 0.0) -> None:
        text = "measure a hardware profile for so long, and predict every method; 0: no predictions"
        self.add("--profile-seconds", default, text, least=0, kind=float)

    def model(self, *, without: Collection[str] = (), **defaults: int) -> None:
        """The shape of the model that is measured; a benchmark may have defaults of its own (``kv_heads=16``)."""
        self._shaped = True
        for name, (value, text) in SHAPE.items():
            if name not in without:
                self.add(f"--{name.replace('_', '-')}", defaults.get(name, value), text)
        self.choice("--dtype", DTYPES, "fp32", "of weights and activations")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The arguments; ends with a message if one is impossible."""
        arguments = self.parse_args(argv)
        asked = [mode for mode in ("gpu", "quick") if getattr(arguments, mode, False)]
        for dest, (name, modes, convert) in self._known.items():
            value = getattr(arguments, dest)
            if value is None:
                wanted = (*asked, getattr(arguments, "device", ""), "")
                value = next(modes[mode] for mode in wanted if mode in modes)
            setattr(arguments, dest, value if value is None or convert is None else convert(name, value))
        try:
            check_project(getattr(arguments, "wandb", None))
            check_outputs({"--json": getattr(arguments, "json", None)})
        except ValueError as error:
            self.error(str(error))
        if self._shaped:
            self._check_heads(arguments)
        return arguments

    def some_of(self, name: str, text: str, allowed: Collection[str]) -> list[str]:
        """Names in a list."""
        names = text.split(",")
        if set(names) - set(allowed) or len(set(names)) < len(names):
            self.error(f"{name} {text}: allowed: each of {', '.join(allowed)} once")
        return names

    def check_kv_shards(self, kv_heads: int, ranks: int, remedy: str = "take other numbers") -> None:
        """DeepSpeed's tensor parallelism would give some of so many ranks no KV head."""
        if kv_heads % ranks:
            self.error(
                f"--kv-heads {kv_heads} is no multiple of {ranks} ranks: DeepSpeed's tensor parallelism would leave "
                f"ranks without heads; {remedy}"
            )

    def _numbers(self, kind: Any, most: float, name: str, text: str) -> list[Any]:
        try:
            parts = [(part, UNITS.get(part[-1:].upper(), 1)) for part in text.split(",")]
            numbers = sorted({kind(part if unit == 1 else part[:-1]) * unit for part, unit in parts})
        except ValueError:
            numbers = [0]
        if numbers[0] <= 0 or numbers[-1] > most:
            allowed = "whole numbers from 1 on" if kind is int else "numbers above 0"
            allowed += f" and up to {most:g}" * (most < 1e9)
            self.error(f"{name} {text}: allowed: {allowed}, separated by commas")
        return numbers

    def _number(self, least: float | None, name: str, value: float) -> float:
        if value <= 0 if least is None else value < least:
            self.error(f"{name} {value:g}: allowed: " + ("above 0" if least is None else f"{least:g} or more"))
        return value

    def _check_heads(self, arguments: argparse.Namespace) -> None:
        if arguments.hidden % (2 * arguments.heads):
            self.error(f"--hidden {arguments.hidden} is no multiple of twice --heads {arguments.heads}")
        several = arguments.kv_heads if isinstance(arguments.kv_heads, list) else [arguments.kv_heads]
        for kv_heads in several:
            if arguments.heads % kv_heads:
                self.error(f"--heads {arguments.heads} is no multiple of --kv-heads {kv_heads}")

"""Blocks of an answer: text, reasoning, and each call of a tool, in their order, of which the last alone is open."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.http.parts import MoreArguments, Part

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """One of them, as far as it has come."""

    kind: Kind
    index: int
    name: str = ""
    """Of the function that is called."""
    text: str = ""
    """What it says; of a call its arguments."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])


class Step(Enum):
    """What becomes of a block."""

    BEGUN, MORE, ENDED = "begun", "more", "ended"


News = tuple[Step, Block, str]
"""The last is what a block's text has more."""


class Blocks:
    """Makes blocks of an answer's parts as they come."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._blank = ""

    @property
    def text(self) -> str:
        """All text of the answer."""
        return self._of("text")

    @property
    def reasoning(self) -> str:
        """All of its reasoning."""
        return self._of("reasoning")

    @property
    def calls(self) -> list[Block]:
        """Its calls."""
        return [block for block in self.all if block.kind == "call"]

    def add(self, part: Part) -> Iterator[News]:
        """What one more part changes."""
        if isinstance(part, ToolCall):
            yield from self._begin("call", part.name)
            yield from self._more(part.arguments)
        elif isinstance(part, MoreArguments):
            yield from self._more(part.text)
        elif isinstance(part, ReasoningText):
            yield from self._said("reasoning", str(part))
        elif self._kind != "text" and not (self._blank + part).strip():
            # Models leave lines between what they think, say and call: a block of nothing else is none.
            self._blank += part
        else:
            yield from self._said("text", self._blank + part)

    def end(self, *, empty: bool = False) -> Iterator[News]:
        """Close the last block; an answer of nothing has one of no text where it may be `empty`."""
        if not self.all and (self._blank or empty):
            yield from self._said("text", self._blank)
        yield from self._close()

    @property
    def _kind(self) -> Kind | None:
        return None if self._open is None else self._open.kind

    def _of(self, kind: Kind) -> str:
        return "".join(block.text for block in self.all if block.kind == kind)

    def _said(self, kind: Kind, text: str) -> Iterator[News]:
        if self._kind != kind:
            yield from self._begin(kind)
        yield from self._more(text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[News]:
        yield from self._close()
        self._blank, self._open = "", Block(kind, len(self.all), name)
        self.all.append(self._open)
        yield Step.BEGUN, self._open, ""

    def _more(self, text: str) -> Iterator[News]:
        if text and self._open is not None:
            self._open.text += text
            yield Step.MORE, self._open, text

    def _close(self) -> Iterator[News]:
        if self._open is not None:
            yield Step.ENDED, self._open, ""
            self._open = None

"""An answer in parts: text, reasoning and calls of tools, as the model's answer template marks them."""

from __future__ import annotations

import uuid
from typing import Any, TypeAlias

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser

from megakv.serving.http.served_model import ServedModel

PREFIX_TOKENS = 256
"""Of a prompt's end: the beginning of the answer stands in it, where the chat template writes one."""
Part: TypeAlias = "str | ReasoningText | ToolCall"


class AnswerParts:
    """Cuts one answer's text into parts as it comes; without a template, or of a form, it is all text."""

    def __init__(
        self, served: ServedModel, prompt: tuple[int, ...], tools: list[dict[str, Any]] | None, *, formed: bool = False
    ):
        self._parser: Any = None
        self._begun: list[Part] = []
        if served.answer_template is not None and not formed:
            prefix = served.tokenizer.decode(list(prompt[-PREFIX_TOKENS:]))
            self._parser = ResponseParser(served.answer_template, prefix=prefix, tools=tools)
            self._begun = response_events_to_chunks(self._parser.initial_events)

    def add(self, text: str, *, last: bool) -> list[Part]:
        """The parts that are complete, or more of the present one."""
        found, self._begun = self._begun, []
        if self._parser is None:
            return [text] if text else []
        found += response_events_to_chunks(self._parser.feed(text))
        if last:
            try:
                found += response_events_to_chunks(self._parser.finalize()[1])
            except (ValueError, RuntimeError):
                # It ended in the midst of a call, of which nothing can be made.
                return found
        return found


def call_id() -> str:
    """A name for a call of a tool."""
    return f"call_{uuid.uuid4().hex[:24]}"

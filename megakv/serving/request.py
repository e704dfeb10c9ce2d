"""What is asked of a served model, and what comes back while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megakv.serving.form import Form


@dataclass(frozen=True)
class Sampling:
    """How a request's next tokens are chosen from their logits; of temperature 0 the most likely one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    """Before so many have come, none does that ends the answer."""


@dataclass(frozen=True)
class Progress:
    """So many of a prompt's tokens were found in the prefix store, and so many are read by now, these included."""

    cached: int
    read: int
    total: int
    ranks: tuple[int, ...] = ()
    """Of those read, how many each context-parallel rank holds, once a pass has read some."""


@dataclass(frozen=True)
class Token:
    """The next token of an answer; where they were asked for, its log probability and the likeliest ones'."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scored:
    """The next tokens of a prompt, from its second one on, with their log probabilities behind those before them."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Finished:
    """No more tokens come. `why` is "error" where the message says what failed."""

    why: Literal["stop", "length", "cancelled", "error"]
    message: str = ""


Event = Progress | Scored | Token | Finished


@dataclass(frozen=True, eq=False)
class Request:
    """One answer to one prompt.

    `sink` is called for every event, in the order of events, by the thread that computes: it must return at once.
    Those of higher `priority` are admitted first, and among equals `key`s take turns, and `user`s of a key. After a
    token of `stop_ids`, which is given out, the answer ends.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sink: Callable[[Event], None]
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Where it is there, the prompt's tokens are told with their log probabilities, and so many of the likeliest
    ones'. It is read whole then, in passes of its own, and not kept."""
    priority: int = 0
    user: str = ""
    key: str = ""
    form: Form | None = None
    """That its text must have."""
    compresses: bool = False
    """Whether its cache is compressed to the engine's budget when the prompt has been read."""
    prompt_lookup: int | None = None
    """Of its next tokens, so many at most are looked up in those before and checked in one pass; None for as many as
    the server's setting says, of which it takes no more."""

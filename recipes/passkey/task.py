"""The pass-key task: a number hidden in English prose, and the question that asks for it.

Every function takes its randomness from the generator it is given: the same seed builds the same texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prose import SEPARATOR, load_prose, nearest_cut, prose_window
from transformers import AutoTokenizer, PreTrainedTokenizerBase

MODEL_DIR = Path(__file__).resolve().parent / "model"
DIGITS = 5
KEY_NAMES = (
    "pass", "river", "garden", "silver", "window", "music", "winter", "paper", "copper", "forest", "bridge",
    "harbor", "candle", "market", "orange", "rocket", "tunnel", "violet", "walnut", "yellow",
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """A text with one pass key in it.

    Attributes
    ----------
    text : str
        The text. ``tokenizer(text)`` gives exactly ``ids``.
    ids : tuple of int
        Its tokens.
    number : str
        The pass key, five digits.
    needle_start : int
        Index in ``ids`` of the first token of the needle.
    needle_end : int
        One past the index of its last token.
    """

    text: str
    ids: tuple[int, ...]
    number: str
    needle_start: int
    needle_end: int


@dataclass(frozen=True)
class Conversation:
    """A key given in the first turn and asked for later.

    Attributes
    ----------
    turns : tuple of str
        What the user says, to be appended one after another as it stands, with the model's answers (and, if the
        engine keeps it, the end-of-text token) between them. All turns but the first begin with ``SEPARATOR``.
    asks : tuple of bool
        Which turns end with the question.
    number : str
        The pass key, five digits.
    """

    turns: tuple[str, ...]
    asks: tuple[bool, ...]
    number: str


def load_tokenizer(model_dir: Path = MODEL_DIR) -> PreTrainedTokenizerBase:
    """Load the recipe's tokenizer.

    Parameters
    ----------
    model_dir : Path
        Folder with ``tokenizer.json``.

    Returns
    -------
    PreTrainedTokenizerBase
        The tokenizer.
    """
    return AutoTokenizer.from_pretrained(model_dir)


def random_number(rng: np.random.Generator) -> str:
    """Draw a five-digit number.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of randomness.

    Returns
    -------
    str
        The number, its first digit not zero.
    """
    return str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))


def needle(number: str, name: str = "pass") -> str:
    """Write the sentence that holds a number.

    Parameters
    ----------
    number : str
        The number.
    name : str
        Which key it is.

    Returns
    -------
    str
        The needle, with no white space around it.
    """
    return f"The {name} key is {number}. Remember it. {number} is the {name} key."


def question(name: str = "pass") -> str:
    """Write the question; the model continues it with ``answer(number)`` and the end-of-text token.

    Parameters
    ----------
    name : str
        Which key is asked for.

    Returns
    -------
    str
        The question, with no white space around it.
    """
    return f"What is the {name} key? The {name} key is"


def answer(number: str) -> str:
    """Write the continuation that is expected after the question.

    Parameters
    ----------
    number : str
        The number.

    Returns
    -------
    str
        The number with the space before it and the full stop after it.
    """
    return f" {number}."


def is_correct(continuation: str, number: str) -> bool:
    """Say whether a continuation gives the number exactly.

    Parameters
    ----------
    continuation : str
        What the model wrote after the question.
    number : str
        The number.

    Returns
    -------
    bool
        True when the continuation begins with this number and no further digit.
    """
    found = re.match(r"\s*(\d+)", continuation)
    return found is not None and found.group(1) == number


def document(
    n_tokens: int,
    depth: float,
    rng: np.random.Generator,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "held_out",
) -> Document:
    """Hide a pass key in prose.

    Parameters
    ----------
    n_tokens : int
        Greatest length of the document; it falls short of it by less than a word. At least 30.
    depth : float
        Where the needle lies: 0 at the beginning, 1 at the end.
    rng : numpy.random.Generator
        Source of randomness.
    tokenizer : PreTrainedTokenizerBase
        The recipe's tokenizer.
    split : {"train", "held_out"}
        Which prose.

    Returns
    -------
    Document
        The text, its tokens, and the number.
    """
    prose = load_prose(split, tokenizer)
    number = random_number(rng)
    # A needle before any prose begins the text; elsewhere a space divides it from the sentence before.
    leading, inner = (tokenizer(space + needle(number))["input_ids"] for space in ("", " "))
    room = n_tokens - len(inner)
    if room < 0:
        raise ValueError(f"a document needs at least {len(inner)} tokens, not {n_tokens}")
    start, stop = prose_window(room, rng, prose)
    cut = nearest_cut(start + round(depth * (stop - start)), start, stop, prose)
    # The window's own leading line break is dropped where nothing stands before it.
    before = prose.ids[start:cut].tolist()[_break_length(tokenizer) :]
    key = inner if before else leading
    ids = [*before, *key, *prose.ids[cut:stop].tolist()]
    return Document(tokenizer.decode(ids), tuple(ids), number, len(before), len(before) + len(key))


def prompt(
    n_tokens: int,
    depth: float,
    rng: np.random.Generator,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "held_out",
) -> Document:
    """Build a document followed by the question, ready for greedy generation.

    Parameters
    ----------
    n_tokens : int
        Greatest length of the whole prompt.
    depth, rng, tokenizer, split
        As for :func:`document`.

    Returns
    -------
    Document
        The prompt, its tokens, and the number.
    """
    tail = SEPARATOR + question()
    tail_ids = tokenizer(tail)["input_ids"]
    body = document(n_tokens - len(tail_ids), depth, rng, tokenizer, split)
    return Document(body.text + tail, body.ids + tuple(tail_ids), body.number, body.needle_start, body.needle_end)


def conversation(
    n_tokens: int,
    rng: np.random.Generator,
    tokenizer: PreTrainedTokenizerBase,
    split: str = "held_out",
    asks: tuple[bool, ...] = (False, True, False, True),
) -> Conversation:
    """Give a pass key in the first turn, other prose in the next ones, and the question alone in the last.

    Parameters
    ----------
    n_tokens : int
        Greatest length of all turns together.
    rng : numpy.random.Generator
        Source of randomness.
    tokenizer : PreTrainedTokenizerBase
        The recipe's tokenizer.
    split : {"train", "held_out"}
        Which prose.
    asks : tuple of bool
        Which turns end with the question; the last must.

    Returns
    -------
    Conversation
        The turns and the number.
    """
    prose = load_prose(split, tokenizer)
    ending = SEPARATOR + question()
    room = (n_tokens - sum(asks) * len(tokenizer(ending)["input_ids"])) // (len(asks) - 1)
    first = document(room, float(rng.random()), rng, tokenizer, split)
    turns = [first.text]
    for _ in asks[1:-1]:
        start, stop = prose_window(room, rng, prose)
        turns.append(tokenizer.decode(prose.ids[start:stop]))
    turns.append("")
    return Conversation(tuple(t + ending * ask for t, ask in zip(turns, asks, strict=True)), asks, first.number)


def _break_length(tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(SEPARATOR)["input_ids"])

"""The prose of the recipe: ``pydoc_data.topics``, which every CPython carries, so nothing is downloaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics

import numpy as np
from transformers import PreTrainedTokenizerBase

SEPARATOR = "\n\n"
# This share of the prose, its end, is kept out of training and used by the evaluation only.
HELD_OUT = 0.2


@dataclass(frozen=True)
class Prose:
    """One split of the prose as tokens, with the places where it may be cut.

    Attributes
    ----------
    ids : numpy.ndarray
        All tokens of the split.
    paragraphs, sentences, words : numpy.ndarray
        Sorted indices in ``ids`` at which a paragraph, a sentence or a word begins (its leading white space
        included). Cutting there leaves the tokens of both sides unchanged.
    """

    ids: np.ndarray
    paragraphs: np.ndarray
    sentences: np.ndarray
    words: np.ndarray


@lru_cache(maxsize=2)
def paragraphs(split: str) -> tuple[str, ...]:
    """List the paragraphs of one split of the prose.

    Parameters
    ----------
    split : {"train", "held_out"}
        Which part. The two have no paragraph in common: topics quote each other, so repeats are dropped.

    Returns
    -------
    tuple of str
        Paragraphs with their line breaks and indentation folded into single spaces.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split must be 'train' or 'held_out', not {split!r}")
    found: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            folded = " ".join(paragraph.split())
            # Rules of asterisks and lone section numbers are not prose.
            if len(folded) >= 40:
                found[re.sub(r" \*{10,}", "", folded)] = None
    kept = round(len(found) * (1 - HELD_OUT))
    return tuple(found)[:kept] if split == "train" else tuple(found)[kept:]


@lru_cache(maxsize=4)
def load_prose(split: str, tokenizer: PreTrainedTokenizerBase) -> Prose:
    """Tokenize one split of the prose and find where it may be cut.

    Parameters
    ----------
    split : {"train", "held_out"}
        Which part.
    tokenizer : PreTrainedTokenizerBase
        The recipe's tokenizer.

    Returns
    -------
    Prose
        The tokens and the cuts.
    """
    text = "".join(SEPARATOR + paragraph for paragraph in paragraphs(split))
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    index_of = {start: index for index, (start, _) in reversed(list(enumerate(encoded["offset_mapping"])))}

    def cuts(pattern: str) -> np.ndarray:
        places = (match.start() for match in re.finditer(pattern, text))
        return np.array([index_of[place] for place in places if place in index_of])

    return Prose(
        ids=np.array(encoded["input_ids"]),
        paragraphs=cuts(r"\n\n(?=[^\n])"),
        sentences=cuts(r"\n\n(?=[^\n])|(?<=[a-z\")][.?!]) (?=[A-Z])"),
        words=cuts(r"\n\n(?=[^\n])|(?<=\S) (?=\S)"),
    )


def prose_window(n_tokens: int, rng: np.random.Generator, prose: Prose) -> tuple[int, int]:
    """Choose a stretch of prose.

    Parameters
    ----------
    n_tokens : int
        Greatest length; the stretch ends at the last word that fits.
    rng : numpy.random.Generator
        Source of randomness.
    prose : Prose
        The split to choose from.

    Returns
    -------
    tuple of int
        First index, at the beginning of a paragraph, and one past the last.
    """
    starts = prose.paragraphs[prose.paragraphs + n_tokens <= len(prose.ids)]
    if not len(starts):
        raise ValueError(f"the prose has {len(prose.ids)} tokens, fewer than the {n_tokens} asked for")
    start = int(rng.choice(starts))
    words = int(np.searchsorted(prose.words, start + n_tokens, side="right"))
    return start, int(prose.words[words - 1])


def nearest_cut(place: int, low: int, high: int, prose: Prose) -> int:
    """Move a place back to where the prose may be cut.

    Parameters
    ----------
    place : int
        Wanted index.
    low, high : int
        The stretch in which the cut must lie.
    prose : Prose
        The split.

    Returns
    -------
    int
        The last beginning of a sentence in reach before ``place``, else of a word, else ``low``.
    """
    # Near the ends of a stretch a sentence's beginning may be far away, and the depth asked for would be missed.
    reach = max(low, place - (high - low) // 50)
    for cuts in (prose.sentences, prose.words):
        found = int(np.searchsorted(cuts, place, side="right")) - 1
        if found >= 0 and cuts[found] >= (reach if cuts is prose.sentences else low):
            return int(cuts[found])
    return low

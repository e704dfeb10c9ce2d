"""Tiny models with a tokenizer, as a user would have them on disk."""

import random
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.families import llama

POSITIONS = 512
WORDS = [first + second for first in ascii_lowercase[:10] for second in ascii_lowercase]
SPECIAL = ["<end>", "<unknown>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def word_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per word of `WORDS`, and a chat template if asked for."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def prose(words: int) -> str:
    """A text of that many tokens."""
    return " ".join(random.choices(WORDS, k=words))


def save_model(folder: Path, *, chat: bool = False, **changes: Any) -> Path:
    """A tiny Llama in several checkpoint shards, with its tokenizer; returns the folder."""
    tokenizer = word_tokenizer(chat=chat)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS, "eos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(**{**settings, **changes}), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    return folder

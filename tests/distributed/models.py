"""Tiny models with a tokenizer, as a user would have them on disk."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.families import llama

POSITIONS = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def byte_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per byte, and a chat template if asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 1, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([""], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def save_model(folder: Path, *, chat: bool = False, **changes: Any) -> Path:
    """A tiny Llama in several checkpoint shards, with its tokenizer; returns the folder."""
    tokenizer = byte_tokenizer(chat=chat)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS, "eos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(**{**settings, **changes}), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    return folder

"""Train the recipe's tokenizer: byte-level BPE on the prose, every digit a token of its own.

Usage: ``python recipes/passkey/tokenizer.py --output recipes/passkey/model``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from prose import paragraphs
from task import KEY_NAMES, MODEL_DIR, needle, question
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 768
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the training split of the prose.

    Returns
    -------
    PreTrainedTokenizerFast
        The tokenizer; its end-of-text token is also its padding.
    """
    tokenizer = Tokenizer(models.BPE())
    # Digits are split off first, so that no number has a token of its own to be memorised.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The key sentences are repeated until each of their words is worth a token.
    keys = [f"{needle('0', name)} {question(name)}" for name in KEY_NAMES] * 300
    tokenizer.train_from_iterator([*paragraphs("train"), *keys], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=16384,
    )


def main() -> None:
    """Train the tokenizer and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="folder for tokenizer.json")
    output = parser.parse_args().output
    train_tokenizer().save_pretrained(output)
    print(f"tokenizer written to {output}")


if __name__ == "__main__":
    main()

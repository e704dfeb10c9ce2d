"""Small tokenizers of the kinds that real models have: bytes as letters, and pieces with bytes for what is missing."""

import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ALPHABETS = ["abcdefghij ", "äöüßéñ ", "漢字仮名交じり文。", "😀🎉👩‍🔬🇩🇪", "אבגד ", "\n\t  ", "<|>[]{}"]


def random_text(letters: int) -> str:
    """Words of several scripts, with characters of one to four bytes and of several code points."""
    return "".join(
        "".join(random.choices(random.choice(ALPHABETS), k=random.randint(1, 6))) for _ in range(letters // 4)
    )


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's, Qwen's: every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", "<user>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([random_text(2000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral's: a space is a letter of its own, and a byte a token where there is no other."""
    pieces = [
        "<unk>",
        "<s>",
        "<end>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghij",
        "▁ab",
        "cd",
        "ä",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("c", "d")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>")


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}

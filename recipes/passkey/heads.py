"""Show which heads retrieve: the share of their attention that lies on the key while the model says it.

Usage: ``python recipes/passkey/heads.py``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from task import DIGITS, MODEL_DIR, Document, answer, load_tokenizer, prompt
from tqdm import tqdm
from transformers import LlamaForCausalLM

RESULTS_DIR = Path(__file__).resolve().parent / "results"


def retrieval_shares(model: LlamaForCausalLM, asked: Document, answer_ids: list[int]) -> dict[str, np.ndarray]:
    """Measure the attention of every head while the digits are predicted.

    Parameters
    ----------
    model : LlamaForCausalLM
        The model.
    asked : Document
        A prompt.
    answer_ids : list of int
        Tokens of the right answer: the space, the digits, the full stop.

    Returns
    -------
    dict of str to numpy.ndarray
        ``next_digit``, the share of attention on the digit about to be said, where the needle says it, and
        ``needle``, the share on the whole needle; layers by heads, averaged over the digits.
    """
    # Only the queries of the answer are looked at, so only they pay for attention that writes its weights out.
    model.set_attn_implementation("sdpa")
    cache = model(torch.tensor([asked.ids]), logits_to_keep=1).past_key_values
    model.set_attn_implementation("eager")
    output = model(torch.tensor([answer_ids[:DIGITS]]), past_key_values=cache, output_attentions=True)
    weights = torch.stack(output.attentions)[:, 0].numpy()
    needle_ids = list(asked.ids[asked.needle_start : asked.needle_end])
    said = [
        asked.needle_start + index
        for index in range(len(needle_ids) - DIGITS)
        if needle_ids[index : index + DIGITS + 1] == answer_ids[: DIGITS + 1]
    ]
    next_digit = sum(weights[:, :, digit, start + 1 + digit] for start in said for digit in range(DIGITS))
    on_needle = weights[..., asked.needle_start : asked.needle_end].sum(-1).mean(-1)
    return {"next_digit": np.asarray(next_digit) / DIGITS, "needle": on_needle}


def main() -> None:
    """Measure the heads from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR, help="folder for heads.json")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompts")
    parser.add_argument("--prompts", type=int, default=20, help="number of prompts, their depths spread evenly")
    parser.add_argument("--seed", type=int, default=4321, help="seed of the prompts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model)
    model = LlamaForCausalLM.from_pretrained(args.model).eval()
    rng = np.random.default_rng(args.seed)
    measured = []
    with torch.inference_mode():
        for index in tqdm(range(args.prompts)):
            asked = prompt(args.tokens, (index + 0.5) / args.prompts, rng, tokenizer)
            measured.append(retrieval_shares(model, asked, tokenizer(answer(asked.number))["input_ids"]))
    shares = {name: np.mean([each[name] for each in measured], axis=0) for name in measured[0]}
    record = {"tokens": args.tokens, "prompts": args.prompts, "seed": args.seed}
    record |= {name: np.round(share, 4).tolist() for name, share in shares.items()}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "heads.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, share in shares.items():
        print(f"{name} (rows: layers, columns: heads), percent")
        print("\n".join(" ".join(f"{100 * value:5.1f}" for value in row) for row in share))


if __name__ == "__main__":
    main()

"""Run by a Python of its own, in which kvpress is: the tokens that its presses keep of prompts.

Usage: kvpress_kept.py MODEL PROMPTS.json COUNT WINDOW OUT.json, prompts being lists of token ids; COUNT tokens are kept
of each by every head, on average.
"""

import json
import sys
from pathlib import Path

import torch
from kvpress import AdaKVPress, SnapKVPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache


def presses(count, window, length):
    """By the names of MegaKV's methods; without pooling, which MegaKV does by the maximum and kvpress by the mean."""
    # kvpress rounds the number of kept tokens down.
    ratio = 1 - (count + 0.5) / length
    snapkv = {"compression_ratio": ratio, "window_size": window, "kernel_size": 1}
    return {
        "streaming_llm": StreamingLLMPress(compression_ratio=ratio, n_sink=4),
        "snapkv": SnapKVPress(**snapkv),
        "ada_snapkv": AdaKVPress(SnapKVPress(**snapkv), alpha_safeguard=0.0),
    }


@torch.no_grad()
def kept(model, ids, press):
    """``[layer][KV head]`` places of what is kept."""
    whole, cache = DynamicCache(), DynamicCache()
    model.model(ids, past_key_values=whole)
    with press(model):
        model.model(ids, past_key_values=cache)
    found = []
    for number, layer in enumerate(model.model.layers):
        keys, left = whole.layers[number].keys[0], cache.layers[number].keys[0]
        same = (keys[:, :, None] == left[:, None]).all(-1).any(-1)
        # Presses of unequal heads leave the keys and mask them.
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        if masked is not None:
            same[masked[1], masked[2]] = False
            layer.self_attn.masked_key_indices = None
        found.append([row.nonzero().squeeze(-1).tolist() for row in same])
    return found


def main():
    """Entry."""
    folder, prompts, count, window, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    results = []
    for prompt in json.loads(Path(prompts).read_text()):
        ids = torch.tensor([prompt])
        results.append({name: kept(model, ids, press) for name, press in presses(count, window, len(prompt)).items()})
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

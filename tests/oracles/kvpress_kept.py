"""Run by a Python of its own, in which kvpress is: the tokens that its presses keep.

Usage: kvpress_kept.py MODEL CASES.json OUT.json. A case has `press`, the name of a class of kvpress, its `options`, and
`within`, the class of a press around it or null; `prompts`, lists of token ids, of which the last `steps` are read one
by one; and the `count` of tokens that every head keeps on average, with `steps` after every `interval` of them.
"""

import json
import sys
from pathlib import Path

import kvpress
import torch
from kvpress import DecodingPress, PrefillDecodingPress
from transformers import AutoModelForCausalLM, DynamicCache


class Recorder(DynamicCache):
    """Keeps the keys of every token beside those that a press leaves."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.seen.setdefault(layer_idx, []).append(key_states[0])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def press_of(case, ratio):
    """For a prompt that keeps the rest of a ratio, and for the steps behind it."""

    def one():
        press = getattr(kvpress, case["press"])(**case["options"], compression_ratio=ratio)
        around = case["within"]
        return press if around is None else getattr(kvpress, around)(press)

    if not case["steps"]:
        return one()
    decoding = DecodingPress(one(), compression_interval=case["interval"], target_size=case["count"])
    return PrefillDecodingPress(one() if ratio else None, decoding)


@torch.no_grad()
def kept(model, ids, case):
    """``[layer][KV head]`` places of what is kept."""
    cache, prompt = Recorder(), len(ids) - case["steps"]
    # kvpress rounds the number of kept tokens down, but for PyramidKV, which rounds later.
    kept = case["count"] + (0 if case["press"] == "PyramidKVPress" else 0.5)
    with press_of(case, max(0.0, 1 - kept / prompt))(model):
        for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, len(ids)))]:
            places = torch.arange(start, stop)
            tokens = torch.tensor([ids[start:stop]])
            model.model(tokens, past_key_values=cache, position_ids=places[None], cache_position=places)
    found = []
    for number, layer in enumerate(model.model.layers):
        keys, left = torch.cat(cache.seen[number], dim=1), cache.layers[number].keys[0]
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
    folder, cases, out = sys.argv[1:]
    results = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        # What observes the attention of a whole prompt wants to see its weights.
        kind = "eager" if case["press"] == "ObservedAttentionPress" else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()
        results[name] = [kept(model, ids, case) for ids in case["prompts"]]
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

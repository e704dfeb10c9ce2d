"""NVIDIA's kvpress as an oracle: its presses keep the same tokens.

It needs an older transformers than MegaKV, so it runs in an environment of its own, which `scripts/kvpress.sh` makes.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.launch import ROOT, run_ranks
from tests.families import VOCAB, llama

PYTHON = Path(os.environ.get("MEGAKV_KVPRESS_PYTHON", ROOT / ".venv-kvpress" / "bin" / "python"))
COUNT, INTERVAL = 120, 24

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no environment with kvpress ({PYTHON}): bash scripts/kvpress.sh makes one"
)


def safeguard(window: int) -> float:
    """For kvpress's fifth of what a head keeps, the window counted in."""
    return max(0.0, COUNT // 5 - window + 0.5) / (COUNT - window) if COUNT // 5 > window else 0.0


def case(method: str, press: str, section: dict[str, Any], options: dict[str, Any], **other: Any) -> dict[str, Any]:
    """One method beside one press, which keep as many tokens of prompts of some lengths."""
    own = {"within": None, "steps": 0, "interval": INTERVAL, "count": COUNT, "lengths": (251, 220, 400)} | other
    own["prompts"] = [[random.randrange(1, VOCAB) for _ in range(length)] for length in own.pop("lengths")]
    full = {"method": method, "budget": own["count"], "min_tokens": 64, **section}
    if own["steps"]:
        full["decode_interval"] = INTERVAL
    return own | {"section": full, "press": press, "options": options}


def cases() -> dict[str, dict[str, Any]]:
    """kvpress's defaults, but for windows; and evictions while decoding, where it has the same rule."""
    # Its default window, and one that leaves more to choose.
    default, small = ({"window": window, "pool": 5, "pooling": "mean"} for window in (64, 8))
    last = {"window": 1, "pool": 1}
    # Its pyramid has the window in what falls from layer to layer: of 180 tokens 351 and 9.
    pyramid = {**small, "decay": (180 - 8) / (9 - 8)}
    # Once compressed, its caches are not in the order of tokens any more: so one eviction, but for one query.
    once = {"steps": INTERVAL, "lengths": (COUNT + INTERVAL,) * 2}
    ada = {"within": "AdaKVPress"}
    return {
        "streaming_llm": case("streaming_llm", "StreamingLLMPress", {}, {}),
        "snapkv": case("snapkv", "SnapKVPress", default, {}),
        "snapkv, small window": case("snapkv", "SnapKVPress", small, {"window_size": 8}),
        "pyramidkv": case("pyramidkv", "PyramidKVPress", pyramid, {"window_size": 8}, count=180, lengths=(400, 500)),
        "h2o": case("h2o", "ObservedAttentionPress", {"recent": 0.0, "per_query": True}, {}),
        "ada_snapkv": case("ada_snapkv", "SnapKVPress", {**default, "safeguard": safeguard(64)}, {}, **ada),
        "ada_snapkv, small window": case(
            "ada_snapkv", "SnapKVPress", {**small, "safeguard": safeguard(8)}, {"window_size": 8}, **ada
        ),
        "streaming_llm, decoding": case("streaming_llm", "StreamingLLMPress", {}, {}, **once),
        "snapkv, decoding": case(
            "snapkv", "SnapKVPress", last, {"window_size": 1, "kernel_size": 1}, steps=3 * INTERVAL
        ),
        "ada_snapkv, decoding": case(
            "ada_snapkv",
            "SnapKVPress",
            {**last, "safeguard": safeguard(1)},
            {"window_size": 1, "kernel_size": 1},
            **once,
            **ada,
        ),
    }


def test_the_same_tokens_as_kvpress(tmp_path: Path) -> None:
    torch.manual_seed(random.getrandbits(32))
    # Sharp attention: scores differ by far more than the rounding of another transformers.
    model = AutoModelForCausalLM.from_config(llama(initializer_range=0.3), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    asked = cases()
    (tmp_path / "cases.json").write_text(json.dumps(asked))
    words = [tmp_path / "model", tmp_path / "cases.json"]
    script = Path(__file__).parent / "ranks" / "fairkv_kept.py"
    run_ranks(script, *words, tmp_path / "own.json", ranks=1, timeout=240).check()
    oracle = Path(__file__).parents[1] / "oracles" / "kvpress_kept.py"
    command = [PYTHON, oracle, *words, tmp_path / "theirs.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    own, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("own", "theirs"))
    wrong = {}
    for name, wanted in asked.items():
        for number, (found, expected) in enumerate(zip(own[name], theirs[name], strict=True)):
            for layer, (one, other) in enumerate(zip(found, expected, strict=True)):
                if one != other:
                    apart = [len(set(a) ^ set(b)) for a, b in zip(one, other, strict=True)]
                    wrong[name, number, layer] = [*map(len, one)], [*map(len, other)], apart
        counts = [len(head) for prompt in own[name] for layer in prompt for head in layer]
        heads = len(own[name][0]) * len(own[name][0][0]) * len(own[name])
        assert sum(counts) == heads * wanted["count"], name
        assert (len(set(counts)) > 1) == (wanted["within"] is not None or "Pyramid" in wanted["press"]), name
    assert not wrong, wrong

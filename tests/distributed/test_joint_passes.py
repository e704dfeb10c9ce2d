"""Chunks and single tokens of several sequences in one pass, prefixes shared, are the plain model on any mesh."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakv.attention.methods import decode_methods, prefill_methods
from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "joint_passes.py"
TOLERANCE = 1e-4
FAMILIES = ("llama", "mistral", "gpt_oss", "gemma3", "deepseek_v3")
"""Full attention, a window, a window and sinks, windows in some layers, latents."""


def plans(mesh: str, count: int) -> Iterator[dict[str, Any]]:
    """Every prefill and decode method, in drawn families; in some chains the last rank keeps all and decodes. Where
    the choice is free, short prompts are read whole by one rank each.
    """
    random = np.random.default_rng()
    prefill, decode = (random.permutation(names()).tolist() for names in (prefill_methods, decode_methods))
    found = []
    for index in range(count):
        methods = {"prefill": prefill[index % len(prefill)], "decode": decode[index % len(decode)]}
        section: dict[str, Any] = {"context_parallel": methods}
        if methods["prefill"] == "runahead" and random.random() < 0.5:
            methods["decode"], section["runahead"] = "auto", {"kv": "last"}
        found.append({"section": section, "together": bool(random.random() < 0.5)})
    free = {"context_parallel": {"prefill": "auto", "decode": "replicated"}}
    for run in [*found, {"section": free, "together": True}]:
        run |= {"family": str(random.choice(FAMILIES)), "mesh": mesh, "seed": int(random.integers(2**31))}
        yield run


@pytest.mark.parametrize(("mesh", "count"), [("2x1", 7), ("3x1", 6), ("1x2", 2)])
def test_joined_passes(mesh: str, count: int, tmp_path: Path) -> None:
    cp, tp = (int(part) for part in mesh.split("x"))
    runs = [each if cp > 1 else {**each, "section": {}} for each in plans(mesh, count)]
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text(json.dumps(runs))
    run_ranks(SCRIPT, plan, out, tmp_path, ranks=cp * tp, timeout=400).check()
    for run, result in zip(runs, json.loads(out.read_text()), strict=True):
        assert result["worst"] < TOLERANCE, (run, result)
        if cp > 1:
            asked = run["section"]["context_parallel"]
            prefill = "local" if asked["prefill"] == "auto" else asked["prefill"]
            assert prefill in result["methods"]["prefill"], (run, result)
            assert asked["decode"] in ("auto", *result["methods"]["decode"]), (run, result)

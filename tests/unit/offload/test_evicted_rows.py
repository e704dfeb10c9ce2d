"""Caches that are compressed again while decoding, on the accelerator and off it: bounded, and never corrupt."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.offload.method import AUTO
from tests.families import FAMILIES, VOCAB
from tests.held_rows import Rows, check_rows
from tests.unit.offload.conftest import SETTINGS

BUDGET, INTERVAL = 40, 9


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("alone", "fixed_costs")
@pytest.mark.parametrize(
    ("away", "dtype"),
    [*((way, "fp32") for way in ("here", "stream", "disk", AUTO, 4, 8)), *((bits, "bf16") for bits in (4, 8))],
)
@pytest.mark.parametrize("method", ["h2o", "ada_snapkv", "streaming_llm"])
def test_no_row_is_corrupt(
    pytestconfig: pytest.Config, tmp_path: Path, method: str, away: str | int, dtype: str
) -> None:
    """Over forks, copies of copies and cuts, each of which goes on by itself; a thousand steps with --full.

    In few bits what was rounded once is never rounded further.
    """
    torch.manual_seed(random.randrange(1 << 30))
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=kind).eval()
    fairkv = {"budget": BUDGET, "decode_interval": INTERVAL, "min_tokens": 50, "method": method}
    if method == "ada_snapkv":
        fairkv["window"] = 8
    offload: dict[str, Any] = {"enabled": False}
    if isinstance(away, int):
        offload = {**SETTINGS, "method": random.choice(("stream", "cpu_rank")), "kv_bits": away, "kv_group": 8}
    elif away != "here":
        offload = {**SETTINGS, "method": "stream" if away == "disk" else away, "emulated_link_gb_s": 0.2}
    if away == "disk":
        offload |= {"host_gb": 8 * 10 / (1 << 20), "disk_gb": 0.02, "disk_path": str(tmp_path)}
    ids = torch.randint(3, VOCAB, (1, 70))
    with megakv.init_inference(model, {"dtype": dtype, "megakv": {"fairkv": fairkv, "offload": offload}}) as engine:
        branches: list[tuple[Any, Rows]] = [(engine(ids).past_key_values, {})]
        for _ in range(1000 if pytestconfig.getoption("--full") else 120):
            index = random.randrange(len(branches))
            cache, known = branches[index]
            check_rows(cache, known, BUDGET + INTERVAL)
            kind = random.random()
            if kind < 0.05:
                branches = [*branches[-3:], (copy.deepcopy(cache), dict(known))]
            elif kind < 0.1 and cache.length > (least := max(cache.reach, 70)):
                cut = random.randint(least, cache.length - 1)
                cache.cut_back(cut)
                branches[index] = cache, {at: row for at, row in known.items() if at[2] < cut}
            new = torch.randint(3, VOCAB, (1, random.choice((1, 1, 1, 1, 5))))
            assert engine(new, past_key_values=cache).logits.isfinite().all()
        for cache, known in branches:
            check_rows(cache, known, BUDGET + INTERVAL)


@pytest.mark.drawn(3)
@pytest.mark.usefixtures("alone", "fixed_costs")
@pytest.mark.parametrize("method", ["h2o", "ada_snapkv", "streaming_llm"])
@pytest.mark.parametrize("piece", [1, 7, 100])
def test_what_is_evicted_is_the_same_wherever_it_lies(method: str, piece: int) -> None:
    """Also where a later turn is read in pieces, whose queries look at what earlier turns have left in host memory."""
    torch.manual_seed(random.randrange(1 << 30))
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.float32).eval()
    fairkv = {"budget": BUDGET, "decode_interval": INTERVAL, "min_tokens": 50, "method": method}
    first, second = (torch.randint(3, VOCAB, (1, length)) for length in (9, 64))
    greedy = {"do_sample": False, "pad_token_id": 2, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for offload in ({"enabled": False}, {**SETTINGS, "method": "stream"}):
        config = {"dtype": "fp32", "megakv": {"fairkv": fairkv, "offload": offload}}
        with megakv.init_inference(copy.deepcopy(model), config) as engine:
            session = engine.session()
            session.generate(first, max_new_tokens=3, **greedy)
            answer = session.generate(second, max_new_tokens=2 * INTERVAL, prefill_chunk_size=piece, **greedy)
            found.append(torch.cat(answer.logits))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

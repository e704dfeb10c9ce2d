"""Prompts of which nothing was cached, in one call, by CUDA's kernels as plain loops with their signatures."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention import prompts
from megakv.attention.reference import Scoring, dense_attention
from megakv.distributed.sharding import TokenBlock


def causal_loop(q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, rows: int, keys: int, scale: float) -> Any:
    """As FlashAttention has it: each sequence's queries are its last rows."""
    for bounds, total, longest in ((at_q, q.shape[1], rows), (at_k, k.shape[1], keys)):
        assert bounds.dtype == torch.int32 and bounds[-1] == total and bounds.diff().max() == longest
    outs, lses = [], []
    for (a, b), (c, d) in zip(pairwise(at_q.tolist()), pairwise(at_k.tolist()), strict=True):
        seen = torch.arange(d - c)[None] <= torch.arange(d - c - (b - a), d - c)[:, None]
        out, lse = dense_attention(q[:, a:b], k[:, c:d], v[:, c:d], scale, visible_LS=seen)
        outs.append(out.to(q.dtype))
        lses.append(lse.float())
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def test_prompts_of_several_sequences_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_agrees", lambda *case: True)
    monkeypatch.setattr(prompts, "_flash", causal_loop)
    for _ in range(5):
        lengths = [random.choice([0, 1, random.randint(2, 50)]) for _ in range(random.randint(2, 6))] + [7, 9]
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        slot = np.concatenate([np.arange(length) for length in lengths])
        new = TokenBlock(sequence, slot, slot, len(lengths))
        q, k, v = (torch.randn(heads, len(new), 16).to(torch.bfloat16) for heads in (4, 2, 2))
        made: dict[Any, Any] = {}

        def once(key: Any, make: Any, made: dict[Any, Any] = made) -> Any:
            return made.setdefault(key, make())

        last = np.array([new.run(each).stop - 1 for each, length in enumerate(lengths) if length])
        for queries, rows in ((new, np.arange(len(new))), (new.take(last), last)):
            found = prompts.several(q[:, rows], k, v, queries, new, 0.25, once)
            assert found is not None
            for row, at in enumerate(rows.tolist()):
                seen = slice(new.run(new.sequences[at]).start, at + 1)
                out, lse = dense_attention(q[:, at : at + 1], k[:, seen], v[:, seen], 0.25)
                torch.testing.assert_close(found[0][:, row].double(), out[:, 0], rtol=2e-2, atol=2e-2)
                torch.testing.assert_close(found[1][:, row].double(), lse[:, 0], rtol=1e-3, atol=1e-3)
        assert set(made) == {"prompts", "last of prompts"}
        assert prompts.several(q.float(), k.float(), v.float(), new, new, 0.25, once) is None
    monkeypatch.setattr(prompts, "CUDNN_OPERATIONS", 1.0)
    assert prompts.several(q, k, v, new, new, 0.25, once) is None


@pytest.mark.parametrize("case", ["whole", "last", "cached", "window", "one", "bias", "shared"])
def test_which_prompts_are_one_call(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of which nothing was cached, in layers whose windows leave nothing out."""
    calls = list[str]()
    monkeypatch.setattr(prompts, "several", lambda *given: calls.append("several") or (None, None))
    monkeypatch.setattr(prompts, "attend_block", lambda *given, causal: calls.append(f"one {causal}") or (None, None))
    lengths = [9] if case == "one" else [5, 0, 9]
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    slot = np.concatenate([np.arange(length) for length in lengths])
    new = TokenBlock(sequence, slot, slot, len(lengths))
    call = SimpleNamespace(
        rank=0, size=1, layout=SimpleNamespace(tokens=(new,)), compressed=False, narrowed=case == "last",
        in_hand=case != "shared",
        scoring=Scoring(0.2, 8 if case == "window" else None, softcap=2.0 if case == "bias" else None),
        table=SimpleNamespace(counts=lambda: np.array([lengths]) + (case == "cached")),
        once=lambda key, make: make(), k_KLD=None, v_KLD=None,
    )  # fmt: skip
    tokens = new.take(np.array([4, 13])) if case == "last" else new
    found = prompts.attend_prompts(call, torch.empty(2, len(tokens), 8, device="meta"), tokens)
    wanted = {"whole": ["several"], "last": ["several"], "one": ["one True"]}.get(case, [])
    assert calls == wanted and (found is not None) == bool(wanted)
    if case == "last":
        other = new.take(np.array([4, 12]))
        assert prompts.attend_prompts(call, torch.empty(2, 2, 8, device="meta"), other) is None

"""Calls in `torch.inference_mode` and outside of it, in any order, on one engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from tests.families import FAMILIES

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 2}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"offload": {"enabled": True, "host_gb": 0.05, "page_kib": 8}},
    "weights": {"offload": {"enabled": True, "host_gb": 0.05, "page_kib": 8, "weights": True}},
    "fairkv": {"fairkv": {"method": "snapkv", "budget": 0.4, "window": 8, "min_tokens": 32}},
    "fp8": {"weights": {"format": "fp8"}},
}


@pytest.fixture
def make(alone: None) -> Iterator[Callable[..., Any]]:
    engines = []

    def made(family: str, inside: bool, **section: Any) -> Any:
        torch.manual_seed(0)
        with torch.inference_mode(inside):
            model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
            engines.append(megakv.init_inference(model, {"dtype": "fp32", "megakv": section}))
        return engines[-1]

    yield made
    for engine in engines:
        engine.destroy()


def some_ids(length: int, seed: int) -> Tensor:
    return torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(seed))


def calls(engine: Any, folder: Path, inside: bool, session: Any) -> list[Tensor]:
    """One of each call; what it gave."""
    with torch.inference_mode(inside):
        found = [engine.generate(some_ids(50, 1), **GREEDY), engine.generate(some_ids(70, 2), num_beams=2, **GREEDY)]
        output = engine(some_ids(40, 3))
        longer = engine(some_ids(3, 4), past_key_values=output.past_key_values)
        found += [output.logits, longer.logits]
        session.generate(some_ids(45, 5), **GREEDY)
        branch = session.fork()
        branch.generate(some_ids(3, 6), **GREEDY)
        session.cut_back(session.length - 2)
        session.generate(some_ids(6, 7), num_beams=2, **GREEDY)
        session.save(folder)
        restored = engine.restore_session(folder)
        found += [each.generate(some_ids(2, 8), **GREEDY) for each in (session, branch, restored)]
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in (*found, session.input_ids))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_modes_in_turn(kind: str, make: Callable[..., Any], tmp_path: Path) -> None:
    expected: dict[int, list[Tensor]] = {}
    for first in (True, False):
        engine = make("llama", first, **KINDS[kind])
        session = engine.session()
        for number, inside in enumerate((first, not first, first)):
            found = calls(engine, tmp_path / "session", inside, session)
            for tensor, like in zip(found, expected.setdefault(number, found), strict=True):
                # What is recomputed differs from what was stored in the last bits.
                torch.testing.assert_close(tensor, like, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["opt", "falcon_alibi", "gpt_j", "llama_dynamic_rope"])
def test_families_that_keep_tables(family: str, make: Callable[..., Any]) -> None:
    engine = make(family, True)
    found = []
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            found.append(engine.generate(some_ids(50, 1), **GREEDY))
    assert all(torch.equal(found[0], other) for other in found)
    # Gradients of others' tensors are as their callers have them.
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad is not None

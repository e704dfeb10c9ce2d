"""Caches that are compressed again while decoding: bounded, never corrupt, and refused where positions cannot move."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.attention.partial import PartialAttention, Scoring
from megakv.attention.reference import dense_attention
from megakv.base.errors import CombinationError
from megakv.base.tensor_files import read_tensors, write_tensors
from megakv.cache.notes import Notes
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import RaggedBody
from tests.families import FAMILIES, VOCAB
from tests.held_rows import Rows, check_rows

BUDGET, INTERVAL = 40, 9
UNMOVABLE = {"opt", "gpt2"}
"""Families whose positions are part of what is cached, at least."""


@pytest.fixture
def compressing(alone: None) -> Iterator[Callable[..., Any]]:
    """A function that makes an engine of a family, by settings of ``fairkv``."""
    engines = []

    def make(family: str, **settings: Any) -> Any:
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
        section = {"budget": BUDGET, "decode_interval": INTERVAL, "min_tokens": 50, **settings}
        engine = megakv.init_inference(model, {"dtype": "fp32", "megakv": {"fairkv": section}})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


@pytest.mark.drawn(8)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_positions_within_the_cache_or_a_refusal(compressing: Callable[..., Any], family: str) -> None:
    """That keys are rotated as the family does it is looked at when an engine starts."""
    try:
        engine = compressing(family, method="streaming_llm")
    except CombinationError as error:
        assert error.law == "inputs" and "tokens count by their place in the cache" in str(error)
        return
    assert family not in UNMOVABLE
    ids = torch.randint(3, VOCAB, (1, 60))
    out = engine.generate(ids, max_new_tokens=INTERVAL + 3, do_sample=False, pad_token_id=0)
    assert out.shape[1] == 60 + INTERVAL + 3


def test_sinks_stand_right_before_the_window_with_alibi() -> None:
    k, v = torch.randn(2, 100, 16), torch.randn(2, 100, 16)
    mask = torch.zeros(2, 100, dtype=torch.bool)
    mask[:, :4] = mask[:, 80:] = True
    body = RaggedBody.kept(k, v, mask, np.arange(100))
    assert body is not None
    q, slopes = torch.randn(4, 1, 16), torch.rand(4)
    partial = PartialAttention(q, np.array([100]), Scoring(0.3, alibi_slopes=slopes), 16)
    RaggedPart(0, body, np.arange(100), np.arange(100), (76, 4)).add_to(partial)
    bias = slopes.double()[:, None, None] * (torch.arange(24) - 24.0)
    held = mask[0].nonzero().squeeze(1)
    out, _ = dense_attention(q, k[:, held], v[:, held], 0.3, bias_HLS=bias)
    assert torch.allclose(partial.out.double(), out, atol=1e-5, rtol=0)


def test_notes_follow_heads_and_slots() -> None:
    heads, slots = np.array([1, 0, 0]), np.array([7, 9, 2])
    notes = Notes().with_mass(heads, slots, torch.tensor([1.0, 2.0, 3.0]))
    notes = notes.with_mass(np.array([1]), np.array([3]), torch.tensor([4.0]))
    asked = np.array([[2, 7, 9, -1], [3, 7, 9, 30]])
    assert notes.mass_of(asked, torch.zeros(0)).tolist() == [[3, 0, 2, 0], [4, 1, 0, 0]]
    assert notes.below(7).mass_of(asked, torch.zeros(0)).tolist() == [[3, 0, 0, 0], [4, 0, 0, 0]]
    queries = notes.joined(np.array([5, 6]), torch.ones(2, 4, 3)).joined(np.array([8]), torch.zeros(1, 4, 3))
    assert queries.since(6).slots.tolist() == [6, 8] and queries.below(6).queries.shape[0] == 1
    assert queries.below(0).mass_of(asked, torch.zeros(0)).sum() == 0


def test_notes_of_a_single_token_are_written(tmp_path: Path) -> None:
    """NumPy gives the coordinates of one token a stride of two."""
    heads, places = np.nonzero(np.array([[False, True]]))
    notes = Notes(heads=heads, held=places, mass=torch.ones(1))
    write_tensors(tmp_path / "notes", notes.saved())
    assert read_tensors(tmp_path / "notes", ["noted.heads", "noted.held"])["noted.held"].tolist() == [1]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_all_attention_is_counted(compressing: Callable[..., Any], family: str) -> None:
    """Windows, caps, biases and latents included: what a query gives sums to 1, but for what it gives to sinks."""
    engine = compressing(family, method="h2o")
    cache = engine(torch.randint(3, VOCAB, (1, 30))).past_key_values
    for layer in range(len(cache)):
        given = cache.notes(layer)[0].mass.sum() / (30 * engine.module.config.num_attention_heads)
        assert given < 1 if family == "gpt_oss" else abs(given - 1) < 1e-4, (layer, given)
    known: Rows = {}
    for _ in range(3 * INTERVAL):
        engine(torch.randint(3, VOCAB, (1, 1)), past_key_values=cache)
        check_rows(cache, known, BUDGET + INTERVAL)
    assert cache.compressed[0][0][0] == 0 and cache.length - cache.reach < INTERVAL

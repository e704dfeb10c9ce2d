"""What a call may ask for, against plain transformers: `logits_to_keep` in any form, prompts in pieces of any size."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from tests.families import FAMILIES

LENGTH = 23
OFFLOAD = {"enabled": True, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}


@pytest.fixture(scope="module")
def pair(alone: None) -> Iterator[tuple[Any, Any]]:
    """A plain model and an engine of it."""
    plain = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.float32).eval()
    engine = megakv.init_inference(copy.deepcopy(plain), {"dtype": "fp32"})
    yield plain, engine
    engine.destroy()


def test_what_are_no_tokens_is_refused_with_how_to_make_them(pair: tuple[Any, Any]) -> None:
    _, engine = pair
    calls = (engine.generate, engine.forward, engine.session().generate)
    for given, message in (
        ("text", r"input_ids is a str: allowed: .* tokenizer\(text, return_tensors='pt'\)\.input_ids$"),
        ([[1, 2]], "input_ids is a list"),
        ({"input_ids": torch.ones(1, 2)}, r"input_ids is a dict: .*pass its \['input_ids'\]"),
        (torch.ones(1, 2), "input_ids has type torch.float32: allowed: whole numbers"),
        (torch.ones(2, dtype=torch.long), r"input_ids must be \[B, S\], not \[2\]"),
    ):
        for call in calls:
            with pytest.raises(ValueError, match=message):
                call(given)


def test_tokens_that_the_model_has_not(pair: tuple[Any, Any]) -> None:
    _, engine = pair
    size = engine.module.config.vocab_size
    for wrong in (size, -1, 10**9):
        ids = torch.randint(3, 190, (2, LENGTH))
        ids[1, 4] = wrong
        session = engine.session()
        session.generate(torch.ones(2, 3, dtype=torch.long), max_new_tokens=1)
        message = rf"^input_ids\[1, {{}}\] = {wrong} is no token: the model has {size}, from 0 to {size - 1}$"
        for call, column in ((engine.generate, 4), (engine.forward, 4), (session.generate, 8)):
            with pytest.raises(ValueError, match=message.format(column)):
                call(ids)
        # A session stays as it was, and what the mask hides is never read.
        assert session.generate(torch.ones(2, 1, dtype=torch.long), max_new_tokens=1).shape == (2, 6)
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        assert engine(ids, attention_mask=mask).logits.shape == (2, LENGTH, size)


def test_gradients_are_refused(pair: tuple[Any, Any]) -> None:
    """Compiled calls know nothing of them: they would be wrong without a word."""
    plain, engine = pair
    embeds = torch.randn(1, LENGTH, plain.config.hidden_size, requires_grad=True)
    with pytest.raises(ValueError, match=r"inputs_embeds requires gradients, .* pass inputs_embeds\.detach\(\)"):
        engine.module(inputs_embeds=embeds)
    with torch.no_grad():
        expected = plain(inputs_embeds=embeds).logits
        found = engine.module(inputs_embeds=embeds).logits
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(engine.module(inputs_embeds=embeds.detach()).logits, expected)
    torch.testing.assert_close(engine(inputs_embeds=embeds).logits, expected)


def prompt(*padding: int, right: bool = False) -> tuple[Tensor, Tensor]:
    """Rows with so much padding each."""
    ids = torch.randint(3, 190, (len(padding), LENGTH))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, LENGTH - count : LENGTH] = 0
        mask[row] = mask[row] if right else mask[row].flip(0)
    return ids * mask, mask


def wishes() -> list[int | Tensor]:
    """Numbers, and columns in any order, more than once, from either end, none, or by a mask."""
    found: list[int | Tensor] = [random.choice([0, 1, 2, LENGTH - 1, LENGTH, LENGTH + 9, -1, -LENGTH, -LENGTH - 3])]
    found += [torch.randint(-LENGTH, LENGTH, (random.randrange(12),)) for _ in range(3)]
    return [*found, torch.rand(LENGTH) < random.random(), torch.tensor([4, 4, 2, -1, 4]), torch.tensor([], dtype=int)]


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("case", range(12))
def test_logits_are_kept_as_transformers_keeps_them(case: int, right: bool, pair: tuple[Any, Any]) -> None:
    plain, engine = pair
    ids, mask = prompt(0, random.randrange(1, LENGTH), random.randrange(LENGTH), right=right)
    columns = torch.arange(LENGTH)
    for keep in wishes():
        with torch.no_grad():
            wanted = plain(ids, attention_mask=mask, logits_to_keep=keep).logits
        found = engine(ids, attention_mask=mask, logits_to_keep=keep).logits
        assert found.shape == wanted.shape
        kept = columns[-keep:] if isinstance(keep, int) else columns[keep]
        real = mask[:, kept].bool()
        assert torch.allclose(found[real], wanted[real], atol=2e-5)
        if len(set(kept.tolist())) != 1:
            assert not found[~real].any()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.tensor([0, LENGTH]), rf"logits_to_keep = \[0, {LENGTH}\] does not fit {LENGTH} new tokens"),
        (torch.tensor([-LENGTH - 1]), "does not fit"),
        (torch.ones(LENGTH - 1, dtype=torch.bool), "does not fit"),
        (torch.zeros(2, 3, dtype=torch.int64), r"logits_to_keep has shape \[2, 3\]"),
        (torch.tensor(3), r"logits_to_keep has shape \[\]"),
    ],
)
def test_wishes_that_cannot_be_granted(keep: Tensor, message: str, pair: tuple[Any, Any]) -> None:
    ids, mask = prompt(0, 3)
    with pytest.raises(ValueError, match=message):
        pair[1](ids, attention_mask=mask, logits_to_keep=keep)
    assert torch.isfinite(pair[1](ids, attention_mask=mask).logits).all()


@pytest.mark.parametrize("section", [{}, {"offload": OFFLOAD}, {"offload": {**OFFLOAD, "method": "chunked"}}])
@pytest.mark.parametrize("padding", [(11, 11, 11), (10, 22, 13), (22, 21, 20), (0, 22, 5)])
def test_pieces_of_a_prompt_may_be_nothing_but_padding(
    padding: tuple[int, ...], section: dict[str, Any], pair: tuple[Any, Any]
) -> None:
    plain, _ = pair
    engine = megakv.init_inference(copy.deepcopy(plain), {"dtype": "fp32", "megakv": section})
    ids, mask = prompt(*padding)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(ids, attention_mask=mask, **options)
    try:
        for size in (1, 5, 11, 22, 40):
            found = engine.generate(ids, attention_mask=mask, prefill_chunk_size=size, **options)
            assert torch.equal(found, wanted), size
        session = engine.session()
        history, seen = ids[:, :0], mask[:, :0]
        for turn in range(2):
            ids, mask = prompt(*(padding if turn == 0 else (7, 22, 0)))
            history, seen = torch.cat([history, ids], dim=1), torch.cat([seen, mask], dim=1)
            history = plain.generate(history, attention_mask=seen, **options)
            seen = torch.cat([seen, torch.ones(3, 5, dtype=seen.dtype)], dim=1)
            assert torch.equal(session.generate(ids, mask, prefill_chunk_size=6, **options), history)
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine.generate(ids, attention_mask=torch.zeros_like(ids), prefill_chunk_size=6, **options)
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine(ids, attention_mask=torch.zeros_like(ids))
        assert torch.equal(session.fork().input_ids, history)
    finally:
        engine.destroy()


@pytest.mark.usefixtures("alone")
def test_windows_keep_a_turn_whole_over_pieces_of_padding() -> None:
    """Until it ends: it is compressed then, from all of its tokens."""
    model = AutoModelForCausalLM.from_config(FAMILIES["mistral"](), dtype=torch.float32).eval()
    ids, mask = torch.randint(3, 190, (2, 90)), torch.ones(2, 90, dtype=torch.long)
    mask[:, 60:75] = 0
    section = {"fairkv": {"method": "snapkv", "budget": 0.5, "window": 4, "min_tokens": 2}}
    engine = megakv.init_inference(model, {"dtype": "fp32", "megakv": section})
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    try:
        wanted = engine.generate(ids, attention_mask=mask, **options)
        for size in (2, 7, 60):
            assert torch.equal(engine.generate(ids, attention_mask=mask, prefill_chunk_size=size, **options), wanted)
    finally:
        engine.destroy()


def test_shapes_that_are_refused(pair: tuple[Any, Any]) -> None:
    ids, mask = prompt(0, 3)
    for call in (pair[1], pair[1].generate):
        for wrong in (ids[0], ids[None]):
            with pytest.raises(ValueError, match=r"^input_ids must be \[B, S\], not"):
                call(wrong)
        with pytest.raises(ValueError, match="the prompt is empty"):
            call(ids[:, :0])
        for wrong in (mask[:, 1:], torch.cat([mask, mask], dim=1)):
            with pytest.raises(ValueError, match="attention_mask has shape"):
                call(ids, attention_mask=wrong)


@pytest.mark.parametrize("slots", [2.5, "9", None, torch.tensor(2.5)])
def test_cutting_back_to_no_number_leaves_a_session_whole(slots: Any, pair: tuple[Any, Any]) -> None:
    plain, engine = pair
    ids, mask = prompt(0, 3)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    session = engine.session()
    history = session.generate(ids, mask, **options)
    with pytest.raises(ValueError, match="cannot cut back to .* a whole number is needed"):
        session.cut_back(slots)
    session.cut_back(np.int64(LENGTH + 1))
    history, more = torch.cat([history[:, : LENGTH + 1], ids], dim=1), mask.new_ones(2, 1)
    wanted = plain.generate(history, attention_mask=torch.cat([mask, more, mask], dim=1), **options)
    assert torch.equal(session.generate(ids, mask, **options), wanted)


def test_errors_can_be_caught_by_the_name_that_documents_say() -> None:
    assert issubclass(megakv.PeerLostError, megakv.MegaKVError)


ASKED_BY_FILES = [
    ("generation_config.json", {"cache_implementation": "hybrid"}),
    ("generation_config.json", {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}}),
    ("generation_config.json", {"output_attentions": True, "output_hidden_states": True}),
    ("generation_config.json", {"guidance_scale": 1.5, "use_cache": False}),
    ("generation_config.json", {"penalty_alpha": 0.6, "dola_layers": "high"}),
    ("config.json", {"output_attentions": True}),
    ("config.json", {"output_hidden_states": True, "use_cache": False}),
]


@pytest.mark.parametrize(("file", "asked"), ASKED_BY_FILES)
def test_what_a_models_files_ask_for_gives_way_with_a_note(
    file: str, asked: dict[str, Any], pair: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = pair
    plain.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / file
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | asked))
    with megakv.init_inference(tmp_path) as engine:
        said = [record.getMessage() for record in caplog.records if "of the model's files" in record.getMessage()]
        ids = torch.randint(3, 190, (1, LENGTH))
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": False}
        assert torch.equal(engine.generate(ids, **options), plain.generate(ids, **options))
        assert engine.session().generate(ids, **options).shape == (1, LENGTH + 4)
        found = engine(ids)
        assert not found.get("hidden_states") and not found.get("attentions")
        for name in asked.keys() - {"cache_config"}:
            assert sum(f"{name} = {asked[name]!r} of the model's files is left out: " in text for text in said) == 1
        assert len(said) == len(asked.keys() - {"cache_config"})
        # Whoever asks for it in a call is refused, as ever.
        for name in asked.keys() - {"cache_config", "use_cache"}:
            with pytest.raises(ValueError, match=rf"generate\({name}=.*\) is not supported with MegaKV"):
                engine.generate(ids, **options, **{name: asked[name]})


def test_a_modules_own_defaults_come_back(pair: tuple[Any, Any]) -> None:
    model = copy.deepcopy(pair[0])
    model.generation_config.cache_implementation = "static"
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        assert engine.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=2).shape == (1, 7)
    assert model.generation_config.cache_implementation == "static"

"""Joined passes of one rank against plain transformers, in many families; and what they refuse."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.forward_pass import Pauses
from tests.families import CONFIGS, VOCAB, llama, llama_dynamic_rope
from tests.joint_passes import Interleaving

TOLERANCE = 1e-4
CHANGING = ("llama_dynamic_rope", "phi3_longrope")
"""What one sequence is given depends on the length of others."""
FAMILIES = [name for name in CONFIGS if name not in CHANGING]


def engine_of(config: Any, section: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """An engine, and the plain model."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain = copy.deepcopy(model)
    return megakv.init_inference(model, {"dtype": "fp32", "megakv": section or {}}), plain


def seed() -> int:
    return int(torch.randint(2**31, ()))


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "deepseek_v3"])
def test_windows_sinks_and_latents(name: str, tmp_path: Path, alone: None) -> None:
    check(name, tmp_path)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path, alone: None) -> None:
    check(name, tmp_path)


def check(name: str, folder: Path) -> None:
    engine, plain = engine_of(CONFIGS[name]())
    with engine:
        rows = Interleaving(engine, plain, seed(), folder)
        rows.run()
    assert rows.worst < TOLERANCE


def test_answers_are_those_of_generate(alone: None) -> None:
    engine, plain = engine_of(llama())
    with engine:
        prompts = [torch.randint(3, VOCAB, (1, length)) for length in (1, 60, 17)]
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        expected = [plain.generate(ids, **options)[0].tolist() for ids in prompts]
        assert [engine.generate(ids, **options)[0].tolist() for ids in prompts] == expected
        caches, found = [engine.new_cache() for _ in prompts], [ids[0].tolist() for ids in prompts]
        new: list[Any] = [ids[0] for ids in prompts]
        for _ in range(6):
            new = [[token] for token in engine.extend(caches, new).argmax(-1).tolist()]
            found = [row + token for row, token in zip(found, new, strict=True)]
        assert found == expected


def test_what_is_no_pass_is_refused(alone: None) -> None:
    engine, _ = engine_of(llama())
    with engine:
        cache, other = engine.new_cache(), engine.new_cache()
        for caches, tokens, message in (
            ([], [], "0 caches"),
            ([cache, other], [[1]], "2 caches with new tokens of 1"),
            ([cache, cache], [[1], [2]], "given twice"),
            ([cache, other], [[1], []], r"tokens\[1\]"),
            ([cache], [[VOCAB]], f"below {VOCAB}"),
            ([cache], [[[1]]], "in one dimension"),
            ([cache], [torch.tensor([0.5])], r"tokens\[0\]"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.extend(caches, tokens)
        pair = engine.new_cache()
        engine.generate_into(pair, torch.randint(3, VOCAB, (2, 4)), max_new_tokens=1, pad_token_id=0)
        with pytest.raises(ValueError, match=r"caches\[1\] is not of one"):
            engine.extend([cache, pair], [[1], [1]])
        assert cache.length == 0 and pair.length == 4


def test_passes_within_a_pass(alone: None) -> None:
    """What is refused there, and that nothing is left of a pass that was broken off."""
    engine, _ = engine_of(llama())
    with engine:
        cache, other = engine.new_cache(), engine.new_cache()
        expected = engine.extend([engine.new_cache()], [[1, 2, 3]])
        layers: list[int] = []

        def run(layer: int) -> int:
            layers.append(layer)
            with pytest.raises(ValueError, match="part of the pass"):
                engine.extend([cache], [[4]])
            engine.extend([other], [[layer]])
            return layer + 1

        assert torch.allclose(engine.extend([cache], [[1, 2, 3]], pauses=Pauses(0, run)), expected, atol=1e-5)
        assert layers == list(range(len(layers))) and other.length == len(layers) > 1

        def broken(layer: int) -> int:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.extend([cache], [[5]], pauses=Pauses(1, broken))
        assert torch.allclose(engine.extend([engine.new_cache()], [[1, 2, 3]]), expected, atol=1e-5)
        assert engine._runtime.current is None and engine._runtime.pauses is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"fairkv": {"budget": 0.5}}, "megakv.fairkv.budget = 0.5"),
        ({"offload": {"enabled": True, "host_gb": 0.05}}, "megakv.offload.enabled"),
    ],
)
def test_settings_that_cannot_be_served_are_named(section: dict[str, Any], message: str, alone: None) -> None:
    engine, _ = engine_of(llama(), section)
    with engine, pytest.raises(ValueError, match=message):
        engine.check_serves()


def test_lengths_that_change_frequencies_are_named(alone: None) -> None:
    engine, _ = engine_of(llama_dynamic_rope())
    with engine, pytest.raises(ValueError, match="rope_scaling"):
        engine.check_serves()

"""Joined passes of one rank against plain transformers, in many families; and what they refuse."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.fairkv.observation import Turn
from megakv.injection.step import TokenLayers
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


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_many_streams_of_very_different_lengths(name: str, tmp_path: Path, alone: None) -> None:
    check(name, tmp_path, sequences=23, length=400)


def check(name: str, folder: Path, **many: int) -> None:
    engine, plain = engine_of(CONFIGS[name]())
    with engine:
        rows = Interleaving(engine, plain, seed(), folder, **many)
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
        for candidates in ([1], [2, 0], [0, -1]):
            with pytest.raises(ValueError, match=r"^candidates = \[.*fewer than its tokens, \[2, 1\]"):
                engine.extend([cache, other], [[1, 2], [3]], candidates=candidates)
        pair = engine.new_cache()
        engine.generate_into(pair, torch.randint(3, VOCAB, (2, 4)), max_new_tokens=1, pad_token_id=0)
        with pytest.raises(ValueError, match=r"caches\[1\] is not of one"):
            engine.extend([cache, pair], [[1], [1]])
        assert cache.length == 0 and pair.length == 4


def test_nothing_is_left_of_a_pass_that_was_broken_off(alone: None) -> None:
    engine, _ = engine_of(llama())

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with engine:
        cache = engine.new_cache()
        expected = engine.extend([engine.new_cache()], [[1, 2, 3]])
        handle = engine.module.model.layers[-1].register_forward_pre_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            engine.extend([cache], [[5]])
        handle.remove()
        assert torch.allclose(engine.extend([engine.new_cache()], [[1, 2, 3]]), expected, atol=1e-5)
        assert cache.length == 0 and engine._runtime.current is None


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("method", ["auto", "stream"])
def test_offloaded_caches_have_passes_of_their_own(alone: None, method: str, kv_bits: int | None) -> None:
    """In turns; and what is taken out of one goes on in another."""
    offload = {"enabled": True, "host_gb": 0.05, "page_kib": 4, "method": method, "kv_bits": kv_bits}
    engine, model = engine_of(llama(), {"offload": offload})
    close = {"rtol": 1e-4, "atol": 1e-4} if kv_bits is None else {"rtol": 0.1, "atol": 0.05}
    prompts = torch.randint(3, 100, (2, 70))
    with engine:
        engine.check_serves()
        caches = [engine.new_cache(forgets=False) for _ in prompts]
        for first, last in ((0, 33), (33, 34), (34, 70)):
            for cache, ids in zip(caches, prompts, strict=True):
                logits = engine.extend([cache], [ids[first:last]])
        torch.testing.assert_close(logits, model(prompts[1:]).logits[:, -1], **close)
        twin = engine.new_cache(forgets=False)
        twin.append_span(caches[0].span(0, 40))
        twin.append_span(caches[0].span(40, 65))
        del caches[0]
        logits = engine.extend([twin], [prompts[0, 65:]])
        torch.testing.assert_close(logits, model(prompts[:1]).logits[:, -1], **close)
        assert engine.room(twin, 1) > engine.room(twin, 20) > 0
        with pytest.raises(ValueError, match="passes of their own"):
            engine.extend([twin, caches[0]], [[5], [5]])


def test_a_turn_is_compressed_in_passes_of_its_own(alone: None) -> None:
    """In whatever pieces its prompt is read; joint passes of the same engine are exact."""
    fairkv = {"budget": 20, "method": "ada_snapkv", "window": 8, "min_tokens": 32}
    engine, model = engine_of(llama(), {"fairkv": fairkv})
    ids = torch.randint(3, 100, (1, 70))
    exact = model(ids).logits[:, -1]
    with engine:
        cache = engine.new_cache()
        expected = engine.generate_into(
            cache, ids, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        own, turn = engine.new_cache(forgets=False), Turn(0, 70)
        for piece in (ids[0, :25], ids[0, 25:64], ids[0, 64:]):
            logits = engine.extend([own], [piece], turn=turn)
        torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-4)
        assert own.holds_compressed
        again = engine.extend([own], [logits[0].argmax()[None]], turn=turn)
        torch.testing.assert_close(again, expected.logits[1], rtol=1e-4, atol=1e-4)
        assert own.head_tokens() == cache.head_tokens()
        other = engine.new_cache(forgets=False, compresses=False)
        torch.testing.assert_close(engine.extend([other], [ids[0]]), exact, rtol=1e-4, atol=1e-4)
        assert not other.holds_compressed
        for caches in ([other], [own, engine.new_cache()]):
            with pytest.raises(ValueError, match="a turn is of a cache|of their own"):
                engine.extend(caches, [[5]] * len(caches), turn=turn)


@pytest.mark.parametrize("kind", ["offload", "budget"])
def test_candidates_of_caches_with_passes_of_their_own(alone: None, kind: str) -> None:
    """Wrong ones are taken back, out of tiers and from behind what was compressed."""
    budget = {"budget": 20, "method": "ada_snapkv", "window": 8, "min_tokens": 32}
    offload = {"enabled": True, "host_gb": 0.05, "page_kib": 4}
    section: dict[str, Any] = {"offload": offload} if kind == "offload" else {"fairkv": budget}
    engine, _ = engine_of(llama(), section)
    prompt = torch.randint(3, 100, (70,))
    turn = Turn(0, 70) if kind == "budget" else None
    with engine:
        one, several = (engine.new_cache(forgets=False) for _ in range(2))
        last = [engine.extend([cache], [prompt], turn=turn) for cache in (one, several)][0]
        expected, tokens = list[torch.Tensor](), list[int]()
        for _ in range(12):
            tokens.append(int(last[0].argmax()))
            last = engine.extend([one], [tokens[-1:]], turn=turn)
            expected.append(last[0])
        done = 0
        while done < 12:
            count = min(4, 11 - done)
            right = int(torch.randint(count + 1, ()))
            own = tokens[done : done + 1 + count]
            own[1 + right :] = [3 + token % 90 for token in own[1 + right :]]
            found = engine.extend([several], [own], turn=turn, candidates=[count])
            kept = found.reshape(-1, found.shape[-1])[: right + 1]
            torch.testing.assert_close(kept, torch.stack(expected[done : done + 1 + right]), rtol=1e-4, atol=1e-4)
            several.cut_back(70 + done + 1 + right)
            done += 1 + right
        assert one.length == several.length and one.head_tokens() == several.head_tokens()
        assert one.holds_compressed == several.holds_compressed == (kind == "budget")


def test_streams_between_parts_of_a_prompt_do_not_look_at_layers_again(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once behind each part by itself: looking takes as long as a token."""
    looks, look = list[int](), TokenLayers._look
    engine, _ = engine_of(llama())
    monkeypatch.setattr(TokenLayers, "_look", lambda self: [looks.append(1), look(self)])
    with engine:
        streams = [engine.new_cache(forgets=False) for _ in range(3)]
        for stream in streams:
            engine.extend([stream], [[3, 4, 5]])
        for _ in range(3):
            engine.extend([engine.new_cache(forgets=False)], [[1, 2, 3]])
            for _ in range(4):
                engine.extend(streams, [[7]] * 3)
    # The streams' prompts were few tokens.
    assert len(looks) == 3 + 3 and streams[0].length > 3 + 6


def test_parts_of_a_prompt_beside_streams_do_not_look_at_layers_again(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves they do: a weight that was replaced since counts."""
    looks, look = list[int](), TokenLayers._look
    engine, model = engine_of(llama())
    monkeypatch.setattr(TokenLayers, "_look", lambda self: [looks.append(1), look(self)])
    ids = torch.randint(3, 100, (1, 20))
    past = model(ids[:, :11]).past_key_values
    with engine:
        stream, cache = (engine.new_cache(forgets=False) for _ in range(2))
        engine.extend([stream], [[3, 4, 5]])
        engine.extend([cache], [ids[0, :5]])
        for first in (5, 8):
            engine.extend([stream, cache], [[7], ids[0, first : first + 3]])
        assert len(looks) == 2
        for each in (engine.module, model):
            projection = each.model.layers[0].self_attn.q_proj
            projection.weight = torch.nn.Parameter(projection.weight * 2)
        found = engine.extend([cache], [ids[0, 11:]])
        assert len(looks) == 3
    torch.testing.assert_close(found, model(ids[:, 11:], past_key_values=past).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_a_pass_is_of_one_side_of_the_original_length(alone: None) -> None:
    engine, plain = engine_of(llama_dynamic_rope())
    ids = torch.randint(3, 100, (1, 90))
    with engine:
        short, long = (engine.new_cache(forgets=False) for _ in range(2))
        with pytest.raises(
            ValueError, match="sequences of 20, 90 tokens have different rotary frequencies, .* beyond 64"
        ):
            engine.extend([short, long], [ids[0, :20], ids[0]])
        # A prompt in two pieces.
        engine.extend([long], [ids[0, :30]], longest=90)
        found = engine.extend([long], [ids[0, 30:]], longest=90)
        torch.testing.assert_close(found, plain(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
        # The longer one is forgotten.
        found = engine.extend([short], [ids[0, :20]])
        torch.testing.assert_close(found, plain(ids[:, :20]).logits[:, -1], rtol=1e-4, atol=1e-4)

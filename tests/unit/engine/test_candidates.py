"""Several tokens per step: against plain transformers, whatever is asked, cached, offloaded or compressed."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import megakv
from megakv.base.errors import CombinationError
from megakv.engine.candidates import TRUSTED, Lookup
from tests.families import FAMILIES

LENGTH = 60
NEW = 24
OFFLOAD = {"enabled": True, "page_kib": 8, "chunk_tokens": 16}


def models(family: str = "llama", section: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """A plain model and an engine of it."""
    plain = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    return plain, megakv.init_inference(copy.deepcopy(plain), {"dtype": "fp32", "megakv": section or {}})


def prompt() -> Tensor:
    """Tokens some of which come again and again."""
    words = [torch.randint(3, 190, (random.randint(2, 9),)) for _ in range(4)]
    return torch.cat([random.choice(words) for _ in range(30)])[:LENGTH][None]


class Rigged(LogitsProcessor):
    """Makes tokens come in the order of a text, but for some that come otherwise: as if they were quoted from it."""

    def __init__(self, text: Tensor, odd: int):
        self.text, self.odd = text[0], odd

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] % len(self.text)
        token = (place * 7) % 180 + 3 if self.odd and input_ids.shape[1] % self.odd == 0 else int(self.text[place])
        return scores.index_fill(1, torch.tensor([token]), float(scores.max()) + 1)


def how(text: Tensor, odd: int = 0, **options: Any) -> dict[str, Any]:
    """Options of a greedy call whose answer quotes a text."""
    mask = torch.ones_like(text)
    rigged = [Rigged(text, odd)]
    return (
        {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "logits_processor": rigged}
        | options
        | ({} if "attention_mask" in options else {"attention_mask": mask})
    )


def counts(engine: Any) -> tuple[int, int, int]:
    """Steps, and candidates that were proposed and accepted."""
    found = engine.report().candidates
    return found.steps, found.proposed, found.accepted


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.values.append([])


class StopAfter(StoppingCriteria):
    """Stops when it has been asked so often."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls <= 0)


def test_greedy_answers_are_plain_ones_in_fewer_steps(alone: None) -> None:
    plain, engine = models()
    ids = prompt()
    with engine:
        for odd in (0, 5):
            expected = plain.generate(ids, **how(ids, odd))
            assert torch.equal(engine.generate(ids, **how(ids, odd), prompt_lookup_num_tokens=10), expected)
            steps, proposed, accepted = counts(engine)
            assert steps + accepted == NEW and accepted <= proposed
            assert odd or 2 * steps <= NEW
        report = engine.report()
        assert report.scalars()["tokens_per_step"] == NEW / steps
        assert len(report.step_s) == NEW - 1
        # Whatever else belongs to an answer is as if there was one token in a step.
        for options in ({"output_logits": True, "return_dict_in_generate": True}, {"eos_token_id": int(ids[0, 7])}):
            wanted, found = (
                model.generate(ids, **how(ids), **options, **own)
                for model, own in ((plain, {}), (engine, {"prompt_lookup_num_tokens": 6}))
            )
            if "output_logits" in options:
                torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)
                wanted, found = wanted.sequences, found.sequences
            assert torch.equal(found, wanted)
        wanted, found = Heard(), Heard()
        plain.generate(ids, **how(ids), streamer=wanted)
        engine.generate(ids, **how(ids), streamer=found, prompt_lookup_num_tokens=6)
        assert found.values == wanted.values


def test_stops_between_the_tokens_of_a_step(alone: None) -> None:
    plain, engine = models()
    ids = prompt()
    with engine:
        session = engine.session()
        for calls in (1, random.randint(2, NEW - 1), random.randint(2, NEW - 1)):
            heard = Heard()
            options = {"streamer": heard, "return_dict_in_generate": True, "output_scores": True}
            asked = {name: value for name, value in how(ids).items() if name != "attention_mask"}
            before = session.input_ids
            found = session.generate(
                ids, **asked, **options, stopping_criteria=[StopAfter(calls)], prompt_lookup_num_tokens=8
            )
            conversation = ids if before is None else torch.cat([before, ids], dim=1)
            expected = plain.generate(
                conversation,
                **how(ids)
                | how(conversation, attention_mask=None)
                | {
                    "logits_processor": how(ids)["logits_processor"],
                    "max_new_tokens": calls,
                    "attention_mask": torch.ones_like(conversation),
                },
            )
            assert torch.equal(found.sequences, expected)
            assert len(found.scores) == calls == len(heard.values) - 2
            assert session.length == expected.shape[1] - 1


@pytest.mark.parametrize("lookup", (True, False), ids=("lookup", "assistant"))
def test_draws_what_transformers_draws(lookup: bool, alone: None) -> None:
    plain, engine = models()
    assistant = copy.deepcopy(plain)
    with engine:
        for _ in range(2):
            ids, seed = prompt(), random.getrandbits(30)
            candidates = {"prompt_lookup_num_tokens": 5} if lookup else {"assistant_model": assistant}
            options = {"max_new_tokens": NEW, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)} | candidates
            for chosen in ({"do_sample": True, "temperature": 0.3, "top_p": 0.9}, {"do_sample": False}):
                torch.manual_seed(seed)
                expected = plain.generate(ids, **options, **chosen)
                torch.manual_seed(seed)
                assert torch.equal(engine.generate(ids, **options, **chosen), expected)
        assert lookup or counts(engine)[2]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("family", "section"),
    [
        ("mistral", {}),
        ("deepseek_v3", {}),
        ("opt", {}),
        ("llama", {"offload": {**OFFLOAD, "host_gb": 0.05, "emulated_link_gb_s": 0.002}}),
        ("mistral", {"offload": {**OFFLOAD, "host_gb": 0.05, "method": "stream"}}),
        ("llama", {"offload": {**OFFLOAD, "host_gb": 2e-4, "disk_gb": 0.02}}),
    ],
    ids=("window", "latents", "table", "host", "host-window", "disk"),
)
def test_a_session_goes_on_where_candidates_were_refused(family: str, section: dict[str, Any], alone: None) -> None:
    plain, engine = models(family, section)
    with engine:
        session, twin, before = engine.session(), None, torch.zeros((1, 0), dtype=torch.long)
        accepted = refused = 0
        for turn, odd in enumerate((7, 0, 6)):
            ids = prompt()
            asked = how(ids, odd, prompt_lookup_num_tokens=7, prefill_chunk_size=(None, 13, None)[turn])
            del asked["attention_mask"]
            whole = torch.cat([before, ids], dim=1)
            plainly = how(ids, odd, attention_mask=torch.ones_like(whole))
            before = plain.generate(whole, **plainly)
            assert torch.equal(session.generate(ids, **asked), before)
            _, proposed, right = counts(engine)
            accepted, refused = accepted + right, refused + proposed - right
            if turn == 1:
                twin, of_twin = session.fork(), before
            if turn == 0:
                session.cut_back(before.shape[1] - 5)
                before = before[:, :-5]
        assert accepted > NEW and refused
        assert twin is not None
        whole = torch.cat([of_twin, ids], dim=1)
        expected = plain.generate(whole, **how(ids, odd, attention_mask=torch.ones_like(whole)))
        assert torch.equal(twin.generate(ids, **asked), expected)


@pytest.mark.parametrize("offload", ({}, {"offload": {**OFFLOAD, "host_gb": 0.05}}), ids=("device", "host"))
def test_a_prompt_is_compressed_once_and_answers_stay_whole(offload: dict[str, Any], alone: None) -> None:
    fairkv = {"method": "snapkv", "budget": 10, "window": 4, "min_tokens": 4}
    _, engine = models("llama", {"fairkv": fairkv, **offload})
    ids = prompt()
    with engine:
        answers = []
        for candidates in ({}, {"prompt_lookup_num_tokens": 20}):
            session = engine.session()
            session.generate(ids, **{name: v for name, v in how(ids).items() if name != "attention_mask"}, **candidates)
            answers.append(session.generate(ids[:, :30], max_new_tokens=9, do_sample=False, **candidates))
            assert session._cache.compressed == [[(0, LENGTH), (LENGTH + NEW - 1, LENGTH + NEW + 30)]]
        assert torch.equal(*answers)


def test_what_is_looked_up_is_proposed_while_it_comes_true() -> None:
    config: Any = SimpleNamespace(
        _eos_token_tensor=None, max_length=41, prompt_lookup_num_tokens=4, max_matching_ngram_size=None
    )
    lookup, text = Lookup(config), [*range(10), 0, 1]
    proposed = []
    # It comes otherwise, then as before.
    for token in (50, 0, 1, 2, 3, 4, 5, 6):
        found, _ = lookup.propose(torch.tensor([text]))
        proposed.append(found[0, len(text) :].tolist())
        text.append(token)
    # What was looked up behind 50 is nothing, behind 0 it is 1: after `TRUSTED` that came true it is proposed again.
    assert TRUSTED == 2 and proposed[:4] == [[], [], [], []] and proposed[4:6] == [[3, 4, 5, 6], [4, 5, 6, 7]]
    # At first once is enough.
    lookup = Lookup(config)
    found, then = (lookup.propose(torch.tensor([text[:known]]))[0][0, known:].tolist() for known in (15, 16))
    assert found == [] and then == [3, 4, 5, 6]
    text += [7, 8, 9] * 8
    found, _ = lookup.propose(torch.tensor([text[:38]]))
    assert found.shape[1] <= 40
    assert lookup.propose(torch.tensor([text[:40]]))[0].shape[1] == 40


def test_refusals(alone: None) -> None:
    plain, engine = models()
    ids = prompt()
    look = {"prompt_lookup_num_tokens": 4}
    with engine:
        for options, message in (
            ({**look, "num_beams": 2}, "^prompt_lookup_num_tokens = 4 and num_beams = 2 both choose"),
            ({**look, "assistant_model": plain}, "^prompt_lookup_num_tokens and assistant_model both propose"),
            ({**look, "use_cache": False}, "has no effect without a cache"),
            ({**look, "assistant_ensemble_weight": 0.5}, "^assistant_ensemble_weight weighs an assistant's logits"),
        ):
            with pytest.raises(CombinationError, match=message):
                engine.generate(ids, max_new_tokens=2, **options)
        for given, message in (
            ({"prompt_lookup_num_tokens": 0}, "^prompt_lookup_num_tokens = 0: allowed: a whole number, 1 or more"),
            ({**look, "max_matching_ngram_size": -1}, "^max_matching_ngram_size = -1: allowed"),
            ({"assistant_model": engine.module}, "^assistant_model = LlamaForCausalLM belongs to an engine"),
            ({"assistant_model": "small"}, "^assistant_model = str: allowed: a transformers model"),
            ({**look, "num_return_sequences": 3, "do_sample": True}, "^prompt_lookup_num_tokens = 4 with 3 sequences"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.generate(ids, max_new_tokens=2, **given)
        with pytest.raises(ValueError, match="^prompt_lookup_num_tokens = 4 with 2 sequences"):
            engine.generate(ids.repeat(2, 1), max_new_tokens=2, **look)
        with pytest.raises(ValueError, match="^prompt_lookup_num_tokens = 4 without input_ids"):
            engine.generate(inputs_embeds=plain.get_input_embeddings()(ids), max_new_tokens=2, **look)
    _, rolling = models("llama", {"fairkv": {"method": "streaming_llm", "budget": 20, "decode_interval": 3}})
    with (
        rolling,
        pytest.raises(CombinationError, match=r"with megakv\.fairkv\.decode_interval = 3: .* no room") as info,
    ):
        rolling.generate(ids, max_new_tokens=2, **look)
    assert info.value.law == "room"
    _, dynamic = models("llama_dynamic_rope")
    with dynamic, pytest.raises(ValueError, match="its rotary frequencies follow the length"):
        dynamic.generate(ids, max_new_tokens=2, **look)

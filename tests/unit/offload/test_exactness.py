"""Offloaded generation gives the plain model's tokens, for every family and method."""

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megakv.attention.layer import LayerCalls, load_layer
from megakv.injection.prompt_layer import PromptLayer
from megakv.offload.method import AUTO, METHODS
from megakv.offload.paged_rows import PagedRows
from megakv.offload.staging import StagedLayer
from tests.families import CONFIGS, FAMILIES

CHANGING = ("llama_dynamic_rope", "phi3_longrope")
"""Rotary frequencies follow the length."""
NEW = 12
TOLERANCE = 2e-4


def plain_model(name: str) -> Any:
    torch.manual_seed(0)
    attention = "sdpa" if name == "falcon_alibi" else "eager"
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ragged(rows: int = 3, length: int = 41) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 190, (rows, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    mask[-1, : length - 2] = 0
    return ids.masked_fill(mask == 0, 0), mask


def generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    defaults = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **{**defaults, **options})


def recomputation_errors(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how much recomputed rows differ from those that were kept, each time; it grows with every pass."""
    # Also where it cannot pay.
    monkeypatch.setattr("megakv.offload.config.may_pay", lambda *_: True)
    errors: list[float] = []
    recompute = StagedLayer.recompute

    def compared(staged: StagedLayer, layer: int, *args: Any) -> None:
        recompute(staged, layer, *args)
        store: Any = staged.store
        for sequence, split in enumerate(staged.splits):
            kept = torch.empty(split, store.row_width)
            engine._offloader.link.start(
                "in", store.moves(kept, [(sequence, staged.away[sequence], split, 0)])
            ).settle()
            found = staged.rows[staged.starts[sequence] : staged.starts[sequence] + split]
            errors.append(((found - kept).abs().max() / kept.abs().max()).item() if split else 0.0)

    monkeypatch.setattr(StagedLayer, "recompute", compared)
    return errors


@pytest.mark.drawn(7)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_recomputes_its_own_keys_and_values(
    name: str, offloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model(name)
    ids, mask = ragged()
    expected = generate(copy.deepcopy(model), ids, mask)
    engine = offloaded(copy.deepcopy(model), method="chunked")
    errors = recomputation_errors(engine, monkeypatch)
    assert torch.equal(generate(engine, ids, mask), expected)
    assert len(errors) > 2 * NEW and max(errors) < TOLERANCE
    assert all(0 < step.split.recomputed < step.cached for step in engine._offloader.steps)


def generations() -> Iterator[Any]:
    """Families, methods and ways to generate; by default every method with one family drawn, and `auto` with some."""
    for name in ("opt", "llama", "llama_mha", "qwen3", "gpt_neox", "falcon", "gemma"):
        for method in (*METHODS, AUTO):
            for way, options in (("beams", {"num_beams": 3}), ("sampled", {"do_sample": True, "top_k": 20})):
                marks = [pytest.mark.full] if way == "sampled" else [pytest.mark.drawn(1, method)]
                if method == AUTO:
                    marks = [pytest.mark.drawn(2, way)]
                yield pytest.param(name, method, options, id=f"{name}-{method}-{way}", marks=marks)


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize(("name", "method", "options"), list(generations()))
def test_every_method_gives_the_plain_tokens(
    name: str, method: str, options: dict[str, Any], offloaded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model(name)
    ids, mask = ragged(4)
    torch.manual_seed(7)
    expected = generate(model, ids, mask, **options)
    engine = offloaded(copy.deepcopy(model), method=method)
    torch.manual_seed(7)
    assert torch.equal(generate(engine, ids, mask, **options), expected)
    recomputed = [step.split.recomputed for step in engine._offloader.steps]
    config = model.config
    kv_heads = getattr(config, "num_kv_heads", getattr(config, "num_key_value_heads", config.num_attention_heads))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Activations no smaller than keys and values cannot pay: they are not kept.
    smaller = config.hidden_size < 2 * kv_heads * head_dim
    asked = method != AUTO and METHODS[method].recomputes
    pays = smaller and (method == AUTO or asked)
    assert all(recomputed) if pays else not any(recomputed)
    held = engine._offloader._cache.store(0).input_bytes
    assert (held > 0) == pays and (f"{method!r} recomputes nothing here" in caplog.text) == (asked and not smaller)
    on_host = [step.split.on_host for step in engine._offloader.steps]
    assert all(on_host) if method == AUTO or METHODS[method].attends_on_host else not any(on_host)


@pytest.mark.drawn(4)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["llama_mha", "qwen3", "mistral"])
def test_layers_are_compiled_calls_around_attention(
    name: str, groups: int, weights: bool, offloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts and of steps, where their weights stay; and what is kept of layers' inputs gives the same rows."""
    if load_layer()[0] is None:
        pytest.skip(f"no compiled kernel: {load_layer()[1]}")
    taken = Counter[str]()
    for kind in (PromptLayer, LayerCalls):

        def noted(self: Any, *args: Any, own: Any = kind.project, name: str = kind.__name__, **options: Any) -> Any:
            taken[name] += 1
            return own(self, *args, **options)

        monkeypatch.setattr(kind, "project", noted)
    model = plain_model(name)
    ids, mask = ragged(4, 70)
    expected = generate(model, ids, mask)
    given = {"num_gpu_batches": groups, "objective": "throughput"} if groups > 1 else {}
    engine = offloaded(copy.deepcopy(model), method="chunked", weights=weights, **given)
    errors = recomputation_errors(engine, monkeypatch)
    assert torch.equal(generate(engine, ids, mask), expected)
    layers = model.config.num_hidden_layers
    if not weights:
        # A prompt goes through layers group by group, and a step at once; one layer is probed first.
        assert taken["PromptLayer"] == 1 + groups * layers
        # Where a processor has the compiled products for many rows, too, prompts are such calls.
        assert taken["LayerCalls"] - 1 - (NEW - 1) * layers in (0, taken["PromptLayer"])
    else:
        assert not taken
    assert errors and max(errors) < TOLERANCE


@pytest.mark.drawn(3)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "falcon_alibi", "mpt", "deepseek_v3"])
def test_the_host_attends_with_windows_caps_sinks_and_biases(name: str, offloaded: Any) -> None:
    model = plain_model(name)
    ids, mask = ragged()
    expected = generate(model, ids, mask, max_new_tokens=30)
    engine = offloaded(copy.deepcopy(model), method="cpu_rank", cpu_threads=2)
    assert torch.equal(generate(engine, ids, mask, max_new_tokens=30), expected)
    assert all(step.split.on_host for step in engine._offloader.steps)


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("name", CHANGING)
def test_keys_are_rotated_as_in_the_pass_that_made_them(
    name: str, offloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frequencies change at 64 tokens, within an answer, between turns, and from one sequence to another and back."""
    model = plain_model(name)
    ids, mask = ragged()
    expected = generate(copy.deepcopy(model), ids, mask, max_new_tokens=40)
    recomputing = offloaded(copy.deepcopy(model), method="chunked")
    errors = recomputation_errors(recomputing, monkeypatch)
    assert torch.equal(generate(recomputing, ids, mask, max_new_tokens=40), expected)
    assert all(step.split.recomputed for step in recomputing._offloader.steps)
    answers = []
    # What a turn finds in the cache depends on the passes before it: alike in both.
    for engine in (recomputing, offloaded(model, method="stream")):
        generate(engine, ids[:, :50], mask[:, :50], max_new_tokens=4)
        sessions, found = [engine.session(), engine.session()], []
        for number, (at, length) in enumerate(((0, 57), (1, 20), (0, 9), (1, 3), (2, 30), (0, 7), (1, 50))):
            if at == len(sessions):
                sessions.append(sessions[0].fork())
            turn = torch.randint(3, 190, (2, length), generator=torch.Generator().manual_seed(number))
            found.append(sessions[at].generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0))
        sessions[2].cut_back(60)
        found.append(sessions[2].generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0))
        answers.append(found)
    assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))
    assert len(errors) > 200 and max(errors) < TOLERANCE


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("method", ["stream", "chunked", "auto"])
def test_disk_takes_what_host_memory_does_not(method: str, offloaded: Any, tmp_path: Any) -> None:
    model = plain_model("opt")
    ids, mask = ragged()
    expected = generate(model, ids, mask, num_beams=2)
    tiny = 5 * 8 / (1 << 20)
    engine = offloaded(copy.deepcopy(model), method=method, host_gb=tiny, disk_gb=0.01, disk_path=str(tmp_path))
    assert torch.equal(generate(engine, ids, mask, num_beams=2), expected)
    used = engine._offloader.pool.used()
    assert used["host"] == 5 * 8192 and used["disk"] > 0


@pytest.mark.usefixtures("fixed_costs")
def test_only_new_tokens_go_back(offloaded: Any) -> None:
    model = plain_model("gpt_neox")
    ids, mask = ragged()
    config = model.config
    row = 2 * config.hidden_size * 4
    for method, per_token in (("stream", row), ("chunked", row + config.hidden_size * 4)):
        engine = offloaded(copy.deepcopy(model), method=method)
        offloader, sent = engine._offloader, [0]

        def note(*_: Any, offloader: Any = offloader, sent: list[int] = sent, **__: Any) -> Tensor:
            for transfer in offloader.link._outgoing:
                transfer.settle()
            sent.append(offloader.link.traffic["out"].nbytes)
            return torch.zeros(len(ids), dtype=torch.bool)

        generate(engine, ids, mask, stopping_criteria=[note])
        # The prompt, then three tokens in every step: of each, what belongs to the token alone.
        tokens = [int(mask.sum()), *[3] * (NEW - 1)]
        assert [later - earlier for earlier, later in pairwise(sent)] == [
            count * per_token * config.num_hidden_layers for count in tokens
        ]
        assert [step.new for step in offloader.steps] == tokens[1:]


def test_activations_that_nobody_wants_are_not_sent(offloaded: Any) -> None:
    model = plain_model("opt")
    ids = torch.randint(3, 190, (2, 60), generator=torch.Generator().manual_seed(4))
    expected = generate(model, ids, torch.ones_like(ids))
    # The host attends hundreds of times as fast as this link sends.
    engine = offloaded(copy.deepcopy(model), method="auto", emulated_link_gb_s=0.0005)
    for _ in range(2):
        assert torch.equal(generate(engine, ids, torch.ones_like(ids)), expected)
    late = engine._offloader.steps[-3:]
    assert all(step.split.on_host > 100 for step in late)
    sent = 2 * model.config.num_hidden_layers * 2 * model.config.hidden_size * 4
    assert [step.bytes_out for step in late] == [sent] * 3


@pytest.mark.usefixtures("fixed_costs")
def test_the_host_waits_for_no_row_that_it_does_not_attend_to(offloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_model("llama")
    ids = torch.randint(3, 190, (2, 30), generator=torch.Generator().manual_seed(4))
    expected = generate(model, ids, torch.ones_like(ids), max_new_tokens=6)
    engine = offloaded(copy.deepcopy(model), method="cpu_rank", emulated_link_gb_s=0.0005, page_kib=64)
    waited: list[bool] = []
    found = PagedRows.runs_in_memory

    def watched(self: PagedRows, count: int, first: int = 0) -> Any:
        pages = self._pages[: -(-count // self.per_page)]
        waited.append(not all(page.written is None or page.written.done for page in pages))
        return found(self, count, first)

    monkeypatch.setattr(PagedRows, "runs_in_memory", watched)
    # This link takes longer for a step's new rows than a layer for the rest.
    assert torch.equal(generate(engine, ids, torch.ones_like(ids), max_new_tokens=6), expected)
    assert waited and not any(waited[-4:])


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("method", ["stream", "auto"])
def test_beams_over_a_link_that_is_behind(method: str, offloaded: Any) -> None:
    """Pages of dropped beams are taken anew while rows are still on their way into them."""
    model = plain_model("opt")
    ids, mask = ragged()
    expected = generate(model, ids, mask, num_beams=3)
    engine = offloaded(copy.deepcopy(model), method=method, emulated_link_gb_s=0.001)
    for _ in range(2):
        assert torch.equal(generate(engine, ids, mask, num_beams=3), expected)


def test_memory_comes_back_after_each_call(offloaded: Any) -> None:
    model = plain_model("llama")
    ids, mask = ragged()
    engine = offloaded(model, host_gb=16 * 8 / (1 << 20))
    expected = generate(engine, ids, mask)
    for _ in range(5):
        assert torch.equal(generate(engine, ids, mask), expected)


@pytest.mark.usefixtures("fixed_costs")
def test_the_report_has_every_step(offloaded: Any) -> None:
    engine = offloaded(plain_model("opt"), method="auto")
    ids, mask = ragged()
    generate(engine, ids, mask)
    (rank,) = engine.report().ranks
    cached = int(mask.sum())
    assert [step.cached for step in rank.offload] == [cached + 3 * step for step in range(NEW - 1)]
    for step in rank.offload:
        assert 0 < step.recomputed < step.cached and 0 < step.on_host < step.cached
        assert step.measured_s >= step.waited_s >= 0 and step.predicted_s > 0

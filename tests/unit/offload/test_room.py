"""Budgets that a generation would outgrow: refused with numbers, and nothing that was there is lost."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import megakv
from megakv.base.errors import MegaKVError
from megakv.offload import runtime
from megakv.offload.prices import LayerPrices
from megakv.planner.dry_run import dry_run
from tests.unit.offload.test_exactness import generate, plain_model


def test_outgrown_budgets_are_named_and_sessions_survive(offloaded: Any) -> None:
    model = plain_model("opt")
    engine = offloaded(copy.deepcopy(model), host_gb=24 * 8 / (1 << 20))
    session = engine.session()
    turn = torch.randint(3, 190, (1, 20), generator=torch.Generator().manual_seed(3))
    first = session.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(RuntimeError, match=r"needs 960.00 KiB .*host_gb holds 192.00 KiB, of which 192"):
        session.generate(turn.repeat(1, 30), max_new_tokens=4, do_sample=False, pad_token_id=0)
    # Layer 0 has room for this one, the others have not: that is seen before they are computed.
    with pytest.raises(RuntimeError, match="this generation needs 240.00 KiB"):
        session.generate(turn.repeat(1, 6), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert session.length == first.shape[1] - 1
    longer = torch.cat([first, turn], dim=1)
    expected = generate(model, longer, torch.ones_like(longer), max_new_tokens=4)
    assert torch.equal(session.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


def test_what_cannot_fit_is_refused_before_it_is_computed(offloaded: Any) -> None:
    model = plain_model("opt")
    layers = model.config.num_hidden_layers
    engine = offloaded(copy.deepcopy(model), method="stream", host_gb=layers * 4 * 8 / (1 << 20))
    ids = torch.randint(3, 190, (2, 20), generator=torch.Generator().manual_seed(3))
    # A page holds 16 tokens of a layer: 64 KiB are two pages per layer and sequence.
    with pytest.raises(
        RuntimeError,
        match=r"needs 96.00 KiB.*40 tokens so far, up to 20 more for each of 2 sequences.*host_gb holds 64.00 KiB",
    ):
        engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
    expected = generate(model, ids, torch.ones_like(ids), max_new_tokens=12)
    assert torch.equal(generate(engine, ids, torch.ones_like(ids), max_new_tokens=12), expected)


@pytest.mark.parametrize(
    ("budget", "otherwise"), [({"disk_gb": 1e-6}, ", or leave it out"), ({"host_gb": 1e-6, "disk_gb": 0.01}, "$")]
)
def test_a_budget_below_one_page_is_refused(
    budget: dict[str, float], otherwise: str, offloaded: Any, tmp_path: Path
) -> None:
    name = min(budget, key=lambda each: budget[each])
    expected = (
        rf"megakv.offload.{name} = 1e-06 is 1.05 KiB, less than one page of megakv.offload.page_kib = 8; "
        rf"make it 7.63e-06 or more, or lower page_kib{otherwise}"
    )
    with pytest.raises(ValueError, match=expected):
        offloaded(plain_model("opt"), disk_path=str(tmp_path), **budget)
    # What is advised works, also where it is no round number.
    offloaded(plain_model("opt"), disk_path=str(tmp_path), disk_gb=7.63e-06)
    with pytest.raises(ValueError, match=r"make it 0.000489 or more"):
        offloaded(plain_model("opt"), disk_path=str(tmp_path), disk_gb=1e-6, page_kib=512)


def test_more_threads_than_cores_are_refused(offloaded: Any) -> None:
    with pytest.raises(
        ValueError, match=r"cpu_threads = 4096: this process may use \d+ cores; allowed: as many or fewer"
    ):
        offloaded(plain_model("opt"), method="cpu_rank", cpu_threads=4096)


def test_a_prompt_in_pieces_is_refused_with_its_first(offloaded: Any) -> None:
    model = plain_model("opt")
    layers = model.config.num_hidden_layers
    engine = offloaded(copy.deepcopy(model), method="stream", host_gb=layers * 4 * 8 / (1 << 20))
    ids = torch.randint(3, 190, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    # Both pieces of both sequences have room for themselves, the whole of them has not.
    with pytest.raises(
        MegaKVError,
        match=r"needs 96.00 KiB.*27 tokens so far, up to 28 more for each of 2 sequences.*host_gb holds 64.00 KiB",
    ):
        engine.generate(ids, attention_mask=mask, max_new_tokens=4, prefill_chunk_size=16)
    # None of it has left the accelerator.
    assert engine._offloader.link.traffic["out"].nbytes == 0
    ids, mask = ids[:, :28], mask[:, :28]
    expected = generate(model, ids, mask, max_new_tokens=4)
    assert torch.equal(generate(engine, ids, mask, max_new_tokens=4, prefill_chunk_size=9), expected)


def test_what_does_not_fit_one_layer_is_refused_with_numbers(offloaded: Any) -> None:
    model = plain_model("opt")
    layers = model.config.num_hidden_layers
    engine = offloaded(model, method="auto", host_gb=2 * layers * 8 / (1 << 20))
    ids = torch.randint(3, 190, (1, 400), generator=torch.Generator().manual_seed(3))
    # In pages of 16 tokens, or of the activations of 32: 404 tokens.
    needed = layers * (26 + 13) * 8
    with pytest.raises(MegaKVError, match=rf"needs {needed}.00 KiB .*400 tokens so far.*raise megakv.offload.host_gb"):
        engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)


@pytest.mark.parametrize("method", ["auto", "chunked", "stream"])
def test_turns_are_refused_when_there_is_no_room_and_not_before(method: str, offloaded: Any) -> None:
    model = plain_model("opt")
    layers = model.config.num_hidden_layers
    # A link so fast that activations of generated tokens are soon found to be of no use: a gap for the next turns.
    engine = offloaded(model, method=method, host_gb=layers * 40 * 8 / (1 << 20))
    session, pool = engine.session(), engine._offloader.pool
    total, generator = pool.free_bytes(), torch.Generator().manual_seed(3)
    for _ in range(40):
        free = pool.free_bytes()
        turn = torch.randint(3, 190, (1, 30), generator=generator)
        try:
            session.generate(turn, max_new_tokens=6, do_sample=False, pad_token_id=0)
        except MegaKVError as error:
            refusal = str(error)
            break
    else:
        raise AssertionError("nothing was refused")
    assert f"of which {total / 1024:.2f} KiB can be used" in refusal
    # A turn's 36 tokens take three pages at most, and the page begun before has room for its activations, or one more.
    assert free < layers * (3 + 2 * (method != "stream")) * 8192


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("chunk", "bits"), [(None, None), (30, None), (None, 4), (30, 8)])
def test_what_compression_leaves_out_needs_no_room(chunk: int | None, bits: int | None, tmp_path: Path) -> None:
    """As much as the dry run says, and not a page less."""
    model = plain_model("llama")
    model.config.save_pretrained(tmp_path)
    ids = torch.randint(3, 190, (2, 100), generator=torch.Generator().manual_seed(3))
    mask, how = torch.ones_like(ids), {} if chunk is None else {"prefill_chunk_size": chunk}

    def settings(pages: int) -> dict[str, Any]:
        offload = {"enabled": True, "method": "stream", "host_gb": pages / (1 << 18), "page_kib": 4, "kv_bits": bits}
        fairkv = {"budget": 0.25, "min_tokens": 16, "window": 4}
        return {"dtype": "fp32", "megakv": {"fairkv": fairkv, "offload": offload}}

    found = [dry_run(tmp_path, settings(pages), context=100, batch=2, new_tokens=2) for pages in (1000, 1)]
    assert found[0].problem is None and found[1].problem is not None
    needed = found[0].ranks[0].host_bytes
    with megakv.init_inference(copy.deepcopy(model), settings(needed // 4096)) as engine:
        session = engine.session()
        session.generate(ids, mask, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0, **how)
        assert engine._offloader.pool.used()["host"] == needed
    with megakv.init_inference(copy.deepcopy(model), settings(needed // 4096 - 1)) as engine:
        with pytest.raises(MegaKVError, match=r"of which megakv.fairkv.budget keeps a part.*raise megakv.offload"):
            generate(engine, ids, mask, max_new_tokens=3, **how)
        # None of it has left the accelerator.
        assert engine._offloader.link.traffic["out"].nbytes == 0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("prompt", [5, 60])
def test_an_answer_of_any_length_has_room_where_it_is_evicted(prompt: int) -> None:
    """That of a budget twice, of the interval, and of pages that are partly empty."""
    model = plain_model("llama")
    layers, budget, interval = model.config.num_hidden_layers, 16, 15
    row = 2 * 4 * model.config.num_key_value_heads * model.config.head_dim
    pages = layers * (-(-(2 * budget + interval) * row // 4096) + 2)
    offload = {"enabled": True, "method": "stream", "host_gb": pages / (1 << 18), "page_kib": 4}
    fairkv = {"method": "streaming_llm", "budget": budget, "min_tokens": 20}
    ids = torch.randint(3, 190, (1, prompt), generator=torch.Generator().manual_seed(3))
    for interval_or_none in (interval, None):
        section = {"fairkv": {**fairkv, "decode_interval": interval_or_none}, "offload": offload}
        with megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": section}) as engine:
            pool, used = engine._offloader.pool, list[int]()
            if interval_or_none is None:
                with pytest.raises(MegaKVError, match="raise megakv.offload.host_gb"):
                    generate(engine, ids, torch.ones_like(ids), max_new_tokens=150)
                continue
            engine.module.register_forward_hook(lambda *_, pool=pool, used=used: used.append(pool.used()["host"]))
            generate(engine, ids, torch.ones_like(ids), max_new_tokens=150, min_new_tokens=150)
            assert 0 < max(used) == max(used[-interval:]) <= pages * 4096


def test_an_engine_that_cannot_be_made_leaves_the_model_as_it_was(
    offloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model("opt")
    expected = copy.deepcopy(model.state_dict())
    # All else of the engine is there by then.
    monkeypatch.setattr(runtime, "Prefetch", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        offloaded(model, weights=True)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(torch.equal(found, expected[name]) for name, found in model.state_dict().items())


@pytest.mark.parametrize("method", ["kvpr", "chunked"])
def test_a_pass_that_outgrew_its_budget_leaves_no_activations(
    method: str, offloaded: Any, fixed_costs: LayerPrices
) -> None:
    """Its keys and values found no room; the next pass's are computed again from its own activations."""
    model, generator = plain_model("opt"), torch.Generator().manual_seed(3)
    ids, long, short = (torch.randint(3, 190, (1, count), generator=generator) for count in (70, 200, 40))
    for pages in range(24, 64, 2):
        engine = offloaded(copy.deepcopy(model), method=method, host_gb=pages * 8 / (1 << 20), chunk_tokens=16)
        try:
            cache = engine(ids).past_key_values
        except MegaKVError:
            continue
        try:
            engine(long, past_key_values=cache)
        except MegaKVError:
            pass
        else:
            # There is room from here on.
            break
        tiers = [cache.tier(layer) for layer in range(model.config.num_hidden_layers)]
        assert [(tier._rows[0].length, tier._inputs[0].length <= 70) for tier in tiers] == [(70, True)] * len(tiers)
        try:
            engine(short, past_key_values=cache)
            found = engine(short[:, :1], past_key_values=cache).logits[0, -1]
        except MegaKVError:
            continue
        whole = torch.cat([ids, short, short[:, :1]], dim=1)
        with torch.no_grad():
            torch.testing.assert_close(found, model(whole).logits[0, -1], atol=1e-4, rtol=1e-4)

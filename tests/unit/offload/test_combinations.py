"""Offloading and the rest of MegaKV: compressed keys and values, and dry runs."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from megakv.base.errors import MegaKVError
from megakv.cache.ragged_body import RaggedBody
from megakv.offload.method import AUTO, METHODS
from megakv.offload.planner import Planner
from megakv.planner.dry_run import dry_run
from tests.families import CONFIGS, FAMILIES
from tests.unit.offload.conftest import SETTINGS
from tests.unit.offload.test_exactness import generate, plain_model, ragged


def converse(engine: Any, folder: Path, **options: Any) -> list[Tensor]:
    """Turns of which some are compressed, a cut into one of them, a fork that goes on, and what it saves."""
    session, found, options = engine.session(), [], {"do_sample": False, "pad_token_id": 0, **options}

    def turn(of: Any, length: int, **more: Any) -> None:
        ids = torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[1, : length - 20] = 0
        found.append(of.generate(ids, mask, **{"max_new_tokens": 5, **options, **more}))

    for length, beams in ((90, 1), (7, 1), (50, 3), (3, 1)):
        turn(session, length, num_beams=beams)
    fork = session.fork()
    session.cut_back(60)
    turn(session, 30)
    turn(fork, 31)
    fork.save(folder)
    return found


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("chunk", [None, 33])
@pytest.mark.parametrize(
    "offload", [*({"method": name} for name in (*METHODS, AUTO)), {"disk": True}, {"num_gpu_batches": 2}], ids=str
)
def test_compressed_and_offloaded(
    offload: dict[str, Any], chunk: int | None, offloaded: Callable[..., Any], tmp_path: Path
) -> None:
    """The same tokens as compressed on the accelerator, also from what the other has saved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"](), dtype=torch.float32).eval()
    if offload.pop("disk", False):
        offload = {"host_gb": 8 * 10 / (1 << 20), "disk_gb": 0.02, "disk_path": str(tmp_path)}
    fairkv, found, again = {"budget": 0.3, "min_tokens": 24, "window": 4}, [], []
    how = {} if chunk is None else {"prefill_chunk_size": chunk}
    for name, more in (("here", {"enabled": False}), ("away", {**SETTINGS, **offload})):
        section = {"fairkv": fairkv, "offload": more}
        with megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": section}) as engine:
            found.append(converse(engine, tmp_path / name, **how))
            for saved in (tmp_path / each for each in ("here", "away") if (tmp_path / each).exists()):
                ids = torch.full((2, 3), 7)
                session = engine.restore_session(saved)
                again.append(session.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0))
            if name == "away":
                hosted = any(step.kept_on_host for step in engine._offloader.steps)
                assert hosted or offload.get("method") != "cpu_rank"
                assert not hosted or offload.get("method") not in ("stream", "kvpr", "chunked")
    assert all(map(torch.equal, *found))
    assert all(torch.equal(each, again[0]) for each in again) and len(again) == 3


EVICTING: dict[str, dict[str, Any]] = {
    "streaming_llm": {"method": "streaming_llm"},
    "h2o": {"method": "h2o"},
    "ada_snapkv": {"method": "ada_snapkv", "window": 4},
}


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("fairkv", EVICTING.values(), ids=EVICTING)
@pytest.mark.parametrize(
    "offload",
    [*({"method": name} for name in (*METHODS, AUTO)), {"disk": True}, {"num_gpu_batches": 2}, {"weights": True}],
    ids=str,
)
def test_evicted_while_decoding_and_offloaded(
    offload: dict[str, Any], fairkv: dict[str, Any], offloaded: Callable[..., Any], tmp_path: Path
) -> None:
    """The same tokens as on the accelerator, also from what the other has saved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"](), dtype=torch.float32).eval()
    away = {**SETTINGS, **offload}
    if away.pop("disk", False):
        away |= {"host_gb": 8 * 10 / (1 << 20), "disk_gb": 0.02, "disk_path": str(tmp_path)}
    found, again = [], []
    for name, section in (("here", {"enabled": False}), ("away", away)):
        evicting = {"budget": 16, "min_tokens": 24, "decode_interval": 9, **fairkv}
        settings = {"dtype": "fp32", "megakv": {"fairkv": evicting, "offload": section}}
        with megakv.init_inference(copy.deepcopy(model), settings) as engine:
            found.append(converse(engine, tmp_path / name, max_new_tokens=24))
            for saved in (tmp_path / each for each in ("here", "away") if (tmp_path / each).exists()):
                session, ids = engine.restore_session(saved), torch.full((2, 3), 7)
                again.append(session.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0))
                session.close()
    assert all(map(torch.equal, *found))
    assert all(torch.equal(each, again[0]) for each in again) and len(again) == 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_compressed_cache_takes_its_budget_off_the_accelerator(bits: int | None) -> None:
    """Memory and traffic are within 5% of the budget's part of the dense cache's, in as many bits; nothing of it
    stays.
    """
    config = CONFIGS["llama"](max_position_embeddings=8192)
    # So long that pages that are partly empty hardly count.
    prompt, new = {None: 1200, 8: 2400, 4: 4800}[bits], 4
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    layers, whole = config.num_hidden_layers, 2 * 4 * config.num_key_value_heads * config.head_dim
    # In few bits a step and a smallest value for each head's key, and value.
    row = whole if bits is None else whole * bits // 32 + 2 * config.num_key_value_heads * 2 * 4
    offload = {**SETTINGS, "method": "stream", "page_kib": 2, "kv_bits": bits}
    section = {"fairkv": {"budget": 0.25, "min_tokens": 64}, "offload": offload}
    ids = torch.randint(3, 120, (2, prompt), generator=torch.Generator().manual_seed(1))
    with megakv.init_inference(model, {"dtype": "fp32", "megakv": section}) as engine:
        session, offloader = engine.session(), engine._offloader
        open_turns: list[int] = []

        def storage(body: RaggedBody) -> int:
            return body.block.untyped_storage().data_ptr()

        def look(module: Any, args: Any, output: Any) -> None:
            stores = [session._cache.store(layer) for layer in range(layers)]
            open_turns.append(sum(store.nbytes() for store in stores) - sum(session._cache.page_bytes()))

        hooks = [layer.register_forward_hook(look) for layer in engine.module.model.layers]
        session.generate(ids, torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
        [hook.remove() for hook in hooks]
        # Of the prompt a quarter is kept, of the answer all but its last token.
        kept = 2 * layers * row * (prompt // 4 + new - 1)
        assert kept <= offloader.pool.used()["host"] <= 1.05 * kept
        # Dense rows of a layer are gone before the next one is computed; where tokens lay is what is left, in no fewer
        # bits than without.
        assert max(open_turns) <= 0.05 * kept * whole / row
        # Two buffers for a layer of bodies and of the few other rows; beside what comes in few bits what it stands for.
        tokens = 2 * (prompt // 4 + new)
        assert offloader.staging_bytes <= 2 * 17 / 16 * tokens * (row + (0 if bits is None else whole))
        staged = offloader._prefetch._staged.values()
        places = {storage(body) for each in staged for body in each.bodies.values()}
        gc.collect()
        bodies = [each for each in gc.get_objects() if isinstance(each, RaggedBody) and len(each.block) > 0]
        assert places.issuperset(map(storage, bodies))
        steps = [step.report() for step in offloader.steps]
        assert [(step.cached, step.kept) for step in steps] == [(2 * done, prompt // 2) for done in range(new - 1)]
        # Two layers of one more step may have come.
        brought = sum(step.bytes_in for step in steps) / kept
        assert 0.95 * (new - 1) <= brought <= 1.05 * (new - 1 + 2 / layers)
        # The costs know of it: nothing was predicted of a step without other tokens.
        assert all(step.predicted_s > 0 for step in steps[1:])


@pytest.mark.parametrize(
    ("name", "method", "kv_bits"),
    [
        *(("opt", method, kv_bits) for method in ("stream", "kvpr", "auto") for kv_bits in (None, 4)),
        *((name, "kvpr", None) for name in ("llama_dynamic_rope", "phi3_longrope")),
    ],
)
def test_a_dry_run_counts_what_an_engine_takes(
    name: str, method: str, kv_bits: int | None, offloaded: Callable[..., Any], tmp_path: Path
) -> None:
    model = plain_model(name)
    model.config.save_pretrained(tmp_path)
    offload = {"enabled": True, "method": method, "kv_bits": kv_bits, "host_gb": 0.05, "page_kib": 8}
    settings = {"dtype": "fp32", "megakv": {"offload": offload}}
    found = dry_run(tmp_path, settings, context=37, batch=3, new_tokens=5)
    engine = offloaded(model, **offload)
    session = engine.session()
    ids = torch.randint(3, 190, (3, 37), generator=torch.Generator().manual_seed(5))
    # Of the last token there are no keys and values.
    session.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    # The last page of each sequence and layer is partly empty, and rows and activations have their own.
    spare = engine._offloader.pool.used()["host"] - found.ranks[0].host_bytes
    assert 0 <= spare < 2 * 3 * model.config.num_hidden_layers * (8 << 10)
    assert found.host_taken == int(0.05 * (1 << 30)) and found.problem is None


def test_a_dry_run_counts_whole_pages_of_each_tier(offloaded: Callable[..., Any], tmp_path: Path) -> None:
    model = plain_model("opt")
    layers = model.config.num_hidden_layers
    model.config.save_pretrained(tmp_path)
    ids, pages = torch.randint(3, 190, (2, 37), generator=torch.Generator().manual_seed(5)), layers * 2 * 3
    # Together they have room for one page more than each for its own.
    for host, fits in ((pages / 2 - 0.5, False), (pages / 2, True)):
        offload = {
            "enabled": True,
            "method": "stream",
            "host_gb": host * 8 / (1 << 20),
            "disk_gb": (pages / 2 + 0.5) * 8 / (1 << 20),
            "disk_path": str(tmp_path),
            "page_kib": 8,
        }
        found = dry_run(tmp_path, {"dtype": "fp32", "megakv": {"offload": offload}}, context=37, batch=2, new_tokens=4)
        assert (found.problem is None) == fits
        engine = offloaded(copy.deepcopy(model), **offload)
        if fits:
            generate(engine, ids, torch.ones_like(ids), max_new_tokens=4)
            continue
        assert found.problem is not None and f"room for {(pages - 1) * 8}.00 KiB in whole pages" in found.problem
        with pytest.raises(MegaKVError, match=f"of which {(pages - 1) * 8}.00 KiB can be used"):
            generate(engine, ids, torch.ones_like(ids), max_new_tokens=4)


@pytest.mark.parametrize("enabled", [False, True])
def test_turns_with_beams_and_without_follow_each_other(enabled: bool, offloaded: Callable[..., Any]) -> None:
    model = plain_model("qwen3")
    engine = offloaded(copy.deepcopy(model), enabled=enabled)
    session, history = engine.session(), torch.empty(2, 0, dtype=torch.int64)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached = []
    for number, beams in enumerate((3, 1, 3, 2, 1)):
        turn = torch.randint(3, 190, (2, 9), generator=torch.Generator().manual_seed(number))
        history = torch.cat([history, turn], dim=1)
        expected = generate(model, history, torch.ones_like(history), num_beams=beams, max_new_tokens=5)
        history = session.generate(turn, num_beams=beams, **options)
        assert torch.equal(history, expected)
        cached.append(session.length)
        with pytest.raises(ValueError, match="num_return_sequences = 2 is not supported in a session; use 1"):
            session.generate(turn, num_return_sequences=2, num_beams=2, **options)
    # What beams computed is computed again.
    assert cached == [0, 27, 27, 27, 69]


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_inference_mode_comes_and_goes(name: str, offloaded: Callable[..., Any], tmp_path: Path) -> None:
    model = plain_model(name)
    ids, mask = ragged(4)
    expected = generate(model, ids, mask)
    engine = offloaded(model, method="auto", host_gb=12 * 8192 / (1 << 30), disk_gb=0.01, disk_path=str(tmp_path))
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            assert torch.equal(generate(engine, ids, mask), expected)


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("groups", [1, 4])
def test_a_step_has_one_plan(groups: int, offloaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are tried in turns: a second choice in one step would end a trial in its midst."""
    made: list[list[int]] = []
    solve = Planner._plan

    def solved(self: Planner, store: Any, *rest: Any) -> Any:
        made.append(store.cached_before_step())
        return solve(self, store, *rest)

    monkeypatch.setattr(Planner, "_plan", solved)
    engine = offloaded(plain_model("opt"), method="auto", num_gpu_batches=groups)
    ids, mask = ragged(4)
    generate(engine, ids, mask, max_new_tokens=8, min_new_tokens=8)
    decoded = [lengths for lengths in made if sum(lengths) > 0]
    assert len(decoded) == len({tuple(lengths) for lengths in decoded}) >= 7


def test_copies_of_a_cache_go_on_by_themselves(offloaded: Callable[..., Any]) -> None:
    model = plain_model("opt")
    engine = offloaded(copy.deepcopy(model), method="stream")
    ids = torch.randint(3, 190, (1, 21), generator=torch.Generator().manual_seed(6))
    cache = engine(ids).past_key_values
    for held, token in ((copy.deepcopy(cache), 5), (cache, 7)):
        longer = torch.cat([ids, torch.tensor([[token]])], dim=1)
        with torch.no_grad():
            expected = model(longer).logits[:, -1]
        torch.testing.assert_close(engine(longer[:, -1:], past_key_values=held).logits[:, -1], expected)

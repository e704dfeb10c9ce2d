"""The profiler measures the link and recomputation, keeps them, learns, and refuses what is of another machine."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megakv.costmodel.hardware import Fingerprint, load_profile
from megakv.offload.disk import DiskTier
from megakv.offload.link import Direction, EmulatedLink, Move, Transfer
from megakv.offload.profile import Profiler
from megakv.offload.rates import Rates
from tests.measuring import until_it_holds
from tests.unit.costmodel.profiles import ideal
from tests.unit.offload.test_exactness import generate, plain_model

LINK_GB_S = 0.001
"""So slow that a busy machine, which wakes threads late, does not show."""


def offloader_after(offloaded: Any, *, new_tokens: int = 10, **settings: Any) -> Any:
    settings = {"method": "chunked", **settings}
    engine = offloaded(plain_model("opt"), emulated_link_gb_s=LINK_GB_S, **settings)
    ids = torch.randint(3, 190, (2, 60), generator=torch.Generator().manual_seed(1))
    generate(engine, ids, torch.ones_like(ids), max_new_tokens=new_tokens)
    return engine._offloader


def test_an_emulated_link_is_found_to_be_what_it_is(offloaded: Any) -> None:
    def measured() -> None:
        offloader = offloader_after(offloaded)
        rates = offloader.rates
        assert 1 / rates["byte_s"] == pytest.approx(LINK_GB_S * 1e9, rel=0.1)
        assert rates.row_bytes == 2 * 64 * 4 and rates.input_bytes == 64 * 4
        assert 0 < rates["recompute_s"] < 1e-3
        # Recomputing is much cheaper here than sending, so nearly every token is recomputed, and the link is the limit.
        late = offloader.steps[-3:]
        assert all(step.split.recomputed > 0.7 * step.cached for step in late)
        layers = [
            (step.cached - step.split.recomputed) * rates.row_bytes + step.split.recomputed * rates.input_bytes
            for step in offloader.steps
        ]
        # At either end some layers are on their way, two at most.
        assert sum(step.bytes_in for step in offloader.steps) == pytest.approx(2 * sum(layers), abs=4.1 * max(layers))

    until_it_holds(measured)


def test_a_link_that_drifts_is_measured_anew(offloaded: Any) -> None:
    def measured() -> None:
        engine = offloaded(plain_model("opt"), method="stream", emulated_link_gb_s=4 * LINK_GB_S)
        link, speeds = engine._offloader.link, []

        def slow_down(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            rates = engine._offloader.rates
            speeds.append(None if rates.profile is None else 1 / rates["byte_s"])
            if len(speeds) == 8:
                link.bytes_s = LINK_GB_S * 1e9
            return torch.zeros(len(input_ids), dtype=torch.bool)

        ids = torch.randint(3, 190, (1, 20), generator=torch.Generator().manual_seed(1))
        generate(engine, ids, torch.ones_like(ids), max_new_tokens=24, stopping_criteria=[slow_down])
        assert speeds[7] == pytest.approx(4 * LINK_GB_S * 1e9, rel=0.1)
        assert speeds[-1] == pytest.approx(LINK_GB_S * 1e9, rel=0.1)
        last = engine._offloader.steps[-1]
        # A busy machine takes longer than it was predicted to, and never less.
        assert last.plan.seconds < 1.2 * last.measured_s

    until_it_holds(measured)


def test_a_profile_is_kept_and_read(offloaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    offloader_after(offloaded, profile=str(path))
    values = json.loads(path.read_text())
    assert values["emulated_link_gb_s"] == LINK_GB_S and values["disk_bandwidth"] is None
    # A second a token.
    operations = 2 * 64 * 2 * 64
    path.write_text(json.dumps(values | {"recompute_flops": operations}))
    offloader = offloader_after(offloaded, profile=str(path))
    assert offloader.steps[0].split.recomputed == 0 and offloader.rates.measured["recompute_s"] == pytest.approx(1.0)


def test_a_profile_of_megakv_profile_is_added_to_and_stays_one(
    offloaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With times of the link as its bytes would have on a machine that does nothing else."""
    sent, start = [0], EmulatedLink.start

    def counted(link: EmulatedLink, direction: Direction, moves: Sequence[Move]) -> Transfer:
        sent[0] += sum(move.nbytes for move in moves)
        return start(link, direction, moves)

    def timed(call: Callable[[], object]) -> float:
        before = sent[0]
        call()
        return (sent[0] - before or 1) / (LINK_GB_S * 1e9)

    monkeypatch.setattr(EmulatedLink, "start", counted)
    monkeypatch.setattr("megakv.offload.profile.timed", timed)
    path = tmp_path / "profile.json"
    here = Fingerprint.of_this_process(hosts=1, ranks=4, dtype=torch.float32)
    before = ideal(fingerprint=here, memory_bytes=1 << 30)
    before.save(path)
    offloader_after(offloaded, profile=str(path))
    after = load_profile(path)
    assert after.host_link is not None and after.recompute_flops is not None
    assert after.host_link.bandwidth == pytest.approx(LINK_GB_S * 1e9)
    # What it had is the same, and so it is one profile to ranks of other hosts, whose links differ.
    assert after.digest() == before.digest() and after.attention == before.attention
    assert after.fingerprint.ranks == 4 and after.memory_bytes == 1 << 30


def test_what_others_write_meanwhile_stays(offloaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    offloader = offloader_after(offloaded, method="cpu_rank")
    config, store = offloader.config.model_copy(update={"profile": str(path)}), offloader._cache.store(0)
    profiler = Profiler(config, offloader.link, None, torch.device("cpu"))
    profiler.profile(store, None, None)
    # `megakv profile`, between two steps of the engine.
    here = Fingerprint.of_this_process(hosts=1, ranks=4, dtype=torch.float32)
    ideal(fingerprint=here, memory_bytes=1 << 30).save(path)
    profiler.profile(store, None, offloader._host_rank)
    after = load_profile(path)
    assert after.memory_bytes == 1 << 30 and after.host_link is not None and after.host_attention_bandwidth is not None


def test_what_an_engine_measured_does_not_pass_for_the_whole(offloaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    offloader_after(offloaded, profile=str(path), method="stream")
    with pytest.raises(ValueError, match="Field required; write a new one with megakv profile --json FILE"):
        load_profile(path)


def test_a_profile_of_one_method_serves_another(offloaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    found = []
    for method in ("stream", "chunked", "cpu_rank", "auto"):
        offloader_after(offloaded, profile=str(path), method=method)
        found.append(json.loads(path.read_text()))
    streamed, recomputed, attended, last = found
    assert streamed["recompute_flops"] is recomputed["host_attention_bandwidth"] is None
    assert recomputed["recompute_flops"] > 0 and attended["host_attention_bandwidth"] > 0
    # Nothing is measured twice.
    assert last == attended and attended["recompute_flops"] == recomputed["recompute_flops"]
    assert all(values["host_link"] == streamed["host_link"] for values in found)


def test_the_disk_is_measured_where_there_is_one(offloaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    found = []
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        host = {"host_gb": 8 * 8 / (1 << 20), "disk_gb": 0.01, "disk_path": str(tmp_path / folder)}
        offloader = offloader_after(offloaded, profile=str(path), method="stream", **host)
        found.append(json.loads(path.read_text()))
        # What was measured is no traffic: in all steps some rows were read, never more than all that lie there.
        held = offloader.pool.used()["disk"]
        assert held and all(0 < step.disk_bytes < min(step.bytes_in, 1.5 * held) for step in offloader.steps)
        assert offloader.steps[-1].report().disk_utilisation > 0
    assert found[0]["disk_bandwidth"] > 0
    assert found[0]["disk"] == f"{tmp_path / 'one'} (files)" and found[1] == found[0]
    assert found[2]["disk"] == f"{tmp_path / 'two'} (files)"
    assert found[2]["host_link"] == found[0]["host_link"]


@pytest.mark.full
@pytest.mark.parametrize("method", ["stream", "chunked", "cpu_rank"])
def test_steps_with_rows_on_a_slow_disk_are_predicted(
    method: str, offloaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = DiskTier.read

    def slowly(tier: DiskTier, offset: int, memory: memoryview) -> None:
        begun = time.perf_counter()
        plainly(tier, offset, memory)
        time.sleep(max(0.0, begun + len(memory) / (LINK_GB_S * 1e9) - time.perf_counter()))

    monkeypatch.setattr(DiskTier, "read", slowly)
    # What is predicted is what the profile says: no step has shown anything yet.
    monkeypatch.setattr(Rates, "learn", lambda self, *args: None)
    tiers = {"host_gb": 8 * 8 / (1 << 20), "disk_gb": 0.01, "disk_path": str(tmp_path)}
    engine = offloaded(plain_model("opt"), method=method, emulated_link_gb_s=5 * LINK_GB_S, **tiers)
    ids = torch.randint(3, 190, (2, 60), generator=torch.Generator().manual_seed(1))
    generate(engine, ids, torch.ones_like(ids), max_new_tokens=7, min_new_tokens=7)
    rates = engine._offloader.rates
    assert 1 / rates["disk_byte_s"] == pytest.approx(LINK_GB_S * 1e9, rel=0.15)
    assert 1 / rates["byte_s"] == pytest.approx(5 * LINK_GB_S * 1e9, rel=0.15)
    if method == "chunked":
        # Activations are smaller than keys and values here: those of all sequences come to memory first.
        store = engine._offloader._cache.store(0)
        assert min(store.in_memory(inputs=True)) >= 60 and store.in_memory() == [0, 0]
    ratios = [step.plan.seconds / step.measured_s for step in engine._offloader.steps[1:]]
    assert statistics.median(ratios) == pytest.approx(1.0, rel=0.2)


def test_a_profile_is_refused_at_start(offloaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    offloader_after(offloaded, profile=str(path))
    with pytest.raises(ValueError, match="another emulated link"):
        offloaded(plain_model("opt"), profile=str(path))
    with pytest.raises(ValueError, match=r"offload.profile = .*there is no folder"):
        offloaded(plain_model("opt"), profile=str(tmp_path / "nowhere" / "offload.json"))
    with pytest.raises(ValueError, match=r"offload.profile = .* is a folder; name a file"):
        offloaded(plain_model("opt"), profile=str(tmp_path))
    # Not even root may make a file there.
    with pytest.raises(ValueError, match=r"offload.profile = '/proc/offload.json' cannot be written: .*name another"):
        offloaded(plain_model("opt"), profile="/proc/offload.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": {"processor": "abacus"}}, "processor 'abacus', here"),
        ({"disk_bandwidth": -1}, "disk_bandwidth: Input should be greater than 0"),
        ({"format": "megakv offload profile"}, "is not a megakv hardware profile"),
    ],
)
def test_foreign_profiles_are_refused(changes: dict[str, Any], message: str, offloaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    offloader_after(offloaded, profile=str(path))
    values = json.loads(path.read_text())
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"megakv.offload.profile = .*{message}.*remove it, and it is measured anew"):
        # Nothing is computed in vain.
        offloaded(plain_model("opt"), profile=str(path), emulated_link_gb_s=LINK_GB_S)


def test_every_generation_brings_the_next_step_s_first_layers_ahead(offloaded: Any) -> None:
    engine = offloaded(plain_model("opt"), method="stream")
    ids = torch.randint(3, 190, (2, 20), generator=torch.Generator().manual_seed(1))
    for options in ({}, {}, {"num_beams": 2}, {}):
        generate(engine, ids, torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, **options)
        steps = engine._offloader.steps
        # The first step begins cold. Beams change places, so that nothing can be brought ahead of them.
        assert [step.steady for step in steps[1:]] == [True] * len(steps[1:]) and not steps[0].steady
        assert engine._offloader._planner.ahead == ("num_beams" not in options)

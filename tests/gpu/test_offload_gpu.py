"""Offloaded keys and values over the real link of one CUDA GPU: streams, events and pinned memory."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megakv
from megakv.offload import host_memory
from megakv.offload.cuda_link import CudaStreams, StreamLink
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier
from megakv.offload.link import Move, Place
from megakv.offload.method import AUTO, METHODS
from megakv.offload.paged_rows import PagedRows
from megakv.offload.pages import PagePool
from megakv.offload.prices import LayerPrices
from megakv.offload.rates import Rates
from tests.unit.offload.test_columns import deep_model
from tests.unit.offload.test_exactness import generate, plain_model, ragged
from tests.unit.offload.test_stress import Shadow

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
STEPS = 1000


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_link_keeps_order_and_content() -> None:
    device = torch.device("cuda")
    link, tier = StreamLink(CudaStreams(device)), HostTier(64 << 20, pin=True)
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.empty(4096, 64, device=device) for _ in range(2)]
    rows = [tier.rows(index * 4096 * 64 * 4, 4096, 64, torch.float32) for index in range(8)]
    places = [[Place()] for _ in range(8)]
    sums = [0.0] * 8
    for step in range(200):
        index = int(torch.randint(8, (1,), generator=generator))
        source = torch.randn(4096, 64, device=device)
        sums[index] = source.double().sum().item()
        link.start("out", [Move.of(rows[index], source, places[index])])
        del source
        target = buffers[step % 2]
        link.start("in", [Move.of(rows[index], target, places[index])]).wait()
        assert target.double().sum().item() == pytest.approx(sums[index])
    assert isinstance(rows[0], torch.Tensor)
    link.close()
    tier.close()


def test_memory_that_cannot_be_locked_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    link, tier = StreamLink(CudaStreams(device)), HostTier(8 << 20, pin=True)
    # It is locked already, so the driver refuses; nobody else's kernel may be blamed for that.
    tier._pin()
    assert "pinning host memory failed after 0 B of 8.00 MiB" in caplog.text
    source, target = torch.randn(512, 1024, device=device) + 1, torch.empty(512, 1024, device=device)
    rows = tier.rows(0, 512, 1024, torch.float32)
    place = [Place()]
    link.start("out", [Move.of(rows, source, place)])
    link.start("in", [Move.of(rows, target, place)]).wait()
    assert torch.equal(source, target)
    link.close()
    tier.close()


def test_copies_go_across_pieces_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIN_BYTES", 4 << 20)
    device = torch.device("cuda")
    link, tier = StreamLink(CudaStreams(device)), HostTier(18 << 20, pin=True)
    source, target = torch.randn(4096, 1024, device=device), torch.zeros(4096, 1024, device=device)
    rows = PagedRows(PagePool([tier], 1 << 20), 1024, torch.float32)
    moves = rows.append(source)
    assert tier.seam == 4 << 20 and len(moves) == 4
    link.start("out", moves)
    link.start("in", rows.moves(0, target)).wait()
    assert torch.equal(source, target)
    link.close()
    tier.close()


def test_files_and_memory_keep_one_order(tmp_path: Path) -> None:
    device, width, count = torch.device("cuda"), 8192, 64
    link, memory, disk = StreamLink(CudaStreams(device)), HostTier(8 << 20, pin=True), DiskTier(8 << 20, tmp_path)
    generator = torch.Generator().manual_seed(2)
    expected = torch.zeros(2 * count, width, dtype=torch.float16, device=device)
    halves, place = [tier.rows(0, count, width, torch.float16) for tier in (memory, disk)], [Place()]
    written = link.start("out", [Move.of(rows, expected[:count].clone(), place) for rows in halves])
    buffers, wrong = [torch.empty_like(expected) for _ in range(2)], []
    for step in range(300):
        target = buffers[step % 2]
        parts = [Move.of(rows, part, place) for rows, part in zip(halves, target.split(count), strict=True)]
        link.start("in", parts[:: 1 if step % 3 else -1]).wait()
        wrong.append((target != expected).any())
        row = int(torch.randint(2 * count, (1,), generator=generator))
        expected[row] = torch.randn(width, generator=generator).half().to(device)
        tier, at = (memory, disk)[row // count], row % count
        rows = tier.rows(at * width * 2, 1, width, torch.float16)
        written = link.start("out", [Move.of(rows, expected[row : row + 1].clone(), place)])
    assert not torch.stack(wrong).any()
    written.settle()
    torch.cuda.synchronize()
    traffic = link.traffic["in"]
    assert traffic.timed_bytes == traffic.nbytes == 300 * expected.nbytes
    # A disk cannot be faster than any link, and a link not than any memory.
    assert 1e6 < traffic.timed_bytes / traffic.busy_s < 1e12
    link.close()
    memory.close()
    disk.close()


def test_what_steps_show_is_learned() -> None:
    section = {"enabled": True, "method": "chunked", "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}
    engine = megakv.init_inference(plain_model("opt").cuda(), {"dtype": "fp32", "megakv": {"offload": section}})
    ids, mask = (tensor.cuda() for tensor in ragged(4))
    for _ in range(2):
        generate(engine, ids, mask, max_new_tokens=20, min_new_tokens=20)
    rates, steps = engine._offloader.rates, engine._offloader.steps
    assert rates["device_s"] > 0 and rates["byte_s"] not in (0.0, rates.measured["byte_s"])
    assert all(0 < step.measured_s < 10 and 0 <= step.waited_s <= step.measured_s for step in steps[1:])
    assert all((step.recompute_s > 0) == (step.split.recomputed > 0) for step in steps)
    engine.destroy()


@pytest.mark.parametrize("method", [*METHODS, AUTO])
@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gpt_neox", "falcon", "gemma"])
def test_tokens_are_the_plain_model_s(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Rates.prices

    def layer(self: Rates, *args: Any, **options: Any) -> LayerPrices:
        measured(self, *args, **options)
        return LayerPrices(kv_s=3.0, activation_s=1.0, recompute_s=1.3, attend_s=1.0, host_attend_s=2.0)

    monkeypatch.setattr(Rates, "prices", layer)
    monkeypatch.setattr(Rates, "learn", lambda self, *args: None)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = plain_model(name).cuda()
    ids, mask = (tensor.cuda() for tensor in ragged(4))
    expected = generate(model, ids, mask)
    section = {"enabled": True, "method": method, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": {"offload": section}})
    for _ in range(3):
        assert torch.equal(generate(engine, ids, mask), expected)
    engine.destroy()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gpt_neox"])
def test_columns_and_beams_over_both_tiers(name: str, groups: int, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = deep_model(name).cuda()
    ids, mask = (tensor.cuda() for tensor in ragged(4))
    expected = generate(model, ids, mask, num_beams=2)
    held = sum(p.nbytes for key, p in model.named_parameters() if ".layers." in key)
    section = {
        "enabled": True, "method": "chunked", "weights": True, "num_gpu_batches": groups, "page_kib": 8,
        "host_gb": (held + 8 * 8192) / (1 << 30), "disk_gb": 0.02, "disk_path": str(tmp_path),
    }  # fmt: skip
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": {"offload": section}})
    for _ in range(3):
        assert torch.equal(generate(engine, ids, mask, num_beams=2), expected)
    assert engine._offloader.pool.used()["disk"]
    engine.destroy()


@pytest.mark.parametrize("method", ["stream", "chunked", "auto"])
def test_no_row_is_corrupted_in_a_thousand_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    section = {"enabled": True, "method": method, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}
    engine = megakv.init_inference(plain_model("opt").cuda(), {"dtype": "fp32", "megakv": {"offload": section}})
    shadow = Shadow(monkeypatch)
    ids = torch.randint(3, 190, (2, 5), generator=torch.Generator().manual_seed(1)).cuda()
    engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS + 1, do_sample=False)
    shadow.check(2 * 2 * (STEPS + 1), tolerance=0.0 if method == "stream" else 1e-4)
    engine.destroy()

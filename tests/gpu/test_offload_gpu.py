"""Offloaded keys and values over the real link of one CUDA GPU: streams, events and pinned memory."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megakv
from megakv.costmodel.offload import LayerCosts
from megakv.offload.costs import OffloadCosts
from megakv.offload.cuda_link import CudaLink
from megakv.offload.link import MemoryRows, Move
from megakv.offload.tiers import HostTier
from tests.unit.offload.test_exactness import generate, plain_model, ragged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_link_keeps_order_and_content() -> None:
    device = torch.device("cuda")
    link, tier = CudaLink(device), HostTier(64 << 20, pin=True)
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.empty(4096, 64, device=device) for _ in range(2)]
    rows = [tier.rows(index * 4096 * 64 * 4, 4096, 64, torch.float32) for index in range(8)]
    written = [None] * 8
    sums = [0.0] * 8
    for step in range(200):
        index = int(torch.randint(8, (1,), generator=generator))
        source = torch.randn(4096, 64, device=device)
        sums[index] = source.double().sum().item()
        ticket = link.start("out", [Move(rows[index], source)])
        written[index] = ticket
        del source
        target = buffers[step % 2]
        link.start("in", [Move(rows[index], target)], after=[ticket]).wait()
        assert target.double().sum().item() == pytest.approx(sums[index])
    assert isinstance(rows[0], MemoryRows)
    link.close()
    tier.close()


@pytest.mark.parametrize("method", ["stream", "kvpr", "chunked", "cpu_rank", "auto"])
@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gpt_neox", "falcon", "gemma"])
def test_tokens_are_the_plain_model_s(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = OffloadCosts.layer

    def layer(self: OffloadCosts, *args: Any) -> LayerCosts:
        measured(self, *args)
        return LayerCosts(kv_s=3.0, activation_s=1.0, recompute_s=1.3, host_attend_s=2.0)

    monkeypatch.setattr(OffloadCosts, "layer", layer)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = plain_model(name).cuda()
    ids, mask = (tensor.cuda() for tensor in ragged(4))
    expected = generate(model, ids, mask)
    section = {"enabled": True, "method": method, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32", "megakv": {"offload": section}})
    for _ in range(3):
        assert torch.equal(generate(engine, ids, mask), expected)
    engine.destroy()

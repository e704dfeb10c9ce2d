"""What compression keeps, off the accelerator in few bits: rounded once, as rows of all heads are."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.attention.partial import PartialAttention, Scoring
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import RaggedBody
from megakv.costmodel.stored_rows import group_size
from megakv.offload.bodies import PackedBody, TieredBody
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier
from megakv.offload.link import EmulatedLink
from megakv.offload.pages import PagePool
from megakv.offload.row_format import GroupQuantiser, HeadShape
from tests.families import FAMILIES
from tests.unit.fairkv.test_ragged import masked_reference, skewed_mask
from tests.unit.offload.conftest import SETTINGS
from tests.unit.offload.test_combinations import EVICTING, converse

PAGE = 1 << 10


def rounded(k_KSD: torch.Tensor, v_KSD: torch.Tensor, asked: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as they come back of rows of all heads."""
    shape = HeadShape(k_KSD.shape[0], k_KSD.shape[2], v_KSD.shape[2])
    rows = torch.cat((k_KSD.transpose(0, 1).flatten(1), v_KSD.transpose(0, 1).flatten(1)), dim=1)
    quantiser, back = (
        GroupQuantiser(shape.width, group_size(*shape[1:], asked), rows.dtype, bits),
        torch.empty_like(rows),
    )
    quantiser.unpack(quantiser.pack(rows), back)
    return shape.split(back)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dims", "asked"), [((16, 24), 8), ((7, 7), 64), ((9, 6), 3), ((20, 0), 4)])
def test_a_body_is_rounded_as_rows_are(
    dims: tuple[int, int], asked: int, dtype: torch.dtype, bits: int, tmp_path: Path
) -> None:
    """Here, on the host, and cut and written again; the host's attention to it is exact."""
    kv_heads, share, length, on_disk = 5, 3, 700, bits == 8
    k, v = (torch.randn(kv_heads, length, dim).to(dtype) for dim in dims)
    keep = skewed_mask(kv_heads, length)
    body = RaggedBody.kept(k, v, keep, np.arange(length))
    assert body is not None
    quantiser = GroupQuantiser(sum(dims), group_size(*dims, asked), dtype, bits)
    row = -(-sum(dims) * bits // 8) + 2 * sum(dims) // group_size(*dims, asked) * (2 if dtype == torch.float16 else 4)
    tiers: list[Any] = [HostTier(2 * PAGE if on_disk else 400 * PAGE), DiskTier(400 * PAGE, tmp_path)]
    pool = PagePool(tiers, PAGE)
    link = EmulatedLink()
    engine: Any = SimpleNamespace(link=link, pool=pool, device=torch.device("cpu"))
    tiered = TieredBody(body, 0, engine, quantiser)
    assert tiered.page_bytes == PAGE * -(-body.index.tokens // (PAGE // row))
    assert (tiered.in_memory < tiered.tokens) == on_disk
    wanted = [each[keep] for each in rounded(k, v, asked, bits)]
    for found in (tiered, tiered.on_host(), TieredBody(tiered.here(), 0, engine, quantiser)):
        assert all(map(torch.equal, found.here().flat()[:2], wanted))
    cut = tiered.below(length // 3)
    assert cut is not None
    early = [each[: keep[:, : length // 3].sum()] for each in cut.here().flat()[:2]]
    again = TieredBody(cut.here(), 0, engine, quantiser)
    assert all(map(torch.equal, again.here().flat()[:2], early))

    hosted = tiered.on_host()
    assert isinstance(hosted, PackedBody)
    q = torch.randn(kv_heads * share, 1, dims[0]).to(dtype)
    for cap in (None, 20.0):
        scoring = Scoring(scale=0.3, softcap=cap, value_columns=None if dims[1] else 6)
        columns = scoring.value_columns or dims[1]
        partial = PartialAttention(q, np.array([length]), scoring, columns)
        RaggedPart(0, hosted, np.arange(length), np.arange(length)).add_to(partial)
        k_r, v_r = rounded(k, v, asked, bits)
        if not dims[1]:
            v_r = k_r[..., :columns]
        out, lse = masked_reference(q, k_r, v_r, keep[:, None], scoring)
        if dtype == torch.float32:
            torch.testing.assert_close(partial.out.double(), out, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(partial.lse.double(), lse, rtol=1e-5, atol=1e-5)
        else:
            # The kernel unpacks into float32, PyTorch into the type.
            torch.testing.assert_close(partial.out.double(), out, rtol=2e-2, atol=2e-2)
    link.close()


PROMPTS: dict[str, Any] = {"budget": 0.3, "min_tokens": 24, "window": 4}
EVICTED: dict[str, Any] = {"budget": 16, "min_tokens": 24, "decode_interval": 9}
KEPT = {"prompts": PROMPTS, **{name: {**EVICTED, **own} for name, own in EVICTING.items()}}
FEW_BITS: dict[str, Any] = {**SETTINGS, "method": "stream", "kv_group": 8}


def settings(fairkv: dict[str, Any], **offload: Any) -> dict[str, Any]:
    return {"dtype": "fp32", "megakv": {"fairkv": fairkv, "offload": {**FEW_BITS, **offload}}}


def on_disk(folder: Path) -> dict[str, Any]:
    return {"host_gb": 8 * 6 / (1 << 20), "disk_gb": 0.02, "disk_path": str(folder)}


def tiny_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES["qwen3"](), dtype=torch.float32).eval()


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("fixed_costs", "alone")
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_tier_changes_nothing(bits: int, kept: str, tmp_path: Path) -> None:
    """The same tokens from host memory as from the disk, over turns, beams, a cut and a fork, also from what the other
    has saved.
    """
    model, found, again = tiny_model(), [], []
    for name, tiers in (("memory", {}), ("disk", on_disk(tmp_path))):
        with megakv.init_inference(copy.deepcopy(model), settings(KEPT[kept], kv_bits=bits, **tiers)) as engine:
            found.append(converse(engine, tmp_path / name, max_new_tokens=5 if kept == "prompts" else 24))
            for saved in (tmp_path / each for each in ("memory", "disk") if (tmp_path / each).exists()):
                session = engine.restore_session(saved)
                made = session.generate(torch.full((2, 3), 7), max_new_tokens=20, do_sample=False, pad_token_id=0)
                again.append(made)
                session.close()
            steps = [step.report() for step in engine._offloader.steps]
            assert {step.kv_bits for step in steps} == {bits}
            assert any(step.disk_bytes for step in steps) == (name == "disk")
    assert all(map(torch.equal, *found))
    assert all(torch.equal(each, again[0]) for each in again) and len(again) == 3


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("fixed_costs", "alone")
@pytest.mark.parametrize("kept", ["prompts", "streaming_llm"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("more", [{}, {"weights": True}, {"num_gpu_batches": 2}], ids=str)
def test_the_host_attends_to_what_is_sent(more: dict[str, Any], bits: int, kept: str) -> None:
    """Logits for the same tokens differ by far less than what rounding itself changes: where the last digit of a sum
    decides between two levels, one element differs by a step.
    """
    model = tiny_model()

    def logits(**offload: Any) -> torch.Tensor:
        generator, found = torch.Generator().manual_seed(5), []
        with megakv.init_inference(copy.deepcopy(model), settings(KEPT[kept], **offload)) as engine:
            cache = None
            for length in (90, *[1] * 20, 31, *[1] * 20):
                ids = torch.randint(3, 120, (2, length), generator=generator)
                made = engine(ids, past_key_values=cache)
                cache = made.past_key_values
                found.append(made.logits[:, -1])
            hosted.append(max(step.report().kept_on_host for step in engine._offloader.steps))
        return torch.stack(found)

    hosted: list[int] = []
    exact, sent, host = logits(), logits(kv_bits=bits), logits(kv_bits=bits, method="cpu_rank", **more)
    assert hosted[:2] == [0, 0] and hosted[2] > 0
    # Nothing has been read back in the first pass.
    torch.testing.assert_close(sent[0], exact[0])
    rounding, other = ((each - sent).abs().max().item() for each in (exact, host))
    assert other < 0.1 * rounding and rounding > 0


@pytest.mark.usefixtures("alone")
def test_a_session_is_saved_as_it_was_rounded(tmp_path: Path) -> None:
    """Rows and what compression kept, however often."""
    with megakv.init_inference(tiny_model(), settings(PROMPTS, kv_bits=4)) as engine:
        session = engine.session()
        ids = torch.randint(3, 120, (2, 60), generator=torch.Generator().manual_seed(3))
        session.generate(ids, torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0)

        def held(of: Any) -> list[torch.Tensor]:
            cache = of._cache
            pieces = (
                piece for layer in range(len(cache)) for row in range(2) for piece in cache.store(layer).pieces(row)
            )
            return [torch.cat([keys, values], dim=1) for _, keys, values, _ in pieces]

        first = held(session)
        for number in range(3):
            session.save(tmp_path / str(number))
            session = engine.restore_session(tmp_path / str(number))
            assert all(map(torch.equal, held(session), first)) and len(first) > 4

"""Hundreds of steps over concurrent transfers: at every step and layer, what attention sees is what was computed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from megakv.offload.store import TieredStore
from megakv.weights.placement.attention import attention_modules
from tests.families import CONFIGS
from tests.unit.offload.test_exactness import plain_model

LINK_GB_S = 1.0


class Shadow:
    """A second copy of every row, kept where it was computed as it is appended.

    What attention gets is compared with it in line with the computation. The outcome is only looked at in the end, so
    that nobody waits for anybody on an accelerator either.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.rows: dict[tuple[int, int], list[Tensor]] = {}
        self.errors: list[Tensor] = []
        self.places: list[str] = []
        append, part, packed = TieredStore.append_each, TieredStore.part, TieredStore.packed

        def appended(store: TieredStore, sequences: Sequence[int], keys: Tensor, values: Tensor) -> None:
            pieces = (rows.chunk(len(sequences), dim=1) for rows in (keys, values))
            for sequence, own_keys, own_values in zip(sequences, *pieces, strict=True):
                self._note(store, sequence, own_keys, own_values)
            append(store, sequences, keys, values)

        def compared(store: TieredStore, sequence: int) -> tuple[Tensor, Tensor]:
            keys, values = part(store, sequence)
            self._compare(store, sequence, keys, values)
            return keys, values

        def compared_packed(store: TieredStore) -> Any:
            found = packed(store)
            if found is not None:
                keys, values, firsts, counts = found
                for sequence, (first, count) in enumerate(zip(firsts, counts, strict=True)):
                    rows = slice(first, first + count)
                    self._compare(store, sequence, keys[:, rows], values[:, rows])
            return found

        monkeypatch.setattr(TieredStore, "append_each", appended)
        monkeypatch.setattr(TieredStore, "part", compared)
        monkeypatch.setattr(TieredStore, "packed", compared_packed)

    def _note(self, store: TieredStore, sequence: int, keys: Tensor, values: Tensor) -> None:
        self.rows.setdefault((store.layer, sequence), []).append(torch.cat((keys, values), dim=2).clone())

    def _compare(self, store: TieredStore, sequence: int, keys: Tensor, values: Tensor) -> None:
        found = torch.cat((keys, values), dim=2)
        pieces = self.rows[store.layer, sequence]
        if len(pieces) > 50:
            pieces[:] = [torch.cat(pieces, dim=1)]
        expected = torch.cat(pieces, dim=1)[:, -found.shape[1] :]
        assert found.shape == expected.shape
        self.errors.append((found - expected).abs().max() / expected.abs().max())
        self.places.append(f"layer {store.layer}, sequence {sequence}, {found.shape[1]} rows")

    def check(self, count: int, *, tolerance: float) -> None:
        """So many comparisons were made, and none was off by more."""
        errors = torch.stack(self.errors).cpu()
        # A comparison with NaN is false: what is not known to be near counts as far.
        wrong = [f"{self.places[index]}: {errors[index]}" for index in (~(errors <= tolerance)).nonzero().flatten()]
        assert len(errors) == count and not wrong, wrong[:5]


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize(
    ("method", "count"),
    [("stream", 300), *(pytest.param(method, 1000, marks=pytest.mark.full) for method in ("stream", "auto"))],
)
def test_no_row_is_corrupted(
    method: str, count: int, offloaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model = plain_model("opt")
    # Both tiers, and a link that computation waits for.
    tiers = {"host_gb": 1e-6 * count, "disk_gb": 0.02, "disk_path": str(tmp_path)}
    engine = offloaded(model, method=method, emulated_link_gb_s=LINK_GB_S, **tiers)
    shadow = Shadow(monkeypatch)
    ids = torch.randint(3, 190, (2, 5), generator=torch.Generator().manual_seed(1))
    engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count + 1, do_sample=False)
    steps = engine._offloader.steps
    assert len(steps) == count and all(step.waited_s > 0 for step in steps)
    # What is sent comes back bit by bit; what is recomputed is rounded otherwise.
    shadow.check(2 * 2 * (count + 1), tolerance=0.0 if method == "stream" else 1e-4)
    assert all(used > 0 for used in engine._offloader.pool.used().values())


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("name", ["opt", "llama_mha", "gpt_neox"])
def test_the_error_in_bfloat16_is_bounded(name: str, alone: None) -> None:
    """Recomputed rows differ from stored ones in the last bits: logits by no more than bfloat16 itself costs."""
    torch.manual_seed(0)
    exact = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, 190, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = exact(ids).logits[:, -1]

    def last_logits(method: str) -> Tensor:
        section = {"enabled": method != "none", "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}
        if method != "none":
            section["method"] = method
        model = AutoModelForCausalLM.from_config(exact.config, dtype=torch.bfloat16)
        model.load_state_dict(exact.state_dict())
        engine = megakv.init_inference(model.to(torch.bfloat16), {"dtype": "bf16", "megakv": {"offload": section}})
        past = None
        # As the offload engine does: a prompt's layers that somebody listens to are PyTorch's, and round as it does.
        attention = attention_modules(engine.module)
        listening = [module.register_forward_pre_hook(lambda *_: None) for module in attention]
        for first in (0, 60, *range(61, 90)):
            last = {0: 60, 60: 61}.get(first, first + 1)
            output = engine(input_ids=ids[:, first:last], past_key_values=past, use_cache=True)
            past = output.past_key_values
            for handle in listening:
                handle.remove()
        if method not in ("none", "stream"):
            assert engine._offloader.steps[-1].split.recomputed > 0
        engine.destroy()
        return output.logits[:, -1].float()

    in_memory, streamed, recomputed = (last_logits(method) for method in ("none", "stream", "chunked"))
    assert torch.equal(in_memory, streamed), "sending rows changes no bit"
    scale = expected.abs().max()
    bound = 2 * ((in_memory - expected).abs().max() / scale).item()
    assert ((recomputed - expected).abs().max() / scale).item() < bound
    assert ((recomputed - in_memory).abs().max() / scale).item() < 2**-6

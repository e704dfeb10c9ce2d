"""Decoding several sequences in one kernel call on CUDA: the results of a call for each."""

import pytest
import torch

from megakv.attention import prompts
from megakv.attention.partial import Scoring
from megakv.attention.together import attend_together
from tests.unit.attention.test_together import one_by_one, packed_rows, tokens_at

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 32, 128), (32, 8, 128), (6, 2, 64), (4, 1, 80)])
@pytest.mark.parametrize("lengths", [[640] * 64, [33, 33, 32, 32, 7, 1]])
def test_one_call_gives_what_many_do(
    lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    tokens, scoring = tokens_at([length - 1 for length in lengths]), Scoring(dim**-0.5)
    packed = packed_rows(lengths, kv_heads, room=1, dim=dim, dtype=dtype, device="cuda")
    queries = torch.randn(len(lengths), heads, dim, dtype=dtype, device="cuda").transpose(0, 1)
    expected = one_by_one(queries, tokens, scoring, packed)
    found = attend_together(queries, tokens, scoring, packed)
    assert found is not None
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3}.get(dtype, 2e-2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_prompts_of_several_sequences_in_one_call(dtype, dim):
    """The check before the first use: against the float64 reference, whole prompts and their last tokens."""
    assert prompts._agrees(torch.device("cuda", 0), dtype, dim)

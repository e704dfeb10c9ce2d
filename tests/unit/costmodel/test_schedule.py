"""Groups of a batch and the place of weights, by predictions on random machines: nothing that has room is faster."""

import random

import pytest
import torch
from transformers import OPTConfig

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.memory import rank_memory
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape
from megakv.offload.times import best_rate, group_counts, offloaded_step

CLOSE = 0.05
"""What the fewest groups that have room may cost, relative, beside others."""
PROFILE, LINK = PRESETS["a100-pcie4"].profile(cp_size=1), PRESETS["a100-pcie4"].host.curve()


def test_no_batch_that_has_room_decodes_more() -> None:
    away = []
    for _ in range(12):
        width = 64 * random.randint(8, 32)
        sizes = {"hidden_size": width, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "num_attention_heads": 8}
        model = ModelShape.from_config(OPTConfig(num_hidden_layers=random.randint(4, 24), **sizes), dtype=torch.float16)
        tokens, host = random.randint(100, 2000), int(10 ** random.uniform(8.5, 11))
        whole = rank_memory(model, context=tokens, offloaded=True).total
        room = int(whole * random.uniform(0.3, 2))
        rates = {}
        for weights in (False, True):
            given = {"tokens": tokens, "room": room, "host": host, "weights": weights}
            found = best_rate(PROFILE, LINK, model, **given)
            rates[weights] = 0.0 if found is None else found.tokens_per_s
            for batch, groups in ((1 << each, count) for each in range(8) for count in group_counts(1 << each)):
                memory = rank_memory(
                    model, context=tokens, batch=batch, offloaded=True, weights_away=weights, groups=groups
                )
                if memory.total <= room and memory.host <= host:
                    step = Workload((1,) * batch, (tokens,) * batch, 1)
                    took = offloaded_step(PROFILE, LINK, model, step, "pass_q", weights=weights, groups=groups).seconds
                    assert batch / took <= (1 + CLOSE) * rates[weights]
        away.append(rates[True] > rates[False])
    assert any(away) and not all(away)


@pytest.mark.parametrize(("batch", "counts"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_numbers_of_groups(batch: int, counts: list[int]) -> None:
    assert group_counts(batch) == counts

"""Groups of a batch and the place of weights, by predictions on random machines: nothing that has room is faster."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.memory import rank_memory
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape
from megakv.offload.equations import RESIDENT, LayerCosts, WeightTimes
from megakv.offload.groups import APART, best_groups, best_rate, group_counts
from megakv.offload.pipeline import step_seconds
from megakv.offload.times import group_costs, layer_ways, offloaded_step

PROFILE, LINK = PRESETS["a100-pcie4"].profile(cp_size=1), PRESETS["a100-pcie4"].host.curve()


def drawn_step(groups: int, machine: random.Random, *, ahead: bool) -> float:
    """Seconds of a step on a machine that its random numbers make, by the fastest way to divide tokens."""
    tokens, layers = 256 << machine.randint(0, 6), machine.choice((4, 24))
    kv_s = 10 ** machine.uniform(-7, -5)
    costs = LayerCosts(
        kv_s=kv_s,
        activation_s=kv_s * machine.uniform(0.3, 0.9),
        recompute_s=kv_s * 10 ** machine.uniform(-1, 1),
        transfer_s=10 ** machine.uniform(-5.5, -4),
        launch_s=1e-4,
        device_s=tokens * kv_s * 10 ** machine.uniform(-1.5, 1),
        attend_s=kv_s * 10 ** machine.uniform(-2, 0),
    )
    sent = tokens * kv_s
    weights = WeightTimes(0.1 * sent, sent * machine.uniform(0.1, 2)) if machine.random() < 0.5 else RESIDENT
    own = replace(costs, device_s=costs.device_s / groups)
    ways = layer_ways(own, group_costs(own.with_weights(weights, groups), tokens // groups))
    return min(step_seconds([times] * groups, layers, weights, ahead=ahead) for times, _ in ways)


def test_the_faster_schedule_wherever_they_can_be_told_apart() -> None:
    chosen = set()
    for number in range(60):
        # Nothing is brought ahead in most of them.
        seed, ahead = random.random(), number % 6 == 0
        seconds = {count: drawn_step(count, random.Random(seed), ahead=ahead) for count in group_counts(8)}
        count, least = best_groups(seconds), min(seconds.values())
        assert seconds[count] <= (1 + APART) * least
        if seconds[1] > (1 + APART) * least:
            assert count > 1
        if all(took > (1 + APART) * seconds[1] for groups, took in seconds.items() if groups > 1):
            assert count == 1
        # While steps run ahead, columns hide nothing that rows do not.
        assert not ahead or count == 1
        chosen.add(count > 1)
    assert chosen == {False, True}


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
                    assert batch / took <= (1 + APART) * rates[weights]
        away.append(rates[True] > rates[False])
    assert any(away) and not all(away)


@pytest.mark.parametrize(("batch", "counts"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_numbers_of_groups(batch: int, counts: list[int]) -> None:
    assert group_counts(batch) == counts

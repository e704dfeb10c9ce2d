"""How a prompt is spread: over one rank, a chain or a ring, as asked for or as predicted (KV-Runahead, Appendix B)."""

import random
from functools import partial
from typing import Any

import pytest

from megakv.attention.methods import prefill_methods
from megakv.base.partition import Partition, even
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.prefill import PrefillTimes
from megakv.forward.choice import Evidence, PrefillChoice, plan_prefill, serves_first_turns_only
from megakv.forward.config import ContextParallelConfig
from megakv.forward.prefill_planner import PrefillPlanner
from tests.unit.costmodel.profiles import ideal
from tests.unit.costmodel.test_chain import attention_only

MODEL = attention_only(4, dense=500_000)
MATMUL = Curve(sizes=(1, 101), seconds=(1e-9, 2e-9))
SIZE = 4


def machine(latency: float = 1e-5, bandwidth: float = 1e9, **changes: Any) -> HardwareProfile:
    link = Curve.affine(latency, bandwidth)
    return ideal(seconds_per_pair=1e-9, exchange=link, collective=link, matmul=MATMUL, **changes)


def plan(
    profile: HardwareProfile, work: Workload, *, prefill: str = "auto", policy: str = "cost", **settings: Any
) -> PrefillChoice:
    planner = PrefillPlanner(profile, MODEL, work.size, **{"alone_tokens": 10**9, **settings})
    config = ContextParallelConfig(size=work.size, prefill=prefill)
    return plan_prefill(config, Evidence(policy, profile), work, sizes=planner.partition, planner=planner)


def prompt(new: int, cached: int = 0) -> Workload:
    return Workload((new,), (cached,), SIZE)


def test_a_short_prompt_on_slow_links_stays_on_one_rank() -> None:
    """Table 3 of the paper: on poor links several ranks help long prompts only."""
    poor = machine(latency=0.02, bandwidth=1e8)
    short, long = plan(poor, prompt(128)), plan(poor, prompt(65_536))
    assert short == PrefillChoice("runahead", ((0, 0, 0, 128),), "single", short.predicted_s)
    assert long.name != "single"
    assert long.predicted_s["single"] > 2 * min(long.predicted_s.values())
    assert plan(poor, prompt(128), alone_tokens=100).name != "single"


def test_a_chain_where_the_ring_has_to_wait() -> None:
    """Merging and the ring's exchange cost something, the chain sends half and merges less."""
    chosen = plan(machine(bandwidth=2e9, exposed=(0.6, 0.6)), prompt(16_384))
    assert chosen.method == chosen.name == "runahead"
    assert chosen.partitions is not None and sum(chosen.partitions[0]) == 16_384
    assert list(chosen.partitions[0]) == sorted(chosen.partitions[0], reverse=True)


def test_a_ring_where_it_is_faster() -> None:
    """A long history, held by all: queries are fewer than keys, and the chain would be in step with a ring anyway."""
    chosen = plan(machine(bandwidth=1e7), prompt(64, 60_000))
    assert (chosen.method, chosen.partitions, chosen.name) == (None, None, "pass_q")


def test_the_fastest_is_chosen() -> None:
    names = set()
    for _ in range(20):
        profile = machine(10 ** random.uniform(-6, -1.5), 10 ** random.uniform(7, 10), exposed=(0.3, 0.3))
        work = prompt(int(10 ** random.uniform(1.2, 4.2)), random.choice((0, 0, 1000, 20_000)))
        chosen = plan(profile, work)
        assert chosen.name is not None
        assert chosen.predicted_s[chosen.name] == min(chosen.predicted_s.values())
        assert (chosen.method is None) == (chosen.name in ("pass_kv", "pass_q"))
        names.add(chosen.name)
    assert len(names) >= 2


def test_predictions_are_those_of_the_cost_model() -> None:
    profile, work = machine(), prompt(8192)
    chosen = plan(profile, work)
    times = PrefillTimes(profile, MODEL, work)
    for method in ("single", "pass_kv", "pass_q"):
        assert chosen.predicted_s[method] == times.seconds(method)


def test_without_evidence_layers_choose_as_before() -> None:
    def sizes(new: int, cached: int) -> Partition:
        raise AssertionError("nobody asked")

    config = ContextParallelConfig(size=SIZE)
    profile = machine()
    planner = PrefillPlanner(profile, MODEL, SIZE)
    for evidence, given in (
        (Evidence(), None),
        (Evidence("cost", profile), None),
        (Evidence("alg1", profile), planner),
        (Evidence("alg5", profile), planner),
        (Evidence("fitted"), None),
    ):
        assert plan_prefill(config, evidence, prompt(999), sizes=sizes, planner=given) == PrefillChoice()


def test_what_was_asked_for_is_obeyed() -> None:
    def sizes(new: int, cached: int) -> Partition:
        return (new, 0, 0, 0) if cached else (0, new, 0, 0)

    work = Workload((10, 7), (0, 3), SIZE)
    for prefill, partitions in (
        ("runahead", ((0, 10, 0, 0), (7, 0, 0, 0))),
        ("tsp", (even(10, SIZE), even(7, SIZE))),
        ("tsp_causal", ((3, 3, 2, 2), (2, 2, 2, 1))),
    ):
        config = ContextParallelConfig(size=SIZE, prefill=prefill)
        assert plan_prefill(config, Evidence(), work, sizes=sizes) == PrefillChoice(prefill, partitions)
    for prefill in ("pass_kv", "pass_q", "all_gather"):
        config = ContextParallelConfig(size=SIZE, prefill=prefill)
        assert plan_prefill(config, Evidence(), work, sizes=sizes) == PrefillChoice()


@pytest.mark.parametrize("prefill", ["auto", "pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal"])
def test_queries_come_to_what_was_compressed(prefill: str) -> None:
    profile, work = machine(), prompt(4096, 900)
    config = ContextParallelConfig(size=SIZE, prefill=prefill)
    planner = PrefillPlanner(profile, MODEL, SIZE)
    chosen = plan_prefill(
        config, Evidence("cost", profile), work, sizes=planner.partition, planner=planner, compressed=True
    )
    assert chosen == PrefillChoice("pass_q")


def test_a_method_that_gives_way_in_later_turns_is_known_at_start() -> None:
    for compresses, divided in ((False, False), (True, False), (False, True)):
        for prefill in ("auto", *prefill_methods()):
            config = ContextParallelConfig(size=SIZE, prefill=prefill)
            plan = partial(plan_prefill, config, Evidence(), prompt(10, 7), sizes=lambda new, _: (new, 0, 0, 0))
            asked, later = plan(), PrefillChoice("pass_q") if divided else plan(compressed=compresses)
            gives_way = asked != later and prefill not in ("auto", "pass_q")
            assert serves_first_turns_only(prefill, compresses=compresses, divided=divided) == gives_way


def test_the_chain_goes_on_over_what_was_compressed() -> None:
    config = ContextParallelConfig(size=SIZE, prefill="runahead")
    found = plan_prefill(config, Evidence(), prompt(10, 7), sizes=lambda new, cached: (new, 0, 0, 0), compressed=True)
    assert found == PrefillChoice("runahead", ((10, 0, 0, 0),))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_same_plan_twice(size: int) -> None:
    profile = machine()
    copy = HardwareProfile.model_validate_json(profile.model_dump_json())
    work = Workload((random.randint(100, 9000), random.randint(100, 9000)), (0, random.choice((0, 500))), size)
    assert plan(profile, work) == plan(copy, work)

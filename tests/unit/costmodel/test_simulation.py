"""The event simulator against a clock that a person could keep, and its programs against the closed forms."""

import random
from dataclasses import replace

import pytest
import torch

from megakv.costmodel.context_parallel import Workload, sent_bytes
from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.offload_pipeline import StepTimes, step_seconds
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import hardware
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.costmodel.simulation import Sharing, simulate
from megakv.costmodel.simulation_prefill import METHODS, PrefillProgram
from megakv.costmodel.simulation_program import Disturbances, Program
from megakv.costmodel.virtual_runs import offload_program
from megakv.distributed.sharding import balanced_tokens
from tests.unit.costmodel.profiles import ideal


def shape(layers: int = 3, *, kv_heads: int = 4, window: int | None = None) -> ModelShape:
    kinds = (LayerShape(3_000_000), LayerShape(4_000_000, window=window))
    return ModelShape(
        512, 1024, 1000, 8, kv_heads, 64, 64, tuple(kinds[i % 2] for i in range(layers)), 0, torch.float32
    )


def machine(*, exposed: tuple[float, float] = (0.0, 0.0)) -> HardwareProfile:
    """A machine whose links are worth using, or nearly."""
    return ideal(
        seconds_per_pair=10 ** random.uniform(-10, -9),
        exchange=Curve.affine(10 ** random.uniform(-6, -4), 10 ** random.uniform(8.5, 10)),
        collective=Curve.affine(1e-4, 1e9),
        exposed=exposed,
        matmul=Curve(sizes=(1, 101), seconds=(1e-10, 3e-9)),
        copy_bytes=Curve.affine(1e-6, 1e10),
        step_overhead_s={"pass_kv": 1e-5, "pass_q": 2e-5},
    )


# The simulator itself


def brute_force(program: Program) -> float:
    """A clock that looks at all tasks whenever one ends: who is ready first, and has its resource, goes on."""
    tasks = program.tasks
    left, ready = [float(task.seconds) for task in tasks], [-1.0] * len(tasks)
    serving: dict[object, int] = {}
    now = 0.0
    while any(left):
        for index, task in enumerate(tasks):
            if ready[index] < 0 and not any(left[other] for other in task.after):
                ready[index] = now
        waiting = [index for index in range(len(tasks)) if left[index] and ready[index] >= 0]
        for index in sorted(waiting, key=lambda index: (ready[index], index)):
            serving.setdefault(tasks[index].resource, index)
        passed = min(left[index] for index in serving.values())
        now += passed
        for resource, index in list(serving.items()):
            left[index] -= passed
            if not left[index]:
                del serving[resource]
    return now


@pytest.mark.parametrize("count", [1, 5, 60])
def test_random_programs_against_a_clock_that_looks_at_all(count: int) -> None:
    program = Program(3)
    for index in range(count):
        after = random.sample(range(index), min(index, random.choice((0, 1, 2))))
        rank, seconds = random.randrange(3), random.randint(1, 10**9)
        if random.random() < 0.5:
            program.compute("a", rank, seconds, after)
        else:
            program.send("b", rank, (rank + 1) % 3, seconds, after)
    schedule = simulate(program)
    assert schedule.seconds == pytest.approx(brute_force(program))
    for index, task in enumerate(program.tasks):
        assert schedule.starts[index] >= max((schedule.ends[other] for other in task.after), default=0.0)
        assert schedule.ends[index] - schedule.starts[index] == pytest.approx(task.seconds)


def test_a_resource_serves_one_at_a_time() -> None:
    program = Program(2)
    for _ in range(4):
        program.send("x", 0, 1, 2.0)
        program.send("y", 1, 0, 1.0)
    schedule = simulate(program)
    assert schedule.seconds == 8.0
    assert sorted(schedule.ends) == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 8.0]


def test_what_waits_for_a_later_task() -> None:
    program = Program(1)
    first = program.send("x", 0, 0, 1.0)
    later = program.compute("y", 0, 5.0)
    program.waits.append((first, later))
    assert simulate(program).ends == [6.0, 5.0]


def test_tasks_in_a_circle_are_an_error() -> None:
    program = Program(1)
    program.compute("x", 0, 1.0, [1])
    program.compute("y", 0, 1.0, [0])
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate(program)


def test_two_ranks_that_exchange_share_their_processors() -> None:
    """An exchange beside a computation takes what the profile says, whichever is longer."""
    for _ in range(20):
        profile = ideal(exposed=(random.random(), random.random()))
        compute, transfer = random.uniform(0.1, 5), random.uniform(0.1, 5)
        program = Program(2)
        for rank in range(2):
            program.compute("a", rank, compute)
            program.send("x", rank, 1 - rank, transfer)
        assert simulate(program, Sharing.of(profile)).seconds == pytest.approx(profile.overlapped(compute, transfer))


# Prefill


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "tp_size", "cached"), [(1, 1, 0), (2, 2, 0), (4, 1, 0), (3, 1, 777)])
def test_prefill_agrees_with_closed_forms(method: str, size: int, tp_size: int, cached: int) -> None:
    """Uniform links and no noise; nothing is exposed in the chain, where closed forms spread what is."""
    exposed = (0.0, 0.0) if method == "runahead" else (random.random(), random.random())
    profile, model = machine(exposed=exposed), shape(random.randint(2, 5))
    batch = random.randint(1, 2)
    new = tuple(size * random.randint(60, 400) * 2 for _ in range(batch))
    workload = Workload(new, (cached,) * batch, size)
    options = {"tp_size": tp_size, "chunk_tokens": random.choice((64, 1024))}
    program = PrefillProgram(profile, model, workload, **options)
    found = simulate(program.build(method), Sharing.of(profile)).seconds
    expected = PrefillTimes(profile, model, workload, **options).seconds(method, program.even())
    assert found == pytest.approx(expected, rel=1e-6 if method == "runahead" else 0.01)


def test_uneven_chains_agree_on_slow_links() -> None:
    """Rooms for two messages at a time are full here: the closed form then walks through them one by one."""
    for _ in range(5):
        profile, model = machine(), shape(4)
        profile = profile.model_copy(update={"exchange": Curve.affine(1e-3, 10 ** random.uniform(7, 8))})
        cuts = tuple(random.randint(0, 900) for _ in range(3)) + (random.randint(1, 900),)
        workload = Workload((sum(cuts),), (0,), 4)
        program = PrefillProgram(profile, model, workload, chunk_tokens=100)
        expected = PrefillTimes(profile, model, workload, chunk_tokens=100).seconds("runahead", (cuts,))
        assert simulate(program.build("runahead", (cuts,))).seconds == pytest.approx(expected, rel=1e-6)


def test_presets_agree() -> None:
    for name, tp_size in (("h100-rdma", 8), ("h100-tcp", 8), ("a100-nvlink", 2), ("cpu", 1)):
        profile = hardware(name).on_mesh(cp_size=4, tp_size=tp_size)
        model = replace(shape(4, kv_heads=8), hidden=2048)
        workload = Workload((16384,), (0,), 4)
        times = PrefillTimes(profile, model, workload, tp_size=tp_size)
        program = PrefillProgram(profile, model, workload, tp_size=tp_size)
        for method in METHODS:
            found = simulate(program.build(method), Sharing.of(profile)).seconds
            assert found == pytest.approx(times.seconds(method, program.even()), rel=0.02), (name, method)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_methods(method: str) -> None:
    """What is sent is received, and is what `sent_bytes` counts, layer by layer."""
    size, tokens, cached = 3, random.randint(100, 999), random.randint(0, 500)
    if method == "runahead":
        cached = 0
    model = shape(3)
    workload = Workload((tokens,), (cached,), size)
    program = PrefillProgram(machine(), model, workload, chunk_tokens=100)
    built = program.build(method)
    new = program.tokens("pass_kv" if method in ("tsp", "tsp_causal") else method)
    held = balanced_tokens([cached], size)
    kept = [a + b for a, b in zip(new, held, strict=True)]
    asking = size - 1 if method == "runahead" else 0
    last = len(model.layers) - 1
    for layer in range(len(model.layers)):
        wanted = [int(place == asking) for place in range(size)] if layer == last else None
        for rank in range(size):
            sent = sum(t.nbytes for t in built.tasks if t.rank == rank and t.layer == layer)
            expected = sent_bytes(
                method,
                model.attention(layer=layer),
                new=new,
                kept=kept,
                rank=rank,
                cached=held,
                wanted=wanted,
            )
            assert sent == sum(expected.values()), (layer, rank)
    schedule = simulate(built)
    assert len(schedule.ends) == len(built.tasks) and min(schedule.ends) >= 0


def test_too_few_tokens_for_a_ring() -> None:
    program = PrefillProgram(machine(), shape(), Workload((7,), (0,), 4))
    with pytest.raises(ValueError, match="prompt of 7 tokens on 4 .* allowed here: 8"):
        program.build("pass_kv")


# Disturbances


def test_a_slow_rank_slows_a_ring_and_a_chain() -> None:
    profile, model = machine(), shape(4)
    program = PrefillProgram(profile, model, Workload((2400,), (0,), 3))
    for method in ("pass_kv", "runahead"):
        built = program.build(method)
        plain = simulate(built).seconds
        slow = simulate(Disturbances(slow_ranks={1: 3.0}).of(built)).seconds
        assert 1.2 * plain < slow <= 3.01 * plain
        assert simulate(Disturbances(slow_ranks={1: 1.0}).of(built)).seconds == plain


def test_a_slow_link_is_waited_for_where_it_is_used() -> None:
    profile, model = machine(), shape(4)
    profile = profile.model_copy(update={"exchange": Curve.affine(1e-3, 1e8)})
    program = PrefillProgram(profile, model, Workload((2400,), (0,), 4))
    chain, ring = program.build("runahead"), program.build("pass_kv")
    # The chain uses the link that closes the ring in its last layer only, for the queries that are wanted.
    closing = Disturbances(slow_links={(3, 0): 20.0})
    assert simulate(closing.of(chain)).seconds < 1.5 * simulate(chain).seconds
    assert simulate(closing.of(ring)).seconds > 2 * simulate(ring).seconds
    assert simulate(Disturbances(slow_links={(2, 1): 20.0}).of(chain)).seconds > simulate(chain).seconds


def test_noise_is_reproducible_and_only_makes_barriers_later() -> None:
    program = PrefillProgram(machine(), shape(4), Workload((2400,), (0,), 4)).build("pass_kv")
    one, same, other = (simulate(Disturbances(noise=0.3, seed=seed).of(program)).seconds for seed in (1, 1, 2))
    assert one == same != other
    assert one > simulate(program).seconds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slow_ranks": {0: 0.0}}, "factor 0.0: allowed: a number above 0"),
        ({"slow_ranks": {0: -2.0}}, "factor -2.0"),
        ({"slow_links": {(1, 1): 2.0}}, "link 1-1: allowed: two different ranks"),
        ({"noise": -0.1}, "noise -0.1"),
    ],
)
def test_impossible_disturbances(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Disturbances(**values)  # type: ignore[arg-type]


def test_ranks_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="rank 4: allowed: 0 to 3"):
        Disturbances(slow_links={(0, 4): 2.0}).check(4)


# Offload


def test_offloaded_decoding_agrees_with_the_closed_pipeline() -> None:
    """Exactly, where the accelerator sets a layer's pace. Where the link does, in one of a hundred such machines the
    closed form lets it wait longer at the end of a step than the simulator; never shorter.
    """
    equal = 0
    for _ in range(10):
        landed, recompute = random.uniform(0, 2), random.uniform(0, 3)
        times = StepTimes(
            sent_s=landed + random.uniform(0, 4),
            landed_s=landed,
            recompute_s=recompute,
            last_s=recompute * random.random(),
            layer_s=random.uniform(0.1, 3),
            host_s=random.choice((0.0, 1.5)),
            outside_s=random.uniform(0, 2),
            first_s=landed * random.random(),
            attend_s=random.choice((0.0, random.uniform(0, 2))),
        )
        layers = random.choice((2, 5, 9, 40))
        four, three = (
            max(end for task, end in zip(schedule.tasks, schedule.ends, strict=True) if task.kind == "compute")
            for schedule in (simulate(offload_program(times, layers, steps=steps)) for steps in (4, 3))
        )
        simulated, expected = four - three, step_seconds([times], layers)
        if times.sent_s <= times.recompute_s + times.host_s + times.layer_s:
            assert simulated == pytest.approx(expected)
        assert simulated <= expected * (1 + 1e-6) and expected <= 1.1 * simulated
        equal += simulated == pytest.approx(expected)
    # Four of ten such machines are met in one of a million runs.
    assert equal >= 7


def test_weights_and_cache_share_one_link() -> None:
    """Neither alone fills the link; together they do, and bytes are all there."""
    times = StepTimes(sent_s=0.6, landed_s=0.0, recompute_s=0.0, last_s=0.0, layer_s=1.0)
    sent = 600, 700
    alone, both = (
        simulate(offload_program(times, 10, steps=5, weights_s=seconds, sent=sent)) for seconds in (0.0, 0.7)
    )
    assert alone.seconds == pytest.approx(50, rel=0.02)
    assert both.seconds == pytest.approx(1.3 * 50, rel=0.05)
    assert sum(task.nbytes for task in both.tasks) == 50 * 1300

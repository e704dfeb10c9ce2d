"""Simulated runs against a clock that a person could keep, and against what is predicted."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from megakv.attention.chain import HELD
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.chain import Chain, ChainParts
from megakv.costmodel.context_parallel import Workload, sent_bytes
from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.prefill import METHODS, PrefillTimes
from megakv.costmodel.presets import hardware
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.costmodel.simulation import Disturbances, Simulation
from megakv.costmodel.timeline import LayerWork
from megakv.distributed.layouts import balanced_tokens
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


# What is played, against a clock that knows nothing but which task waits for which


class Tasks:
    """Tasks of ranks and links; whatever serves them takes one at a time, in the order in which they become ready."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.after: list[list[int]] = []
        self.resources: list[object] = []

    def add(self, resource: object, seconds: float, after: Iterable[int]) -> int:
        self.seconds.append(float(seconds))
        self.after.append(list(after))
        self.resources.append(resource)
        return len(self.seconds) - 1

    def ends(self) -> list[float]:
        """By a clock that looks at all tasks whenever one ends: who is ready first, and has its resource, goes on."""
        count = len(self.seconds)
        left, ready, ends = [*self.seconds], [-1.0] * count, [-1.0] * count
        serving: dict[object, int] = {}
        now = 0.0
        while min(ends) < 0:
            for index in range(count):
                if ready[index] < 0 and all(ends[other] >= 0 for other in self.after[index]):
                    ready[index] = now
            for index in sorted((i for i in range(count) if ready[i] >= 0 > ends[i]), key=lambda i: (ready[i], i)):
                serving.setdefault(self.resources[index], index)
            passed = min(left[index] for index in serving.values())
            now += passed
            for resource, index in list(serving.items()):
                left[index] -= passed
                if left[index] <= 1e-15 * now:
                    ends[index] = now
                    del serving[resource]
        return ends


def chain_tasks(parts: ChainParts, works: Sequence[LayerWork]) -> Tasks:
    """The layers of a chain: what arrives is handed on when it is taken up, and a rank has room for two messages."""
    tasks = Tasks()
    ranks = len(works)
    done: list[list[int]] = [[] for _ in range(ranks)]
    messages, attended = ([[] for _ in range(ranks)] for _ in range(2))

    def send(rank: int, number: int, after: list[int]) -> None:
        there = messages[rank + 1]
        there.append(tasks.add(("link", rank), parts.links[rank][number], [*after, *there[-1:]]))
        freeing = len(there) - 1 - HELD
        if 0 <= freeing < len(attended[rank + 1]):
            tasks.after[there[-1]].append(attended[rank + 1][freeing])

    for layer in range(len(works[0].before)):
        for rank, work in enumerate(works):
            projected = tasks.add(rank, work.before[layer], done[rank])
            own, incoming = len(parts.messages[rank]), len(parts.incoming[rank])
            sends = rank < len(parts.links)
            for number in range(own * sends):
                send(rank, number, [projected])
            last = tasks.add(rank, work.local[layer], [projected])
            for chunk in range(incoming):
                before = [last, messages[rank][layer * incoming + chunk]]
                if sends:
                    send(rank, own + chunk, before)
                last = tasks.add(rank, work.chunks[layer, chunk], before)
                attended[rank].append(last)
                coming = len(attended[rank]) - 1 + HELD
                if coming < len(messages[rank]):
                    tasks.after[messages[rank][coming]].append(last)
            done[rank] = [tasks.add(rank, work.after[layer], [last])]
    return tasks


@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e10])
def test_chains_against_a_clock_that_looks_at_all(bandwidth: float) -> None:
    profile, model = machine(), shape(4)
    profile = profile.model_copy(update={"exchange": Curve.affine(1e-3, bandwidth)})
    cuts = tuple(random.randint(0, 900) for _ in range(3)) + (random.randint(1, 900),)
    chain = Chain(profile, model, chunk_tokens=200)
    parts = chain.parts((cuts,), (0,))
    ends = chain_tasks(parts, [work.first(3) for work in parts.works]).ends()
    assert max(ends) == pytest.approx(chain.predict((cuts,), (0,)).ends_s[:, -2].max(), rel=1e-9)


def test_two_ranks_that_exchange_share_their_processors() -> None:
    """An exchange beside a computation takes what the profile says, whichever is longer."""
    for _ in range(20):
        exposed, link = (random.random(), random.random()), Curve.affine(0.0, 10 ** random.uniform(7, 11))
        profile, model = ideal(exposed=exposed, exchange=link), shape(2)
        work = Workload((random.randint(100, 5000),), (0,), 2)
        layer = LayerTimes(profile, model.attention(), work)
        computed, *_ = (sum(step) for step in layer.steps("pass_kv", 1).steps)
        transfer = link.at(model.attention().kv_row_bytes * (-(-work.total // 2)))
        played = PrefillTimes(profile, model, work).play("pass_kv")
        sent = [event for event in played.events[1] if event.kind == "communication" and event.layer == 0][0]
        begun = [event.start for event in played.events[1] if event.name == "attention"][0]
        after = [event.end for event in played.events[1] if event.name == "attention"][0]
        together = max(sent.end, after) - min(sent.start, begun)
        assert together == pytest.approx(profile.overlapped(computed, transfer), rel=1e-6)


# Prefill


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "tp_size", "cached"), [(1, 1, 0), (2, 2, 0), (4, 1, 0), (3, 1, 777)])
def test_prefill_takes_what_is_predicted(method: str, size: int, tp_size: int, cached: int) -> None:
    """Uniform links and no noise: a ring's ranks, whose shards differ, wait for each other a little."""
    profile, model = machine(exposed=(random.random(), random.random())), shape(random.randint(2, 5))
    batch = random.randint(1, 2)
    new = tuple(size * random.randint(60, 400) * 2 for _ in range(batch))
    workload = Workload(new, (cached,) * batch, size)
    times = PrefillTimes(profile, model, workload, tp_size=tp_size, chunk_tokens=random.choice((64, 1024)))
    expected = times.seconds(method, times.even())
    assert times.play(method).seconds == pytest.approx(expected, rel=1e-6 if method == "runahead" else 0.01)


def test_uneven_chains_agree_on_slow_links() -> None:
    """Rooms for two messages at a time are full here."""
    for _ in range(5):
        profile, model = machine(), shape(4)
        profile = profile.model_copy(update={"exchange": Curve.affine(1e-3, 10 ** random.uniform(7, 8))})
        cuts = tuple(random.randint(0, 900) for _ in range(3)) + (random.randint(1, 900),)
        times = PrefillTimes(profile, model, Workload((sum(cuts),), (0,), 4), chunk_tokens=100)
        expected = times.seconds("runahead", (cuts,))
        assert times.play("runahead", (cuts,)).seconds == pytest.approx(expected, rel=1e-6)


def test_presets_agree() -> None:
    for name, tp_size in (("h100-rdma", 8), ("h100-tcp", 8), ("a100-nvlink", 2), ("cpu", 1)):
        profile = hardware(name).on_mesh(cp_size=4, tp_size=tp_size)
        model = replace(shape(4, kv_heads=8), hidden=2048)
        times = PrefillTimes(profile, model, Workload((16384,), (0,), 4), tp_size=tp_size)
        for method in METHODS:
            found = times.play(method).seconds
            assert found == pytest.approx(times.seconds(method, times.even()), rel=0.02), (name, method)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_methods(method: str) -> None:
    """What is sent is received, and is what `sent_bytes` counts, layer by layer."""
    size, tokens, cached = 3, random.randint(100, 999), random.randint(0, 500)
    if method == "runahead":
        cached = 0
    model = shape(3)
    times = PrefillTimes(machine(), model, Workload((tokens,), (cached,), size), chunk_tokens=100)
    played = times.play(method)
    new = times.tokens("pass_kv" if method in ("tsp", "tsp_causal") else method)
    held = balanced_tokens([cached], size)
    kept = [a + b for a, b in zip(new, held, strict=True)]
    asking = size - 1 if method == "runahead" else 0
    last = len(model.layers) - 1
    for layer in range(len(model.layers)):
        wanted = [int(place == asking) for place in range(size)] if layer == last else None
        for rank in range(size):
            sent = sum(each.bytes_sent for each in played.traffic(rank) if each.layer == layer)
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
    assert min(event.start for events in played.events for event in events) >= 0


def test_too_few_tokens_for_a_ring() -> None:
    times = PrefillTimes(machine(), shape(), Workload((7,), (0,), 4))
    with pytest.raises(ValueError, match="prompt of 7 tokens on 4 .* allowed here: 8"):
        times.play("pass_kv")


def test_too_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakv.costmodel.simulation.MOST_TASKS", 100)
    with pytest.raises(ValueError, match="more than 100 tasks are too many: allowed: fewer --layers"):
        PrefillTimes(machine(), shape(40), Workload((2400,), (0,), 3)).play("pass_kv")


# Disturbances


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_slow_rank_slows_a_ring_and_a_chain(tp_size: int) -> None:
    times = PrefillTimes(machine(), shape(4), Workload((2400,), (0,), 3), tp_size=tp_size)
    for method in ("pass_kv", "runahead"):
        plain = times.play(method).seconds
        slow = times.play(method, disturbances=Disturbances(slow_ranks={tp_size: 3.0})).seconds
        assert 1.2 * plain < slow <= 3.01 * plain
        assert times.play(method, disturbances=Disturbances(slow_ranks={1: 1.0})).seconds == plain


def test_a_slow_link_is_waited_for_where_it_is_used() -> None:
    profile = machine().model_copy(update={"exchange": Curve.affine(1e-3, 1e8)})
    times = PrefillTimes(profile, shape(4), Workload((2400,), (0,), 4))

    def seconds(method: str, *link: int) -> float:
        return times.play(method, disturbances=Disturbances(slow_links={link: 20.0} if link else {})).seconds

    # The chain uses the link that closes the ring in its last layer only, for the queries that are wanted.
    assert seconds("runahead", 3, 0) < 1.5 * seconds("runahead")
    assert seconds("pass_kv", 3, 0) > 2 * seconds("pass_kv")
    assert seconds("runahead", 2, 1) > seconds("runahead")


def test_noise_is_reproducible_and_only_makes_barriers_later() -> None:
    times = PrefillTimes(machine(), shape(4), Workload((2400,), (0,), 4))
    for method in ("pass_kv", "runahead"):
        one, same, other = (
            times.play(method, disturbances=Disturbances(noise=0.3, seed=seed)).seconds for seed in (1, 1, 2)
        )
        assert one == same != other
        assert one > times.play(method).seconds or method == "runahead"


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
        Simulation(4, Disturbances(slow_links={(0, 4): 2.0}))

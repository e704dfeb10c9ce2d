"""Plans: what fits, what is fastest, what is refused and why, and configurations that can be read."""

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from docs.generated import ROOT
from megakv.base.errors import MegaKVError
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.memory import rank_memory
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import Hardware, hardware
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.engine.config import load_config
from megakv.planner.choices import Demand, Fit, Mesh, choice_config, meshes, tp_sizes
from megakv.planner.cluster import ClusterPlanner, Plan
from megakv.weights.formats.sizes import KNOWN

LARGE = ROOT / "recipes" / "llama3_405b"
RDMA = hardware("h100-rdma")


def large() -> ModelShape:
    return ModelShape.from_path(LARGE, dtype=torch.bfloat16)


def small(layers: int = 4, hidden: int = 1024) -> ModelShape:
    shapes = (LayerShape(12 * hidden**2),) * layers
    return ModelShape(hidden, 4 * hidden, 32000, 16, 8, 64, 64, shapes, 32000 * hidden, torch.bfloat16)


def tight(model: ModelShape, demand: Demand, mesh: Mesh, share: float) -> Hardware:
    """A machine that has a part of the memory that a mesh needs."""
    memory = rank_memory(
        model, context=demand.total, new=demand.context, batch=demand.batch, cp_size=mesh.cp_size, tp_size=mesh.tp_size
    )
    return replace(RDMA, spec=RDMA.spec.model_copy(update={"memory_bytes": int(memory.total * share)}))


def plan(model: ModelShape, machine: Hardware = RDMA, **demand: Any) -> Plan:
    return ClusterPlanner(machine, model).plan(Demand(**demand))


def test_choices_are_the_predictions_in_order() -> None:
    model, demand = small(), Demand(context=random.randint(20_000, 90_000), gpus=16, batch=random.randint(1, 2))
    found = ClusterPlanner(RDMA, model).plan(demand)
    assert {choice.mesh for choice in found.choices} == set(meshes(model, demand))
    assert [c.ttft_s for c in found.choices] == sorted(c.ttft_s for c in found.choices)
    for choice in found.choices:
        mesh = choice.mesh
        workload = Workload((demand.context,) * demand.batch, (0,) * demand.batch, mesh.cp_size)
        profile = RDMA.on_mesh(cp_size=mesh.cp_size, tp_size=mesh.tp_size)
        chunk = {"chunk_tokens": choice.chunk_tokens} if choice.partition else {}
        times = PrefillTimes(profile, model, workload, tp_size=mesh.tp_size, **chunk)
        partitions = (choice.partition,) * demand.batch if choice.partition else None
        assert choice.ttft_s == pytest.approx(times.seconds(choice.prefill, partitions))
        assert sum(choice.terms.values()) == pytest.approx(choice.ttft_s) and min(choice.terms.values()) >= 0
        held = Workload((1,) * demand.batch, (demand.context,) * demand.batch, mesh.cp_size)
        assert choice.ttit_s == pytest.approx(ttit_seconds(profile, model, held, choice.decode, tp_size=mesh.tp_size))
        assert mesh.ranks * mesh.replicas <= demand.gpus
        assert choice.fit.exact


def test_every_choice_fits_and_every_misfit_is_named() -> None:
    model, demand = small(layers=40, hidden=2048), Demand(context=200_000, gpus=32)
    machine = tight(model, demand, Mesh(4, 4, 1), 1.2)
    planner = ClusterPlanner(machine, model)
    found = planner.plan(demand)
    assert all(choice.memory.total <= planner.room for choice in found.choices)
    reasons = {rejection.what: rejection.why for rejection in found.rejected}
    chosen = {choice.mesh for choice in found.choices}
    for mesh in meshes(model, demand):
        if mesh not in chosen:
            assert reasons[str(mesh)].startswith("needs ") and "GB a rank (weights " in reasons[str(mesh)]


def test_cache_goes_off_the_accelerator_only_where_it_must() -> None:
    """Many cached tokens, few new ones: on one rank the cache alone fills the memory."""
    model, demand = small(layers=40), Demand(context=1000, cached=2_000_000, gpus=1)
    least = rank_memory(model, context=demand.total, new=1000, offloaded=True).total
    machine = replace(RDMA, spec=RDMA.spec.model_copy(update={"memory_bytes": int(1.1 * least)}))
    (choice,) = ClusterPlanner(machine, model).plan(demand).choices
    assert choice.fit == Fit(offload=True) and choice.fit.exact
    cache = 40 * 2_001_000 * 2 * 8 * 64 * 2
    assert choice.ttft_s >= cache / RDMA.spec.host.bandwidth
    assert choice.ttit_s >= 0.9 * cache / RDMA.spec.host.bandwidth
    roomy = ClusterPlanner(tight(model, demand, Mesh(1, 1, 1), 1.1), model).plan(demand)
    assert all(not choice.fit.offload for choice in roomy.choices)


def test_host_memory_limits_what_is_offloaded() -> None:
    model, demand = small(layers=40), Demand(context=1000, cached=2_000_000, gpus=1)
    least = rank_memory(model, context=demand.total, new=1000, offloaded=True).total
    # 40 layers in pages of 512 KiB, which hold 256 tokens.
    cache = 40 * math.ceil(2_001_000 / 256) * (512 << 10)

    def machine(**values: Any) -> Hardware:
        return replace(RDMA, spec=RDMA.spec.model_copy(update={"memory_bytes": int(1.1 * least), **values}))

    (choice,) = ClusterPlanner(machine(host_memory_bytes=int(1.12 * cache)), model).plan(demand).choices
    assert choice.fit.offload and choice.memory.host == cache
    why = r"CP1 x TP1 needs 163\.9 GB of host memory a rank, there are 147\.5 \(164 GB a host, 1 of its"
    with pytest.raises(MegaKVError, match=why):
        ClusterPlanner(machine(host_memory_bytes=cache), model).plan(demand)
    # Where the host has a disk, the rest lies there, and comes no faster than it reads.
    disk = {"host_memory_bytes": cache, "disk_bandwidth": 3e9}
    (slower,) = ClusterPlanner(machine(**disk), model).plan(demand).choices
    assert slower.memory.host == int(0.9 * cache) and slower.memory.host + slower.memory.disk == cache
    assert slower.ttit_s >= 0.95 * (slower.memory.disk / 3e9 + slower.memory.host / RDMA.spec.host.bandwidth)
    assert choice.ttit_s < slower.ttit_s < 1.1 * cache / 3e9 and choice.ttft_s < slower.ttft_s
    config = choice_config(slower, machine(**disk), model)
    assert load_config(config).megakv.offload.disk_gb * (1 << 30) >= slower.memory.disk
    with pytest.raises(MegaKVError, match=r"16\.4 GB on disk a rank beside 147\.5 GB of host memory, there are 16\.0"):
        ClusterPlanner(machine(**disk, disk_bytes=16 * 10**9), model).plan(demand)
    # Without an accelerator what is offloaded lies in the memory that is full already.
    with pytest.raises(MegaKVError, match=r"of host memory a rank beside [\d.]+ GB in use, there are"):
        ClusterPlanner(machine(host_memory_bytes=int(1.12 * cache), accelerator="cpu"), model).plan(demand)
    # On a host with several each has its share.
    crowded = machine(host_memory_bytes=int(1.12 * cache), devices_per_host=2)
    found = ClusterPlanner(crowded, model).plan(replace(demand, gpus=2))
    assert {str(choice.mesh) for choice in found.choices if choice.fit.offload} <= {"CP2 x TP1", "CP1 x TP2"}
    assert any("2 of its accelerators share them" in rejection.why for rejection in found.rejected)


def test_the_objective_is_what_is_best() -> None:
    """A batch whose weights, or tokens, fit one accelerator only in part: of all that fit, nothing serves much more.

    Not every way is tried by the planner: once in some dozens of machines another one serves a tenth more.
    """
    shares = []
    for _ in range(6):
        model = small(layers=random.randint(4, 24), hidden=random.choice((512, 1024, 2048)))
        sizes = {"batch": random.choice((4, 8, 16)), "new_tokens": 50, "gpus": random.choice((1, 2, 4))}
        demand = Demand(context=random.randint(500, 4000), **sizes)
        whole = rank_memory(model, context=demand.longest, batch=demand.batch).total
        spec = {"memory_bytes": int(random.uniform(0.2, 1.1) * whole), "host_memory_bytes": 10**13}
        machine = replace(RDMA, spec=RDMA.spec.model_copy(update=spec))
        planner = ClusterPlanner(machine, model)
        fits = [Fit(), *(Fit(offload=True, weights=w, groups=1 << g) for w in (False, True) for g in range(5))]
        rates = [0.0]
        for mesh in meshes(model, demand):
            for fit in (fit for fit in fits if fit.groups <= demand.batch):
                memory = planner._fitting.memory(demand, mesh, fit)
                if planner._fitting.too_large(demand, memory) is None:
                    rings = planner._rings(demand, mesh, fit, memory)
                    rates.append(max(choice.new_tokens_per_s(demand) for choice in rings))
        try:
            best = planner.plan(replace(demand, objective="throughput")).choices[0]
        except MegaKVError:
            assert rates == [0.0]
            continue
        shares.append(best.new_tokens_per_s(demand) / max(rates))
        first = planner.plan(demand).choices[0]
        assert first.ttft_s <= best.ttft_s and first.new_tokens_per_s(demand) <= best.new_tokens_per_s(demand)
    assert all(share > 0.8 for share in shares) and sum(share <= 0.95 for share in shares) <= 2, shares


def test_nothing_is_compressed_unless_admitted_and_needed() -> None:
    """Weights and prompt fit, but not with the whole cache of the prompt; the host has no room for that either."""
    model, demand = small(layers=4), Demand(context=12_000_000, cached=0, gpus=1)
    memory = rank_memory(model, context=12_000_000)
    kept = rank_memory(model, context=12_000_000, kept_share=0.5)
    # One layer at a time has all tokens until compression has chosen.
    assert memory.cache - kept.cache == memory.cache // 4
    room = (kept.total + memory.total) / 2 / 0.95
    spec = RDMA.spec.model_copy(
        update={"memory_bytes": int(room), "host_memory_bytes": memory.cache // 2, "fp8_flops": None}
    )
    planner = ClusterPlanner(replace(RDMA, spec=spec), model)
    with pytest.raises(MegaKVError, match=r"no plan fits 1 x .* with --allow-lossy: CP1 x TP1, KV budget 0.5"):
        planner.plan(demand)
    choices = planner.plan(replace(demand, lossy=True)).choices
    assert choices[0].fit == Fit(kept_share=0.5) and not choices[0].fit.exact


def test_what_is_compressed_goes_off_the_accelerator_where_nothing_else_fits() -> None:
    model, demand = small(layers=16), Demand(context=12_000_000, cached=0, gpus=1, lossy=True)
    kept, both = (rank_memory(model, context=12_000_000, kept_share=0.125, offloaded=away) for away in (False, True))
    layer = 12_000_000 * model.attention().kv_row_bytes
    exact = rank_memory(model, context=12_000_000, offloaded=True)
    assert both.total < exact.total < kept.total and both.host == pytest.approx(kept.cache - layer, rel=0.05)
    spec = RDMA.spec.model_copy(update={"memory_bytes": int((exact.total + both.total) / 2 / 0.95), "fp8_flops": None})
    choices = ClusterPlanner(replace(RDMA, spec=spec), model).plan(demand).choices
    assert choices[0].fit.offload and choices[0].fit.kept_share < 1 and choices[0].ttit_s > 0


def test_weights_of_few_bits_fit_small_hosts() -> None:
    """Llama 3.1 8B as Q4_K_M, 4.9 GB, on two hosts of 8 GB: all 16 bits of its weights do not fit."""
    model = ModelShape.from_path(ROOT / "recipes" / "llama3_8b", dtype=torch.bfloat16)
    host = hardware("cpu")
    host = replace(host, spec=host.spec.model_copy(update={"memory_bytes": 8 * 10**9}))
    demand = Demand(context=8192, gpus=2)
    with pytest.raises(MegaKVError, match="no plan fits 2 x 8 GB"):
        ClusterPlanner(host, model).plan(demand)
    packed = replace(model, packed=KNOWN["Q4_K_M"])
    assert packed.weight_bytes == pytest.approx(4.92e9, rel=0.01)
    best = ClusterPlanner(host, packed).plan(demand).choices[0]
    assert best.fit == Fit() and "weights" not in choice_config(best, host, packed)["megakv"]
    eight = replace(model, packed=KNOWN["q4_1"])
    best = ClusterPlanner(host, eight).plan(demand).choices[0]
    assert choice_config(best, host, eight)["megakv"]["weights"] == {"format": "q4_1"}


def test_the_largest_model_on_128() -> None:
    """405B, a million tokens, 128 H100: the paper takes 77 s with FP8 feed-forward layers."""
    planner, demand = ClusterPlanner(RDMA, large()), Demand(context=1_000_000, gpus=128)
    exact, lossy = planner.plan(demand), planner.plan(replace(demand, lossy=True))
    assert exact.choices[0].fit == Fit() and lossy.choices[0].fit == Fit(fp8=True)
    assert str(lossy.choices[0].mesh) == "CP16 x TP8"
    assert lossy.choices[0].ttft_s <= 77 * 1.15
    assert lossy.choices[0].ttft_s < exact.choices[0].ttft_s
    assert lossy.choices[0].memory.total <= planner.room
    assert "not exact: --allow-lossy admits it" in {rejection.why for rejection in exact.rejected}


def test_sixteen_thousand_accelerators_take_few_predictions() -> None:
    found = plan(large(), context=1_000_000, gpus=16384)
    # 32 of 1,024 accelerators.
    assert found.evaluated <= 70
    assert found.choices[0].ttft_s < 15 and found.choices[0].mesh.ranks <= 16384


def test_a_limit_asks_for_throughput() -> None:
    model = large()
    found = plan(model, context=100_000, gpus=1024, slo_ttft_s=10.0)
    demand = Demand(context=100_000, gpus=1024)
    served = [choice.prompt_tokens_per_s(demand) for choice in found.choices]
    assert served == sorted(served, reverse=True) and all(choice.ttft_s <= 10 for choice in found.choices)
    assert any("more than the 10 s allowed" in rejection.why for rejection in found.rejected)
    fastest = plan(model, context=100_000, gpus=1024).choices[0]
    assert fastest.ttft_s < found.choices[0].ttft_s
    assert fastest.prompt_tokens_per_s(demand) < served[0]
    with pytest.raises(MegaKVError, match=r"within --slo-ttft 0.001 s: the fastest, CP.* takes .* s; allowed"):
        plan(model, context=100_000, gpus=1024, slo_ttft_s=0.001)


def test_what_does_not_fit_says_what_would() -> None:
    planner = ClusterPlanner(RDMA, large())
    with pytest.raises(MegaKVError, match=r"no plan fits 8 x 96 GB .* needs [\d.]+ GB a rank .* (\d+) ranks would do"):
        planner.plan(Demand(context=1_000_000, gpus=8))
    planner.plan(Demand(context=1_000_000, gpus=128))
    tiny = replace(RDMA, spec=RDMA.spec.model_copy(update={"memory_bytes": 10**9}))
    with pytest.raises(MegaKVError, match="more ranks would not help"):
        ClusterPlanner(tiny, large()).plan(Demand(context=1000, gpus=2))


def test_slow_links_make_a_chain_worth_its_uneven_work() -> None:
    """Its messages are half of a gather's; where links are slow, the planner predicts it, and says its partition."""
    model = small(layers=8)
    spec = RDMA.spec.model_copy(update={"devices_per_host": 1, "between": RDMA.spec.between.model_copy(update={"bandwidth": 4e8})})  # fmt: skip  # noqa: E501
    found = plan(model, replace(RDMA, spec=spec), context=32768, gpus=8)
    chains = [choice for choice in found.choices if choice.prefill == "runahead"]
    assert 1 <= len(chains) <= 3 and all(sum(choice.partition or ()) == 32768 for choice in chains)
    # Five meshes more could have one: each says that it was not tried, or what is better than its bound.
    untried = [rejection.why for rejection in found.rejected if "runahead" in rejection.what]
    assert untried and all(why.startswith(("not predicted: 3 chains whose", "a chain there takes ")) for why in untried)
    for bound, best in re.findall(r"takes ([\d.]+) s at least, and .* takes ([\d.]+) s", "\n".join(untried)):
        assert float(best) <= float(bound)
    config = load_config(choice_config(chains[0], RDMA, model))
    assert config.megakv.context_parallel.prefill == "runahead"


COLUMNS = Fit(offload=True, weights=True, groups=4)


@pytest.mark.parametrize(
    "fit", [Fit(), Fit(fp8=True), Fit(offload=True), COLUMNS, Fit(kept_share=0.25), Fit(kept_share=0.25, offload=True)]
)
def test_configurations_can_be_read(fit: Fit) -> None:
    choice = replace(plan(small(), context=5000, gpus=4).choices[-1], fit=fit)
    config = load_config(choice_config(choice, RDMA, small()))
    if fit.offload:
        best = load_config(choice_config(choice, RDMA, small(), "throughput")).megakv.offload
        # What was predicted is named, and so is what it is best for.
        assert (best.objective, best.weights, best.num_gpu_batches) == ("throughput", fit.weights, fit.groups)
        assert not best.chooses_groups
    assert (config.cp_size, config.tp_size) == (choice.mesh.cp_size, choice.mesh.tp_size)
    offload = config.megakv.offload
    assert (offload.enabled, bool(offload.weights), offload.groups) == (fit.offload, fit.weights, fit.groups)
    assert offload.objective == "latency"
    assert config.megakv.weights.format == ("fp8" if fit.fp8 else "as_stored")
    assert config.megakv.fairkv.budget == (fit.kept_share if fit.kept_share < 1 else None)


def test_meshes_divide_heads_and_do_not_exceed_what_is_there() -> None:
    model = small()
    assert tp_sizes(model, 100) == [1, 2, 4, 8, 16]
    assert {mesh.tp_size for mesh in meshes(model, Demand(context=10**6, gpus=13))} == {1, 2, 4, 8}
    for mesh in meshes(model, Demand(context=10**6, gpus=13)):
        assert 1 <= mesh.ranks <= 13 and mesh.replicas == 13 // mesh.ranks
    assert max(mesh.cp_size for mesh in meshes(model, Demand(context=5, gpus=64))) == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"context": 0}, "--context 0: allowed: 1 to"),
        ({"context": -5}, "--context -5"),
        ({"context": 10**12}, "--context 1000000000000: allowed"),
        ({"cached": -1}, "--cached -1: allowed: 0 to"),
        ({"batch": 0}, "--batch 0"),
        ({"new_tokens": -2}, "--new-tokens -2: allowed: 0 to"),
        ({"gpus": 0}, "--gpus 0"),
        ({"gpus": 10**9}, "--gpus 1000000000: allowed: 1 to 1,000,000"),
        ({"slo_ttft_s": 0.0}, "--slo-ttft 0.0: allowed: seconds above 0"),
    ],
)
def test_absurd_demands(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Demand(**{"context": 1000, "gpus": 8, **values})


# The commands

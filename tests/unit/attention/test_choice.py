"""The choice of method: the paper's rules at the paper's points, the cost model, and what happens without evidence."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakv.attention.methods import METHODS, decode_methods, prefill_methods
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import Fingerprint, HardwareProfile
from megakv.costmodel.shape import AttentionShape, LayerShape, ModelShape
from megakv.engine.config import load_config
from megakv.forward.choice import (
    Evidence,
    algorithm_1,
    algorithm_5,
    choose_decode,
    choose_prefill,
    load_evidence,
)
from megakv.forward.config import ContextParallelConfig
from megakv.forward.planning import PassPlanner
from tests.unit.costmodel.profiles import fingerprint, ideal, pair_table
from tests.unit.costmodel.test_policy_fit import PUBLISHED, make_fit

# Llama-3 405B on one of the eight ranks of a host; rates as in tests/unit/costmodel/test_context_parallel.py.
LLAMA_405B = AttentionShape(16, 1, 128, 128, 2)
H100 = {"flops": 540e12, "bandwidth": 32.5e9}
CONTEXT = 128_000


def at(miss_rate: float, *, total: int = CONTEXT, size: int = 4) -> Workload:
    new = round(total * miss_rate)
    return Workload((new,), (total - new,), size)


def h100() -> HardwareProfile:
    """Where attention runs at 540 TF/s and the exchange at 32.5 GB/s."""
    table = pair_table(4 * 128 / 540e12, head_dim=128, heads=16, group=16)
    link = Curve.affine(1e-5, 32.5e9)
    return ideal(attention=(table,), exchange=link, collective=link)


@pytest.mark.parametrize(
    ("miss_rate", "first", "fifth"),
    [
        (0.01, "pass_q", "pass_q"),
        (0.025, "pass_q", "pass_q"),
        # The All2All makes the difference between the thresholds of Equations 1 and 5.
        (0.031, "pass_q", "pass_kv"),
        (0.05, "pass_kv", "pass_kv"),
        (0.1, "pass_kv", "pass_kv"),
        (0.125, "pass_kv", "pass_kv"),
        (1.0, "pass_kv", "pass_kv"),
    ],
)
def test_algorithms_choose_as_the_text_says(miss_rate: float, first: str, fifth: str) -> None:
    assert algorithm_1(at(miss_rate), LLAMA_405B, **H100) == first
    assert algorithm_5(at(miss_rate), LLAMA_405B, **H100) == fifth
    profile = h100()
    for policy, expected in (("alg1", first), ("alg5", fifth)):
        assert choose_prefill(Evidence(policy, profile), at(miss_rate), LLAMA_405B) == expected


def test_equation_1_decides_where_nothing_can_be_hidden() -> None:
    """So few tokens that no exchange hides: the smaller message, up to a miss rate of 12.5%."""
    for algorithm in (algorithm_1, algorithm_5):
        assert algorithm(at(0.12, total=1000), LLAMA_405B, **H100) == "pass_q"
        assert algorithm(at(0.13, total=1000), LLAMA_405B, **H100) == "pass_kv"


def test_without_a_profile_the_fewer_bytes_are_sent() -> None:
    for _ in range(100):
        kv_heads = random.choice((1, 2, 8))
        shape = AttentionShape(8, kv_heads, 64, 64, 2)
        new, cached = random.randint(1, 10_000), random.randint(0, 10_000)
        # Per token: queries of 64 16-bit numbers a head, and 65 float32 numbers that return.
        queries, returned, kv = 8 * 64 * 2, 8 * 65 * 4, 2 * kv_heads * 64 * 2
        smaller = "pass_q" if new * (queries + returned) < kv * (new + cached) else "pass_kv"
        assert choose_prefill(Evidence(), Workload((new,), (cached,), 2), shape) == smaller


def test_without_a_profile_keys_and_values_travel_where_attention_hides_them() -> None:
    """By what both took here; of fewer tokens the fewer bytes are sent, as where that is not known."""
    shape = AttentionShape(9, 3, 64, 64, 2)
    # Equation 2: 2 ranks, 768 bytes of a row, 2,304 operations of a pair.
    evidence, least = Evidence(flops_per_byte=240.0), 160
    for new, method in ((least - 1, "pass_q"), (least, "pass_kv"), (1000, "pass_kv")):
        assert choose_prefill(evidence, Workload((new,), (20_000,), 2), shape) == method
        assert choose_prefill(Evidence(), Workload((new,), (20_000,), 2), shape) == "pass_q"
    assert choose_prefill(evidence, Workload((100,), (100,), 2), shape) == "pass_kv"


def test_cost_model_finds_the_faster_method() -> None:
    profile, chosen = h100(), set()
    for rate in (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0):
        times = LayerTimes(profile, LLAMA_405B, at(rate))
        method = choose_prefill(Evidence("cost", profile), at(rate), LLAMA_405B)
        assert times.predict(method).seconds == min(times.predict(name).seconds for name in ("pass_kv", "pass_q"))
        chosen.add(method)
    assert chosen == {"pass_kv", "pass_q"}
    assert choose_prefill(Evidence("cost", profile), at(0.005), LLAMA_405B) == "pass_q"
    assert choose_prefill(Evidence("cost", profile), at(1.0), LLAMA_405B) == "pass_kv"


def test_cost_model_never_holds_all_keys_at_once() -> None:
    """However slow the ring: an all-gather of a long context would not fit."""
    slow_ring = ideal(exchange=Curve.affine(10.0, 1.0))
    assert choose_prefill(Evidence("cost", slow_ring), at(0.5), LLAMA_405B) in ("pass_kv", "pass_q")


def test_fitted_rule() -> None:
    sensible = Evidence("fitted", fit=make_fit(alpha=0.3, beta=2.0, gamma=3.0))
    assert choose_prefill(sensible, at(1.0), LLAMA_405B) == "pass_kv"
    assert choose_prefill(sensible, at(0.01), LLAMA_405B) == "pass_q"
    published = Evidence("fitted", fit=make_fit(**dict(zip(("alpha", "beta", "gamma"), PUBLISHED, strict=True))))
    assert choose_prefill(published, at(1.0), LLAMA_405B) == "pass_q"


def test_explicit_settings_are_obeyed() -> None:
    device = torch.device("meta")
    comm: Any = SimpleNamespace(mesh=SimpleNamespace(cp_size=4, cp_rank=0, tp_size=1, rank=0, device=device))

    def planner(**settings: str) -> PassPlanner:
        return PassPlanner(comm, ContextParallelConfig(size=4, **settings), heads=8, kv_heads=4)

    for method in prefill_methods():
        assert planner(prefill=method)._agreed_prefill(None, LLAMA_405B, 0) == method  # type: ignore[arg-type]
    for method in decode_methods():
        assert planner(decode=method).decode_method(at(0.5)) == method
    assert set(prefill_methods()) | set(decode_methods()) | {"local"} == set(METHODS)


def model(weights: int) -> ModelShape:
    return ModelShape(64, 0, 9, 8, 8, 64, 64, (LayerShape(weights),) * 2, 0, torch.float32)


def test_decode_without_evidence_goes_by_the_batch() -> None:
    for batch, size, expected in ((1, 2, "replicated"), (3, 4, "replicated"), (4, 4, "pass_q"), (9, 4, "pass_q")):
        work = Workload((1,) * batch, (500,) * batch, size)
        assert choose_decode(Evidence(), work, None, 1) == expected
        assert choose_decode(Evidence(), work, model(1), 1) == expected
        assert choose_decode(Evidence("cost", ideal()), work, None, 1) == expected


def test_decode_by_cost_weighs_the_collective_against_the_weights() -> None:
    """A step of the ring costs its latency; replicated queries cost as many passes through the weights."""
    work = Workload((1,) * 8, (500,) * 8, 4)
    slow_ring = ideal(exchange=Curve.affine(1e-2, 1e12))
    assert choose_decode(Evidence("cost", slow_ring), work, model(1), 1) == "replicated"
    slow_weights = ideal(matmul=Curve(sizes=(1, 1001), seconds=(1e-9, 1e-6)))
    assert choose_decode(Evidence("cost", slow_weights), work, model(10**6), 1) == "pass_q"
    # The paper's prefill rules say nothing about decoding: the cost model does.
    assert choose_decode(Evidence("alg1", slow_ring), work, model(1), 1) == "replicated"


def test_the_same_arguments_give_the_same_choice() -> None:
    profile, fit = h100(), make_fit()
    copy = HardwareProfile.model_validate_json(profile.model_dump_json())
    for policy in ("cost", "alg1", "alg5", "fitted"):
        for _ in range(50):
            work = at(10 ** random.uniform(-3, 0), total=random.randint(2000, 10**6), size=random.randint(2, 9))
            one = choose_prefill(Evidence(policy, profile, fit), work, LLAMA_405B)
            assert choose_prefill(Evidence(policy, copy, fit), work, LLAMA_405B) == one


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"policy": "alg1"},
            "policy = 'alg1' needs megakv.context_parallel.profile: a file that megakv profile --json",
        ),
        ({"policy": "alg5", "fit": "f.json"}, "policy = 'alg5' needs megakv.context_parallel.profile"),
        (
            {"policy": "fitted"},
            "policy = 'fitted' needs megakv.context_parallel.fit: a file that megakv fit-policy --j",
        ),
        ({"policy": "fitted", "profile": "p.json"}, "policy = 'fitted' needs megakv.context_parallel.fit"),
        ({"policy": "best"}, "megakv.context_parallel.policy = 'best': allowed: 'cost', 'alg1', 'alg5' or 'fitted'"),
    ],
)
def test_policies_without_their_file(section: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config({"megakv": {"context_parallel": section}})
    load_config({"megakv": {"context_parallel": {"policy": "alg5", "profile": "p.json"}}})


class Alone:
    """As much of a communicator as one rank of several looks like when all agree; others may hold other files."""

    def __init__(self, size: int = 2, others: str | None = None):
        self.mesh = SimpleNamespace(world_size=size, cp_size=size, tp_size=1)
        self._others = others

    def gather_objects(self, value: Any) -> list[Any]:
        if self._others is not None and isinstance(value, str):
            return [value, self._others]
        return [value] * self.mesh.world_size

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error


def evidence_of(config: ContextParallelConfig, comm: Any = None, **options: Any) -> Evidence:
    known: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dtype": torch.float32, **options}
    return load_evidence(config, comm or Alone(), **known)


def here(size: int = 2) -> Fingerprint:
    return Fingerprint.of_this_process(hosts=1, ranks=size, dtype=torch.float32)


def test_evidence_of_this_machine(tmp_path: Path) -> None:
    profile, fit = ideal(fingerprint=here()), make_fit(fingerprint=here())
    profile.save(tmp_path / "profile.json")
    fit.save(tmp_path / "fit.json")
    config = ContextParallelConfig(
        size=2, policy="fitted", profile=str(tmp_path / "profile.json"), fit=str(tmp_path / "fit.json")
    )
    assert evidence_of(config) == Evidence("fitted", profile, fit)
    assert evidence_of(ContextParallelConfig(policy="cost")) == Evidence()
    # Without a known type the profile's own is taken.
    bf16 = ideal(fingerprint=here().model_copy(update={"dtype": "bfloat16"}))
    bf16.save(tmp_path / "profile.json")
    config = ContextParallelConfig(profile=str(tmp_path / "profile.json"))
    assert evidence_of(config, dtype=None).profile == bf16
    with pytest.raises(ValueError, match="was measured elsewhere: dtype 'bfloat16', here 'float32'; measure here"):
        evidence_of(config)


def test_foreign_evidence_is_refused_unless_accepted(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ideal(fingerprint=fingerprint(processor="another", cores=999)).save(path)
    config = ContextParallelConfig(profile=str(path))
    with pytest.raises(ValueError, match="megakv.context_parallel.profile = .* processor 'another', here .*cores 999"):
        evidence_of(config)
    accepted = ContextParallelConfig(profile=str(path), accept_foreign_profile=True)
    assert evidence_of(accepted).profile is not None


@pytest.mark.parametrize("change", [{"heads": 4}, {"kv_heads": 8}, {"ring_size": 3}])
def test_a_fit_for_another_model_is_refused(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "fit.json"
    make_fit(fingerprint=here(), **change).save(path)
    with pytest.raises(ValueError, match="was fitted to .* here 8 and 2 on 2; measure here, or set megakv.*accept_for"):
        evidence_of(ContextParallelConfig(policy="fitted", fit=str(path)))


def test_ranks_with_different_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ideal(fingerprint=here()).save(path)
    with pytest.raises(ValueError, match="megakv.context_parallel.profile: the file of rank 1 differs from that of r"):
        evidence_of(ContextParallelConfig(profile=str(path)), Alone(others="another digest"))


def test_broken_evidence_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="megakv.context_parallel.profile = '/no/such.json' cannot be read"):
        evidence_of(ContextParallelConfig(profile="/no/such.json"))
    path = tmp_path / "fit.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="megakv.context_parallel.fit = .* is not a megakv policy fit"):
        evidence_of(ContextParallelConfig(policy="fitted", fit=str(path)))

"""Profiles on disk: whole or refused, and only on the machine that they were measured on."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile, load_profile
from tests.unit.costmodel.profiles import fingerprint, ideal


def test_saved_and_read_back(tmp_path: Path) -> None:
    profile = ideal(seconds_per_pair=random.uniform(1e-12, 1e-9), step_overhead_s={"pass_kv": 1e-4})
    path = tmp_path / "profile.json"
    profile.save(path)
    again = load_profile(path)
    assert again == profile
    assert again.digest() == profile.digest() != ideal(seconds_per_pair=2e-9).digest()
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {name: value for name, value in values.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v | {"format": "something else"}, "is not a megakv hardware profile"),
        (lambda v: [v], "is not a megakv hardware profile"),
        (lambda v: v | {"version": 2}, "version: Input should be 1"),
        (_without("exchange"), "exchange: Field required"),
        (lambda v: v | {"surprise": 1}, "surprise: Extra inputs are not permitted"),
        (lambda v: v | {"exposed_transfer": 1.5}, "exposed_transfer: .*less than or equal to 1"),
        (lambda v: v | {"attention": []}, "attention: .*at least 1 item"),
        (lambda v: v | {"step_overhead_s": {"pass_kv": -1}}, "step_overhead_s.pass_kv: .*greater than or equal to 0"),
        (lambda v: v | {"merge": {"sizes": [1, 2], "seconds": [1, float("nan")]}}, r"merge.seconds.1: .*finite"),
        (lambda v: v | {"merge": {"sizes": [2, 1], "seconds": [1, 1]}}, "merge: .*must ascend"),
        (lambda v: v | {"fingerprint": {**v["fingerprint"], "cores": 0}}, "fingerprint.cores"),
    ],
)
def test_broken_profiles_are_refused_by_name(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(change(json.loads(ideal().model_dump_json()))))
    with pytest.raises(ValueError, match=message) as caught:
        load_profile(path, setting="megakv.context_parallel.profile")
    assert f"megakv.context_parallel.profile = '{path}'" in str(caught.value)
    assert "megakv profile --json FILE" in str(caught.value)


def test_truncated_missing_and_binary_files(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ideal().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_profile(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        load_profile(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        load_profile(tmp_path)


def test_without_a_fused_kernel() -> None:
    only_math = ideal().attention[0].model_copy(update={"kernel": "math"})
    with pytest.raises(ValueError, match="no table of kernel 'flash'"):
        HardwareProfile(**{**ideal().model_dump(), "attention": (only_math,)})


def test_differences_are_named() -> None:
    assert fingerprint().differences(fingerprint()) == []
    differences = fingerprint().differences(fingerprint(cores=64, dtype="bfloat16"))
    assert differences == ["cores 4, here 64", "dtype 'float32', here 'bfloat16'"]


def test_overlap() -> None:
    """Perfect overlap is the maximum, none the sum; between them two lines meet where both last equally long."""
    compute, transfer = random.uniform(1, 5), random.uniform(1, 5)
    assert ideal().overlapped(compute, transfer) == max(compute, transfer)
    assert ideal(exposed=(1, 1)).overlapped(compute, transfer) == pytest.approx(compute + transfer)
    shared = ideal(exposed=(0.2, 0.5))
    assert shared.overlapped(10, 1) == pytest.approx(10.2)
    assert shared.overlapped(1, 10) == pytest.approx(10.5)
    assert shared.overlapped(3, 0) == 3
    # While both run, factors u and v slow them down; u = (1 - ab) / (1 - b), v = (1 - ab) / (1 - a).
    u, v = 0.9 / 0.5, 0.9 / 0.8
    assert shared.overlapped(u, v) == pytest.approx(u * v)


def test_derived_rates() -> None:
    profile = ideal(
        exchange=Curve.affine(1e-4, 2e9),
        exposed=(0.3, 0.25),
        copy_bytes=Curve.affine(1e-6, 5e9),
        matmul=Curve(sizes=(1, 256), seconds=(1e-9, 8e-9)),
    )
    assert profile.bandwidth == pytest.approx(2e9 / 1.25)
    assert profile.memory_bandwidth == pytest.approx(1e10)
    assert profile.matmul_flops == pytest.approx(2 * 256 / 8e-9)

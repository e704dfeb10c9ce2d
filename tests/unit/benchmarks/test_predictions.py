"""Predictions of MegaKV's own methods from a profile of the ranks that were measured."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import FalconConfig, LlamaConfig

from benchmarks.harness.predictions import OWN, Predictions, predictions_of
from megakv.attention.methods import prefill_methods
from megakv.costmodel.curves import Curve
from tests.unit.costmodel.profiles import ideal
from tests.unit.costmodel.test_chain import attention_only


def test_only_megakv_s_methods_are_predicted() -> None:
    found = Predictions(ideal(exchange=Curve.affine(random.uniform(0.5, 2), 1e9)), attention_only(3, dense=50_000), 4)
    new = random.randint(2, 5000)
    for method in ("single", "single_masked", "tp", "tp_gloo", "in_place_idle", "auto", "alone"):
        assert found.prefill(method, new) is None and found.decode(method, new) is None
    for method in OWN:
        partition = (new, 7, 0, 5) if method.startswith("kvr") else None
        if partition or method == "one_rank" or method in prefill_methods():
            seconds = found.prefill(method, new + 12, partition=partition)
            assert seconds is not None and seconds > 0


def test_tensor_parallel_ranks_are_no_context_parallel_ones() -> None:
    found = Predictions(ideal(exchange=Curve.affine(1.0, 1e12)), attention_only(3), 4)
    four, two = (replace(found, tp_size=degree).prefill("all_gather", 64) for degree in (1, 2))
    assert four is not None and two is not None and four != pytest.approx(two, rel=0.1)


def test_a_processor_reads_prompts_of_known_layers_by_blocks() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 8}
    assert predictions_of(ideal(), LlamaConfig(**sizes, intermediate_size=8), torch.float32, 2).model.fused
    assert not predictions_of(ideal(), FalconConfig(**sizes), torch.float32, 2).model.fused

"""A configuration is read whole or refused with its key, its value and what is allowed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import megakv
from docs.reference import combination_errors
from megakv.base.errors import LAWS, CombinationError
from megakv.engine.config import load_config


def test_defaults() -> None:
    config = load_config()
    assert (config.cp_size, config.tp_size, config.dtype) == (1, 1, None)
    assert config.megakv.context_parallel.prefill == "auto"


def test_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"dtype": "bf16", "tensor_parallel": {"tp_size": 2}, "megakv": {"timeout_s": 5}}))
    config = load_config(path, max_out_tokens=99)
    assert (config.dtype, config.tp_size, config.max_out_tokens) == (torch.bfloat16, 2, 99)
    assert load_config(config) is config


def test_deprecated_spelling_of_tp_size() -> None:
    assert load_config({"mp_size": 2}).tp_size == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"megakv": {"contxt_parallel": {}}},
            "contxt_parallel = {}: unknown key; did you mean 'context_parallel'",
        ),
        ({"nonsense": 1}, "nonsense = 1: unknown key; allowed: megakv and those of DeepSpeed's inference config"),
        ({"dtyp": "fp32"}, "dtyp = 'fp32': unknown key; did you mean 'dtype'"),
        (
            {"megakv": {"offload": {"gb": 1}}},
            "gb = 1: unknown key; allowed: chunk_tokens, cpu_threads, .*weights",
        ),
        ({"megakv": {"offload": {"enabled": True, "host_gb": math.inf}}}, "offload.host_gb = inf: .*finite"),
        (
            {"megakv": {"offload": {"enabled": True, "disk_gb": 1e300}}},
            "disk_gb = 1e.300: .*less than or equal",
        ),
        (
            {"megakv": {"offload": {"enabled": True, "emulated_link_gb_s": 1e-300}}},
            "gb_s = 1e-300: .*greater than",
        ),
        ({"megakv": {"timeout_s": math.inf}}, "megakv.timeout_s = inf: .*finite"),
        (
            {"megakv": {"context_parallel": {"size": 0}}},
            "megakv.context_parallel.size = 0: .*greater than or equal to 1",
        ),
        ({"megakv": {"context_parallel": {"prefill": "ring"}}}, "prefill = 'ring': allowed: 'auto', 'pass_kv'"),
        ({"megakv": {"context_parallel": {"decode": "pass_kv"}}}, "decode = 'pass_kv': allowed: 'auto', 'pass_q'"),
        ({"megakv": {"runahead": {"kv": "first"}}}, "megakv.runahead.kv = 'first': allowed: 'sharded' or 'last'"),
        (
            {"megakv": {"runahead": {"partition": "odd"}}},
            "runahead.partition = 'odd': .*allowed: 'auto', 'even', or a list",
        ),
        (
            {"megakv": {"runahead": {"partition": [True]}}},
            r"partition = \[True\]: .*allowed: 'auto', 'even', or a list",
        ),
        ({"megakv": {"runahead": {"partition": [1, 2]}}}, r"partition = \[1, 2\] has 2 parts: allowed: 1"),
        ({"megakv": {"runahead": {"partition": [-1.0]}}}, r"partition = \[-1.0\]: allowed: numbers of 0 or more"),
        (
            {"megakv": {"context_parallel": {"size": 2}, "runahead": {"partition": [0.5, 0.4]}}},
            r"partition = \[0.5, 0.4\] sums to 0.9: allowed",
        ),
        ({"megakv": {"runahead": {"chunk_tokens": 0}}}, "megakv.runahead.chunk_tokens = 0"),
        (
            {"megakv": {"runahead": {"table": "t.json", "partition": "even"}}},
            "runahead.table = 't.json' is for megakv.runahead.partition = 'auto', which is 'even'",
        ),
        ({"megakv": {"offload": {"metod": "auto"}}}, "offload.metod = 'auto': unknown key; did you mean 'method'"),
        ({"megakv": {"nonsense": "auto"}}, "megakv.nonsense = 'auto': unknown key; allowed: adapter, context_parallel"),
        ({"megakv": {"offload": {"host_gb": "auto"}}}, "offload.host_gb = 'auto': allowed: a number"),
        ({"megakv": {"offload": {"host_gb": True}}}, "offload.host_gb = True: allowed: a number"),
        ({"megakv": {"offload": {"cpu_threads": "2"}}}, "offload.cpu_threads = '2': allowed: a whole number"),
        ({"megakv": {"offload": {"weights": "yes"}}}, "offload.weights = 'yes': allowed: false, true or 'disk'"),
        ({"megakv": {"offload": {"enabled": 1}}}, "offload.enabled = 1: allowed: true or false"),
        ({"megakv": {"runahead": {"kv": "last"}}}, "kv = 'last' needs .*prefill = 'runahead', which is 'auto'"),
        (
            {"megakv": {"context_parallel": {"prefill": "runahead", "decode": "pass_q"}, "runahead": {"kv": "last"}}},
            "context_parallel.decode = 'pass_q' contradicts megakv.runahead.kv = 'last'",
        ),
        ({"megakv": {"fairkv": {"copies": "batch"}}}, "copies = 'batch' is given, but no KV head has a copy without"),
        (
            {"megakv": {"fairkv": {"mapping": "m.json", "copies": "rows"}}},
            "copies = 'rows': allowed: 'tokens' or 'batch'",
        ),
        (
            {
                "megakv": {
                    "context_parallel": {"size": 2, "prefill": "runahead"},
                    "runahead": {"kv": "last"},
                    "offload": {"enabled": True, "method": "kvpr"},
                }
            },
            "offload.method = 'kvpr' is not supported with megakv.runahead.kv = 'last': .*activations",
        ),
        ({"megakv": {"load": "pickle"}}, "megakv.load = 'pickle': allowed: 'checkpoint' or 'random'"),
        ({"megakv": {"timeout_s": -1}}, "megakv.timeout_s = -1"),
        ({"metod": "auto"}, "config: metod = 'auto': unknown key; allowed: megakv and those of DeepSpeed"),
        ({"tensor_parallel": {"tp_siz": "auto"}}, "config: tensor_parallel.tp_siz = 'auto': unknown key"),
        ({"dtype": "int8"}, "dtype = torch.int8: allowed: fp32, bf16, fp16"),
        ({"dtype": "fp33"}, "dtype = 'fp33': allowed: 'fp32', 'bf16' or 'fp16', or null"),
        (
            {"dtype": "fp8"},
            "dtype = 'fp8': allowed: 'fp32', .*; weights of 8 bits are megakv.weights.format = 'int8'",
        ),
        ({"dtype": ["fp32"]}, "allowed: 'fp32', 'bf16' or 'fp16'"),
        (
            {"injection_policy": {"Layer": 5}},
            "injection_policy = {'Layer': 5}: allowed: names of row-parallel linears by",
        ),
        (
            {"injection_dict": {"Layer": []}},
            "injection_dict = {'Layer': .*}: allowed: names of row-parallel linears by",
        ),
        (
            {"injection_policy": {7: "o_proj"}},
            "injection_policy = {7: 'o_proj'}: allowed: .* as in {'LlamaDecoderLayer'",
        ),
        ({1: "fp32"}, "config: 1 = 'fp32': allowed: keys that are strings"),
        ({"megakv": {"offload": {None: 2}}}, "config: megakv.offload.None = 2: allowed: keys that are strings"),
        ({"tensor_parallel": {"tp_size": 0}}, "tensor_parallel.tp_size = 0: allowed: 1 or more"),
        ({"tensor_parallel": {"mpu": object()}}, "tensor_parallel.mpu is not supported with MegaKV"),
        ({"tensor_parallel": {"enabled": False, "tp_size": 2}}, "enabled = false contradicts"),
        ({"replace_with_kernel_inject": True}, "replace_with_kernel_inject = True is not supported with MegaKV"),
        ({"checkpoint": "x.json"}, "checkpoint = 'x.json' is not supported with MegaKV: pass the model's directory"),
        (
            {"enable_cuda_graph": True, "megakv": {"context_parallel": {"size": 2}}},
            "enable_cuda_graph = true: messages between context-parallel ranks are not captured; leave it out",
        ),
        ({"enable_cuda_graph": True, "megakv": {"fairkv": {"budget": 64}}}, "enable_cuda_graph = true: kept tokens"),
        (
            {"enable_cuda_graph": True, "megakv": {"offload": {"enabled": True}}},
            "enable_cuda_graph = true: what is off",
        ),
        ({"training_mp_size": 2}, "training_mp_size = 2 is not supported"),
        ({"kernel_inject": True}, "config: kernel_inject = True is not supported"),
        (
            {"zero": {"stage": 3}},
            r"^config: zero = {'stage': 3} is not supported with MegaKV: weights are placed by .*; leave it out$",
        ),
        ({"zero": {"stag": 3}}, r"^config: zero\.stag = 3: unknown key; did you mean 'stage'\?$"),
        ({"max_out_tokens": "many"}, "max_out_tokens = 'many': allowed: a whole number"),
        ({"tensor_parallel": {"tp_size": "two"}}, "tp_size = 'two': allowed: a whole number"),
        (
            {"megakv": {"load": ["x" * 99]}},
            r"^config: megakv\.load = \['x{50,55} \.\.\.: allowed: 'checkpoint' or 'random'$",
        ),
        ({"megakv": [2]}, r"megakv = \[2\]: allowed: a section: {\.\.\.}"),
        ({"megakv": {"fairkv": {"mapping": 3}}}, "mapping = 3: allowed: text"),
        ({"megakv": {"tracking": {"timeline": "x.jpg"}}}, "timeline = 'x.jpg': allowed: a path that ends in .png$"),
        (
            {"megakv": {"fairkv": {"budget": 0.5, "method": "h2o", "window": 8}}},
            "^config: megakv.fairkv.window is not a setting of method 'h2o', which has: recent, per_query$",
        ),
        (
            {"megakv": {"fairkv": {"budget": 4, "method": "snapkv"}}},
            "^config: megakv.fairkv.budget = 4 .* below the 32",
        ),
        (
            {"megakv": {"fairkv": {"budget": 4, "method": "headkv"}}},
            "^config: .*'headkv' needs megakv.fairkv.importance",
        ),
    ],
)
def test_refusals_name_key_value_and_remedy(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(values)


@pytest.mark.parametrize(
    ("values", "law"),
    [
        ({"megakv": {"offload": {"weights": True}}}, "needs"),
        ({"megakv": {"context_parallel": {"policy": "alg1"}}}, "needs"),
        ({"megakv": {"runahead": {"kv": "last"}}}, "needs"),
        ({"megakv": {"fairkv": {"budget": 0.5, "method": "h2o", "window": 8}}}, "needs"),
        ({"megakv": {"fairkv": {"budget": 4, "method": "snapkv"}}}, "room"),
        ({"megakv": {"runahead": {"partition": [1, 2]}}}, "whole"),
        ({"megakv": {"runahead": {"table": "t.json", "partition": "even"}}}, "one"),
        ({"tensor_parallel": {"enabled": False, "tp_size": 2}}, "one"),
        (
            {
                "megakv": {
                    "context_parallel": {"size": 2, "prefill": "runahead"},
                    "runahead": {"kv": "last"},
                    "offload": {"enabled": True, "method": "kvpr"},
                }
            },
            "inputs",
        ),
    ],
)
def test_refused_combinations_carry_a_law(values: dict, law: str) -> None:
    with pytest.raises(CombinationError) as caught:
        load_config(values)
    assert caught.value.law == law


def test_every_law_refuses_something() -> None:
    assert {law for law, _ in combination_errors()} == LAWS.keys() and len(LAWS) <= 8
    with pytest.raises(ValueError, match="timeout_s") as caught:
        load_config({"megakv": {"timeout_s": -1}})
    assert type(caught.value) is ValueError


def test_contradicting_argument() -> None:
    with pytest.raises(ValueError, match="max_out_tokens = 5 contradicts the argument max_out_tokens = 6"):
        load_config({"max_out_tokens": 5}, max_out_tokens=6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON: column 2"),
        (b"[1]", "must be a JSON object, not list"),
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "broken.json is not valid JSON"),
        (b"\xff{}", "broken.json is not UTF-8 text: invalid start byte at byte 0"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_config(str(path))


def test_missing_file() -> None:
    with pytest.raises(ValueError, match="config /no/such.json cannot be read: No such file"):
        load_config("/no/such.json")


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"dtype": "fp32", "megakv": {"seed": 1, "timeout_s": 9, "seed": 2}}')
    with pytest.raises(ValueError, match=r"run\.json: the key 'seed' is given twice"):
        load_config(file)


@pytest.mark.parametrize("model", [None, 7])
def test_what_is_no_model_is_refused_before_anything_starts(model: Any) -> None:
    with pytest.raises(ValueError, match=rf"model = {model}: allowed: a directory, a hub id or a transformers"):
        megakv.init_inference(model, {"dtype": "fp32"})

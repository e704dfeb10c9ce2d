"""Sources of weights give any part of a parameter, and refuse what is broken by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from megakv.base.errors import MegaKVError
from megakv.engine.loading import build_model, empty_model
from megakv.weights.checkpoint import CheckpointWeights
from megakv.weights.files import StoredTensors
from megakv.weights.lazy import LazyTensor, from_tensor
from megakv.weights.placement import SliceSpec, contiguous_head_map, plan_placement
from megakv.weights.sources import ModuleWeights, RandomWeights
from tests.families import FAMILIES, llama, llama_tied, mixtral

WHOLE = SliceSpec()
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def lazy_cases() -> list[tuple[str, Callable[[list], Tensor]]]:
    return [
        ("stack", lambda t: torch.stack(t, dim=0)),
        ("stack_last", lambda t: torch.stack(t, dim=-1)),
        ("cat", lambda t: torch.cat(t, dim=0)),
        ("cat_1", lambda t: torch.cat(t, dim=1)),
        ("transpose", lambda t: torch.transpose(t[0], 0, 1)),
        ("chunk", lambda t: torch.chunk(t[1], 2, dim=0)[1]),
        ("split", lambda t: torch.split(t[1], [1, 4], dim=1)[1]),
        ("experts", lambda t: torch.cat([torch.stack(t[:2]), torch.stack(t[1:])], dim=1)),
        ("nested", lambda t: torch.cat([torch.transpose(t[0], 0, 1), torch.transpose(t[1], 0, 1)], dim=-1)),
        ("untraced", lambda t: torch.stack(t).flip(0)),
        ("method", lambda t: t[0].reshape(5, 4).contiguous()),
    ]


@pytest.mark.parametrize(("name", "make"), lazy_cases())
def test_lazy_operations(name: str, make: Callable[[list], Tensor]) -> None:
    tensors = [torch.randn(4, 5) for _ in range(3)]
    wanted = make(tensors)
    made = make([from_tensor(tensor) for tensor in tensors])
    assert isinstance(made, LazyTensor) != (name in ("untraced", "method"))
    lazy = made if isinstance(made, LazyTensor) else from_tensor(made)
    assert tuple(lazy.shape) == tuple(wanted.shape)
    assert torch.equal(lazy.whole(), wanted)
    for dim in range(wanted.ndim):
        size = wanted.shape[dim]
        for ranges in (((0, 1),), ((1, size),), ((size - 1, size), (0, 1))):
            assert torch.equal(lazy.read(dim, ranges), SliceSpec(dim, ranges).take(wanted)), (dim, ranges)


def test_lazy_operations_refuse_what_torch_refuses() -> None:
    parts = [from_tensor(torch.zeros(4, 5)), from_tensor(torch.zeros(3, 5))]
    assert tuple(torch.cat(parts).shape) == (7, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be joined along 1"):
        torch.cat(parts, dim=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be stacked"):
        torch.stack(parts)  # type: ignore[arg-type]


def test_experts_are_read_by_parts(tmp_path: Path) -> None:
    """Separately stored experts are merged, and only the bytes of the part are taken."""
    whole = AutoModelForCausalLM.from_config(mixtral())
    whole.save_pretrained(tmp_path)
    assert any("experts.3.w1" in key for key in load_file(tmp_path / SINGLE))
    source = CheckpointWeights(tmp_path, empty_model(mixtral(), torch.float32))
    assert source.unexpected == [] and source.bytes_read == 0
    name = "model.layers.1.mlp.experts.gate_up_proj"
    spec = SliceSpec(1, ((8, 20), (52, 64)))
    part = source.read(name, spec)
    assert torch.equal(part, spec.take(whole.get_parameter(name)))
    assert source.bytes_read == part.nbytes == 4 * 4 * 24 * 64


def save_sharded(config: PreTrainedConfig, directory: Path) -> dict[str, str]:
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size="100KB")
    found: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    assert len(set(found.values())) > 2
    return found


def test_sharded_checkpoint(tmp_path: Path) -> None:
    save_sharded(llama(), tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    source = CheckpointWeights(tmp_path, empty_model(llama(), torch.float32))
    for name, tensor in expected.items():
        assert torch.equal(source.read(name, WHOLE), tensor)
    assert source.bytes_read == sum(tensor.nbytes for tensor in expected.values())


def test_files_are_closed_once_much_of_them_was_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakv.weights.files.MAPPED_BYTES", 1000)
    whole = AutoModelForCausalLM.from_config(mixtral())
    whole.save_pretrained(tmp_path)
    source = CheckpointWeights(tmp_path, empty_model(mixtral(), torch.float32))
    parts = {name: source.read(name, WHOLE) for name, _ in whole.named_parameters()}
    assert len(source._stored._open) <= 1
    for name, parameter in whole.named_parameters():
        assert torch.equal(parts[name], parameter)


def refuse(directory: Path, *parts: str, config: PreTrainedConfig | None = None) -> None:
    with pytest.raises(MegaKVError) as caught:
        CheckpointWeights(directory, empty_model(config or llama(), torch.float32))
    for part in parts:
        assert part in str(caught.value)


def test_missing_shard(tmp_path: Path) -> None:
    gone = save_sharded(llama(), tmp_path)["lm_head.weight"]
    (tmp_path / gone).unlink()
    refuse(tmp_path, str(tmp_path), f"lacks {gone}", INDEX)


def test_truncated_shard(tmp_path: Path) -> None:
    cut = tmp_path / save_sharded(llama(), tmp_path)["lm_head.weight"]
    cut.write_bytes(cut.read_bytes()[:-100])
    refuse(tmp_path, f"{cut} is cut short or broken")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"")
    refuse(tmp_path, f"{tmp_path / SINGLE} is cut short or broken")


def test_key_not_where_the_index_says(tmp_path: Path) -> None:
    index = json.loads((tmp_path / INDEX).read_text()) if save_sharded(llama(), tmp_path) else {}
    wrong = next(n for n in index["weight_map"].values() if n != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = wrong
    (tmp_path / INDEX).write_text(json.dumps(index))
    refuse(tmp_path, f"{tmp_path / wrong} lacks model.norm.weight")


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}'])
def test_broken_index(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    refuse(tmp_path, f"{tmp_path / INDEX} is no index of a checkpoint")


def test_missing_key(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / SINGLE)
    refuse(tmp_path, "no model.layers.0.mlp.up_proj.weight (and lacks 1 more)", "LlamaForCausalLM needs")


def test_missing_expert(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(mixtral()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    key = next(key for key in tensors if "layers.1." in key and "experts.2.w3" in key)
    del tensors[key]
    save_file(tensors, tmp_path / SINGLE)
    refuse(tmp_path, "model.layers.1.mlp.experts.gate_up_proj", config=mixtral())


def test_wrong_shape(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama(intermediate_size=90)).save_pretrained(tmp_path)
    refuse(tmp_path, SINGLE, "layers.0.mlp.down_proj.weight the shape [64, 90], expected [64, 97] by config.json")


def test_wrong_type(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tmp_path / SINGLE)
    refuse(tmp_path, SINGLE, "model.norm.weight has type I8, expected one of F64, F32, F16, BF16")


def test_pickles_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(MegaKVError, match="only pickled weights .pytorch_model.bin.*save_pretrained"):
        StoredTensors(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(MegaKVError, match=f"neither {SINGLE} nor {INDEX}; config megakv.load = 'random'"):
        StoredTensors(tmp_path)


def test_tied_weights_stored_twice(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama_tied()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / SINGLE)
    CheckpointWeights(tmp_path, empty_model(llama_tied(), torch.float32))
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / SINGLE)
    refuse(tmp_path, "ties", "different values", "tie_word_embeddings to false", config=llama_tied())
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / SINGLE)
    model = build_model(tmp_path, dtype=None, all_reduce=lambda t: t).module
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_keys_of_the_base_model_and_extra_keys(tmp_path: Path) -> None:
    """Checkpoints saved without the head's prefix load; what the model lacks is listed."""
    whole = AutoModelForCausalLM.from_config(llama_tied())
    tensors = {key: value.clone() for key, value in whole.model.state_dict().items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / SINGLE)
    source = CheckpointWeights(tmp_path, empty_model(llama_tied(), torch.float32))
    assert source.unexpected == ["layers.0.self_attn.rotary_emb.inv_freq"]
    assert torch.equal(source.read("model.norm.weight", WHOLE), whole.model.norm.weight)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox", "cohere", "gpt_oss", "gemma2"])
def test_random_weights_do_not_depend_on_the_mesh(name: str) -> None:
    model = empty_model(FAMILIES[name](), torch.float32)
    whole, again, other = (RandomWeights(model, seed, torch.device("cpu")) for seed in (3, 3, 4))
    heads, kv_heads = 8, getattr(model.config, "num_key_value_heads", 8)
    for rank in range(4):
        placement = plan_placement(model, contiguous_head_map(2, heads, kv_heads, 4), rank)
        for key, spec in placement.items():
            if not spec.zero:
                assert torch.equal(again.read(key, spec), spec.take(whole.read(key, WHOLE))), key
    differ = [key for key in placement if not torch.equal(whole.read(key, WHOLE), other.read(key, WHOLE))]
    assert all("norm" in key or key.endswith("bias") for key in set(placement) - set(differ))


class Drawn(TorchDispatchMode):
    """Notes how many random numbers each call draws."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "normal" in str(func):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_random_weights_by_parts() -> None:
    """Any order of rows or columns, and the right spread."""
    config = LlamaConfig(
        vocab_size=2100, hidden_size=512, intermediate_size=2500, num_hidden_layers=1, initializer_range=0.3
    )
    source = RandomWeights(empty_model(config, torch.float32), 0, torch.device("cpu"))
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = source.read(name, WHOLE)
    assert whole.shape == (2500, 512)
    assert abs(whole.std() - 0.3) < 0.002 and abs(whole.mean()) < 0.002
    assert whole.unique().numel() > 0.99 * min(whole.numel(), 2**20)
    for spec, drawn in (
        (SliceSpec(0, ((2040, 2060), (0, 7))), 2500 + 2048),
        (SliceSpec(0, ((2400, 2500),)), 452),
        (SliceSpec(1, ((500, 512), (3, 4))), 2500),
    ):
        with Drawn() as mode:
            assert torch.equal(source.read(name, spec), spec.take(whole))
        # Nobody draws a large parameter whole for a part of it.
        assert sum(mode.sizes) <= drawn * 512 and max(mode.sizes) <= 1 << 20
    assert source.read("model.norm.weight", WHOLE).eq(1).all()


def test_module_weights_give_away_and_refuse_meta() -> None:
    module = torch.nn.Linear(3, 4)
    weight = module.weight.detach().clone()
    source = ModuleWeights(module)
    spec = SliceSpec(0, ((1, 3),))
    assert source.has("weight") and torch.equal(source.read("weight", spec), weight[1:3])
    assert not source.has("weight")
    with pytest.raises(MegaKVError, match="has no value for weight and 1 more: load it first"):
        ModuleWeights(torch.nn.Linear(3, 4, device="meta"))

"""Shards of a model, run together, are the model."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from megakv.engine.loading import build_model
from megakv.offload.assembly import _recomputes
from megakv.offload.config import OffloadConfig
from megakv.weights.placement import HeadGroup, HeadMap, HeadShard
from megakv.weights.tensor_parallel import RowParallelLinear
from tests.families import FAMILIES, NEEDS_SUBSTITUTE, VOCAB, falcon, gpt_neox, llama
from tests.mappings import random_mapping
from tests.shards import ThreadRanks

PLACED = [name for name in FAMILIES if name not in NEEDS_SUBSTITUTE]
IDS = torch.tensor([[5, 7, 11, 190, 3, 3, 42, 100, 17, 64, 9, 1] * 3])


def save(name: str, directory: Path) -> PreTrainedModel:
    """A random model of a family, written out; norms and biases moved off their neutral values."""
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", PLACED)
def test_families_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    ids = torch.randint(1, VOCAB, (2, 33))
    with torch.no_grad():
        wanted = whole(ids, use_cache=False).logits
    largest = sum(p.nbytes for p in whole.parameters())
    for size in (2, 4):
        shards = ThreadRanks(tmp_path, size)
        for loaded in shards.ranks:
            kept = sum(p.nbytes for p in loaded.module.parameters())
            assert loaded.bytes_read <= loaded.bytes_kept and kept < largest
            assert loaded.bytes_kept == kept + sum(b.nbytes for b in loaded.module.buffers())
        for rank, logits in enumerate(shards.logits(ids)):
            assert relative_error(logits, wanted) < 1e-5, (size, rank)


def random_map(n_layers: int, n_heads: int, n_kv_heads: int, size: int, rng: random.Random) -> HeadMap:
    """Query heads dealt at random, each rank at least one: uneven counts, copied KV heads, no order."""
    group = n_heads // n_kv_heads
    layers = []
    for _ in range(n_layers):
        heads = rng.sample(range(n_heads), n_heads)
        cuts = sorted(rng.sample(range(1, n_heads), size - 1))
        shards = []
        for start, stop in zip([0, *cuts], [*cuts, n_heads], strict=True):
            groups: dict[int, list[int]] = {}
            for head in heads[start:stop]:
                groups.setdefault(head // group, []).append(head)
            shards.append(HeadShard(tuple(HeadGroup(kv, tuple(mine)) for kv, mine in groups.items())))
        layers.append(tuple(shards))
    return HeadMap(n_heads, n_kv_heads, tuple(layers))


def attend_by_shard(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: object
) -> tuple[Tensor, None]:
    """Causal attention that looks up each query head's KV head, as MegaKV's own does."""
    shard = module.head_shard
    assert isinstance(shard, HeadShard)
    assert q.shape[1] == len(shard.query_heads) and k.shape[1] == len(shard.kv_heads)
    index = [index for index, group in enumerate(shard.groups) for _ in group.query_heads]
    out = F.scaled_dot_product_attention(q, k[:, index], v[:, index], is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


@pytest.mark.parametrize(("name", "seed"), [*(("llama", seed) for seed in range(5)), ("olmo2", 5), ("olmo2", 6)])
def test_any_head_map_gives_the_same_logits(name: str, seed: int, tmp_path: Path) -> None:
    AttentionInterface.register("by_shard", attend_by_shard)
    rng = random.Random(seed)
    whole = save(name, tmp_path)
    size = rng.choice((2, 3, 4, 5))
    head_map = random_map(2, 8, 4, size, rng)
    shards = ThreadRanks(tmp_path, size, head_map=head_map)
    for loaded in shards.ranks:
        loaded.module.set_attn_implementation("by_shard")
    with torch.no_grad():
        wanted = whole(IDS, use_cache=False).logits
    for logits in shards.logits(IDS):
        assert relative_error(logits, wanted) < 1e-5


def test_keys_behind_a_norm_over_all_heads_are_not_recomputed(tmp_path: Path) -> None:
    """A rank that recomputed would wait for the others' sums."""
    save("olmo2", tmp_path)
    model = ThreadRanks(tmp_path, 2).ranks[1].module
    with pytest.raises(
        ValueError, match=r"megakv.offload.method = 'kvpr' .*'olmo2': its norm of keys is over all heads"
    ):
        _recomputes(OffloadConfig(enabled=True, method="kvpr"), model)
    assert not _recomputes(OffloadConfig(enabled=True), model)
    assert _recomputes(OffloadConfig(enabled=True), ThreadRanks(tmp_path, 1).ranks[0].module)


def test_a_mapping_with_copies_is_read_straight_into_place(tmp_path: Path) -> None:
    """Every rank reads what it keeps and no more, copies of heads included."""
    whole = save("llama", tmp_path)
    size = random.choice((2, 3, 4))
    head_map = random_mapping(2, 4, size).head_map(8)
    for rank, loaded in enumerate(ThreadRanks(tmp_path, size, head_map=head_map).ranks):
        kept = sum(p.nbytes for p in loaded.module.parameters())
        assert loaded.bytes_read <= kept < sum(p.nbytes for p in whole.parameters())
        for number, (own, source) in enumerate(zip(loaded.module.model.layers, whole.model.layers, strict=True)):
            shard = head_map.shard(number, rank)
            for name, heads, count in (
                ("q_proj", shard.query_heads, 8), ("k_proj", shard.kv_heads, 4), ("v_proj", shard.kv_heads, 4)
            ):  # fmt: skip
                rows = getattr(source.self_attn, name).weight.unflatten(0, (count, -1))[list(heads)].flatten(0, 1)
                assert torch.equal(getattr(own.self_attn, name).weight, rows), (name, number, rank)
            columns = source.self_attn.o_proj.weight.unflatten(1, (8, -1))[:, list(shard.query_heads)].flatten(1)
            assert torch.equal(own.self_attn.o_proj.weight, columns), (number, rank)


def test_fused_projections_follow_an_unordered_map() -> None:
    """Heads in another order and other counts, where queries, keys and values lie in one matrix."""
    groups = [HeadGroup(kv, (2 * kv, 2 * kv + 1)) for kv in (3, 0, 2, 1)]
    for model_config, size in ((falcon(), 4), (gpt_neox(), 8)):
        whole = AutoModelForCausalLM.from_config(model_config).eval()
        dealt = groups if size == 4 else [HeadGroup(head, (head,)) for head in (5, 0, 3, 7, 6, 1, 2, 4)]
        layer = (HeadShard(tuple(dealt[:1])), HeadShard(tuple(dealt[1:])))
        head_map = HeadMap(8, size, (layer, layer))
        state = whole.state_dict()

        def copy(config=model_config, values=state) -> PreTrainedModel:  # type: ignore[no-untyped-def]
            model = AutoModelForCausalLM.from_config(config)
            model.load_state_dict(values)
            return model

        with torch.no_grad():
            wanted = whole(IDS, use_cache=False).logits
        for logits in ThreadRanks(copy, 2, head_map=head_map).logits(IDS):
            assert relative_error(logits, wanted) < 1e-5


def test_uneven_groups_are_refused_for_fused_groups() -> None:
    shards = (
        HeadShard((HeadGroup(0, (0, 1)), HeadGroup(1, (2,)))),
        HeadShard((HeadGroup(1, (3,)), HeadGroup(2, (4, 5)), HeadGroup(3, (6, 7)))),
    )
    model = AutoModelForCausalLM.from_config(falcon())
    with pytest.raises(ValueError, match="FalconAttention needs equally many query heads beside each KV head"):
        build_model(
            model, dtype=None, tp_size=2, head_map=HeadMap(8, 4, (shards, shards)), all_reduce=lambda tensor: tensor
        )


def test_a_given_module_is_sharded_in_place() -> None:
    models = [AutoModelForCausalLM.from_config(llama(attention_bias=True)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        wanted = models[0].eval()(IDS, use_cache=False).logits
    embedding = models[0].model.embed_tokens.weight.data_ptr()
    given = iter(models)
    shards = ThreadRanks(lambda: next(given), 2)
    assert [loaded.module for loaded in shards.ranks] == models
    assert models[0].model.embed_tokens.weight.data_ptr() == embedding
    assert models[0].model.layers[0].self_attn.q_proj.weight.shape == (32, 64)
    for logits in shards.logits(IDS):
        assert relative_error(logits, wanted) < 1e-5


def test_row_parallel_bias_is_added_once() -> None:
    weight, bias, x = torch.randn(5, 7), torch.randn(5), torch.randn(3, 7)
    other = torch.randn(3, 5)
    linear = RowParallelLinear(weight, bias, lambda tensor: tensor.add_(other))
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias) + other)
    assert (linear.in_features, linear.out_features) == (7, 5)


def test_attention_knows_its_local_heads() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["phi3"]())
    build_model(model, dtype=None, tp_rank=3, tp_size=4, all_reduce=lambda tensor: tensor)
    attention = model.model.layers[1].self_attn
    assert attention.head_shard == HeadShard((HeadGroup(3, (6, 7)),))
    assert attention.config.num_attention_heads == 2 and model.config.num_attention_heads == 8
    assert attention.num_key_value_heads == 1 and attention.num_key_value_groups == 2
    model.set_attn_implementation("eager")
    assert attention.config._attn_implementation == "eager"

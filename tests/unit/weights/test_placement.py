"""Maps of heads, and the parts of parameters that follow from them."""

import pytest
import torch
from accelerate import init_empty_weights

from megakv.engine.loading import empty_model
from megakv.planner.dry_run.share import WholeModel
from megakv.weights.formats import choose_format
from megakv.weights.placement import (
    HeadGroup,
    HeadMap,
    HeadShard,
    SliceSpec,
    contiguous_head_map,
    head_counts,
    plan_placement,
    split_width,
)
from megakv.weights.placement.plan import InjectionPolicy
from tests.families import FAMILIES, llama
from tests.unfamiliar import ROWS, MixLayer, UnfamiliarForCausalLM, unfamiliar


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [
        (8, 4, 2, [((0, (0, 1)), (1, (2, 3))), ((2, (4, 5)), (3, (6, 7)))]),
        (4, 2, 4, [((0, (0,)),), ((0, (1,)),), ((1, (2,)),), ((1, (3,)),)]),
        (6, 1, 3, [((0, (0, 1)),), ((0, (2, 3)),), ((0, (4, 5)),)]),
    ],
)
def test_contiguous_map(heads: int, kv_heads: int, size: int, expected: list) -> None:
    head_map = contiguous_head_map(3, heads, kv_heads, size)
    assert head_map.tp_size == size and len(head_map.layers) == 3
    for rank, groups in enumerate(expected):
        assert head_map.shard(2, rank) == HeadShard(tuple(HeadGroup(kv, queries) for kv, queries in groups))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "working"),
    [(71, 1, 2, "1, 71"), (8, 4, 3, "1, 2, 4, 8"), (12, 4, 6, "1, 2, 4, 12"), (8, 8, 16, "1, 2, 4, 8")],
)
def test_sizes_that_do_not_divide(heads: int, kv_heads: int, size: int, working: str) -> None:
    message = f"tp_size = {size} cannot split {heads} query heads over {kv_heads} KV heads; sizes that can: {working}$"
    with pytest.raises(ValueError, match=message):
        contiguous_head_map(1, heads, kv_heads, size)


def test_shard_indices() -> None:
    shard = HeadShard((HeadGroup(3, (6, 7)), HeadGroup(0, (1,))))
    assert shard.kv_heads == (3, 0)
    assert shard.query_heads == (6, 7, 1)
    assert shard.group_size is None


def test_replicas_hold_their_whole_group() -> None:
    layer = (
        HeadShard((HeadGroup(1, (2, 3)), HeadGroup(0, (0, 1)))),
        HeadShard((HeadGroup(2, (4, 5)), HeadGroup(0, (0, 1)))),
    )
    assert HeadMap(6, 3, (layer,)).whole_copies(0) == {0: (0, 1)}
    # Divided query heads are no replicas.
    assert contiguous_head_map(1, 8, 1, 4).whole_copies(0) == {}


@pytest.mark.parametrize("width", [4, 7, 44, 97, 128, 131, 264, 11008])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_width_is_divided_without_gaps(width: int, parts: int) -> None:
    ranges = [split_width(width, parts, part) for part in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == width
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    sizes = [stop - start for start, stop in ranges]
    assert min(sizes) >= 1 and sizes == sorted(sizes, reverse=True)
    unit = 8 if width % 8 == 0 else 4 if width % 4 == 0 and width >= 4 * parts else 1
    assert sizes[0] - sizes[-1] <= unit and all(start % unit == 0 for start, _ in ranges)


def test_width_smaller_than_ranks() -> None:
    with pytest.raises(ValueError, match="tensor_parallel.tp_size = 4 is more than an MLP width of 3"):
        split_width(3, 4, 0)


def test_slice_spec() -> None:
    tensor = torch.arange(24).view(4, 6)
    spec = SliceSpec(1, ((4, 6), (0, 1)))
    assert spec.size == 3 and spec.shape((4, 6)) == (4, 3)
    assert spec.take(tensor)[1].tolist() == [10, 11, 6]
    assert SliceSpec().take(tensor) is tensor
    assert SliceSpec(zero=True).take(tensor).tolist() == [[0] * 6] * 4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [2, 8])
def test_every_weight_is_somewhere(name: str, size: int) -> None:
    """Over the ranks each index of a cut dimension is kept, once; keys and values of copied heads more often."""
    model = empty_model(FAMILIES[name](), torch.float32)
    layers, heads, kv_heads = head_counts(model.config)
    plans = [plan_placement(model, contiguous_head_map(layers, heads, kv_heads, size), rank) for rank in range(size)]
    shapes = {key: parameter.shape for key, parameter in model.named_parameters(remove_duplicate=False)}
    assert set(plans[0]) == set(shapes)
    cut = 0
    for key, shape in shapes.items():
        specs = [plan[key] for plan in plans]
        if any(spec.zero for spec in specs):
            assert [spec.zero for spec in specs] == [False] + [True] * (size - 1)
        if specs[0].ranges is None:
            continue
        cut += 1
        counts = torch.zeros(shape[specs[0].dim], dtype=torch.int64)
        for spec in specs:
            for start, stop in spec.ranges or ():
                counts[start:stop] += 1
        of_keys = any(part in key for part in ("k_proj", "v_proj", "k_norm", "qkv", "query_key_value"))
        copies = max(1, size // kv_heads) if of_keys else 1
        assert counts.max() == copies, key
        assert counts.min() == (1 if "qkv" in key or "query_key_value" in key else copies), key
    assert cut >= 4 * layers


def test_unknown_parts_are_refused_by_name() -> None:
    model = empty_model(llama(), torch.float32)
    model.model.layers[1].mlp.extra = torch.nn.Linear(64, 13, device="meta")
    head_map = contiguous_head_map(2, 8, 4, 2)
    with pytest.raises(ValueError, match="LlamaMLP has a linear extra of 13 outputs, not 97"):
        plan_placement(model, head_map, 0)
    model.model.layers[1].mlp.extra = torch.nn.LayerNorm(97, device="meta")
    with pytest.raises(ValueError, match="LlamaMLP has parameters in extra between its linears"):
        plan_placement(model, head_map, 0)


def unfamiliar_model() -> UnfamiliarForCausalLM:
    """Without memory."""
    with init_empty_weights(include_buffers=False):
        return UnfamiliarForCausalLM(unfamiliar())


@pytest.mark.parametrize("policy", [{MixLayer: ROWS}, {"MixLayer": list(ROWS), "LlamaDecoderLayer": "o_proj"}])
@pytest.mark.parametrize("size", [2, 8])
def test_a_policy_places_what_autotp_does_not_know(policy: InjectionPolicy, size: int) -> None:
    """Every index is on one rank, but for keys and values of copied heads, and the shares go through a pass."""
    model = unfamiliar_model()
    layers, heads, kv_heads = head_counts(model.config)
    whole = WholeModel.plan(model, torch.float32, contiguous_head_map(layers, heads, kv_heads, size), policy)
    assert whole.cut == 7 * layers and len(whole.shares(5, weights=choose_format("as_stored"))) == size
    keys = [placement["model.layers.1.mixer.offer.weight"].size for placement in whole.placements]
    queries = [placement["model.layers.1.mixer.ask.weight"].size for placement in whole.placements]
    assert keys == [max(64 // size, 16)] * size and queries == [128 // size] * size


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (None, r"MixLayer is unknown to DeepSpeed's AutoTP .*: name its row-parallel linears, as in injection_policy="),
        (
            {"LlamaDecoderLayer": ROWS},
            "injection_policy is for LlamaDecoderLayer, but the .* decoder layers are MixLayer$",
        ),
        (
            {MixLayer: ("mix_out", "first")},
            "names 'first' for MixLayer, which has no such linear; allowed: shrink, mixer",
        ),
        ({MixLayer: ("shrink", "mixer.shrink")}, "names 'mixer.shrink' for MixLayer, which has no such linear"),
        ({MixLayer: "mix_out"}, "MixLayer has 0 row-parallel linears beside shrink: name .* injection_policy="),
        ({MixLayer: "shrink"}, "MixAttention has no linear shrink: name .* injection_policy="),
        ({MixLayer: ("mixer.ask", "shrink")}, "MixAttention has offer.out_features = 64, not 4 heads of 8"),
    ],
)
def test_policies_that_do_not_fit(policy: InjectionPolicy | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_placement(unfamiliar_model(), contiguous_head_map(2, 8, 4, 2), 0, policy)


def test_what_autotp_finds_in_part() -> None:
    """It knows the attention's last linear by its name, and not the feed-forward's."""
    model = unfamiliar_model()
    for layer in model.model.layers:
        layer.mixer.o_proj = layer.mixer.mix_out
        del layer.mixer.mix_out
    with pytest.raises(ValueError, match="injection_policy="):
        plan_placement(model, contiguous_head_map(2, 8, 4, 2), 0)

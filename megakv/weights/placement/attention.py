"""Cutting an attention module by heads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from megakv.weights.placement.heads import HeadMap, HeadShard
from megakv.weights.placement.slices import WHOLE, SliceSpec, blocks, joined

SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = ("query_key_value", "qkv_proj", "Wqkv")
OUTPUTS = ("o_proj", "out_proj", "dense")
BY_KV_HEAD = ("bloom", "falcon", "gpt_neox")
"""Types that fuse queries, keys and values as ``[K, G + 2, D]``: a KV head's queries, then its key and its value."""
CONCATENATED = ("mpt", "phi3")
"""Types that fuse them as ``[q | k | v]``."""
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types whose linear for queries makes, of each head, its query and a gate for its output: ``[H, 2, D]``."""
NAMES_ROWS = "name its row-parallel linears, as in injection_policy={DecoderLayer: ('o_proj', 'down_proj')}"
LATENT = "kv_b_proj"
"""In families that cache latents: what expands them into all heads' keys and values."""
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
LATENT_QUERIES = ("q_proj", "q_b_proj")
QUERY_NORMS = ("q_norm", "q_layernorm")
KEY_NORMS = ("k_norm", "k_layernorm")


def refusal(module: nn.Module, model_type: str, why: str) -> ValueError:
    """The error for an architecture that tensor parallelism would get wrong."""
    return ValueError(
        f"tensor_parallel.tp_size > 1 is not supported for model type {model_type!r}: {type(module).__name__} {why}; "
        "use tensor_parallel.tp_size = 1 with megakv.context_parallel.size > 1"
    )


def find_attention(layer: nn.Module, model_type: str) -> tuple[str, nn.Module]:
    """Name and module of a decoder layer's attention; refused if there is not exactly one."""
    modules = attention_modules(layer)
    found = [(name, module) for name, module in layer.named_modules() if module in modules]
    if len(found) != 1 or not found[0][0]:
        raise refusal(layer, model_type, f"has {len(found)} attention modules that can be split by heads")
    return found[0]


def attention_specs(
    module: nn.Module, model_type: str, heads: HeadMap, shard: HeadShard, named: Collection[str] = ()
) -> dict[str, SliceSpec]:
    """The parts of an attention module's parameters, by their names inside it, on the rank with the heads of `shard`.

    Of the module, the whole one, only names and shapes are looked at. It is refused where it is not known to be right
    when cut. Where its last linear is among those `named` as row-parallel, the others may have any names.
    """
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    output = next((name for name in named or OUTPUTS if name in linears), None)
    if output is None:
        raise refusal(module, model_type, f"has no linear {' or '.join(sorted(named or OUTPUTS))}: {NAMES_ROWS}")
    if LATENT in linears:
        return _latent_specs(module, model_type, linears, heads, shard, output)
    fused = next((name for name in FUSED if name in linears), None)
    H, K = heads.n_heads, heads.n_kv_heads
    D = getattr(module, "head_dim", None) or getattr(module, "head_size", None) or linears[output].in_features // H
    counts = {(output, "in_features"): H}
    separate = _by_width(linears, output, H * D) if named else SEPARATE
    wide = 2 if model_type in GATED and fused is None else 1
    if fused is None:
        counts |= {(name, "out_features"): count for name, count in zip(separate, (wide * H, K, K), strict=True)}
    elif model_type in BY_KV_HEAD + CONCATENATED:
        counts[fused, "out_features"] = H + 2 * K
    else:
        raise refusal(module, model_type, f"fuses queries, keys and values in {fused} in an unknown order")
    for (name, side), count in counts.items():
        if name not in linears:
            raise refusal(module, model_type, f"has no linear {name}{'' if named else f': {NAMES_ROWS}'}")
        if (size := getattr(linears[name], side)) != count * D:
            raise refusal(module, model_type, f"has {name}.{side} = {size}, not {count} heads of {D}")
    queries, keys = blocks(shard.query_heads, D), blocks(shard.kv_heads, D)
    if fused is None:
        made = blocks(shard.query_heads, wide * D), keys, keys
        outputs = {name: SliceSpec(0, kept) for name, kept in zip(separate, made, strict=True)}
    elif model_type in CONCATENATED:
        behind = (blocks(shard.kv_heads, D, first * D) for first in (H, H + K))
        outputs = {fused: SliceSpec(0, joined((*queries, *(found for part in behind for found in part))))}
    elif shard.group_size is None:
        raise refusal(module, model_type, "needs equally many query heads beside each KV head of a rank")
    else:
        group, rows = H // K, list[int]()
        for part in shard.groups:
            base = part.kv_head * (group + 2)
            rows += [base + head - part.kv_head * group for head in part.query_heads]
            rows += [base + group, base + group + 1]
        outputs = {fused: SliceSpec(0, blocks(rows, D))}
    specs: dict[str, SliceSpec] = {}
    for name, parameter in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner in outputs:
            specs[name] = outputs[owner]
        elif owner == output:
            specs[name] = SliceSpec(1, queries) if kind == "weight" else WHOLE
        else:
            over_heads = "." in name and is_rms_norm(module.get_submodule(owner))
            found = _extra(name, tuple(parameter.shape), D, heads, shard, over_heads=over_heads)
            if found is None:
                why = f"has a parameter {name} of shape {list(parameter.shape)} that cannot be split by heads"
                raise refusal(module, model_type, why)
            specs[name] = found
    return specs


def _by_width(linears: dict[str, nn.Linear], output: str, query_width: int) -> tuple[str, ...]:
    """Names of the linears of queries, keys and values: the usual ones, else three whose widths tell them apart.

    Keys and values are cut alike, and so are queries where they are as wide.
    """
    others = [name for name in linears if name != output]
    if len(others) != 3 or not set(SEPARATE).isdisjoint(others):
        return SEPARATE
    return tuple(sorted(others, key=lambda name: linears[name].out_features != query_width))


def _latent_specs(
    module: nn.Module, model_type: str, linears: dict[str, nn.Linear], heads: HeadMap, shard: HeadShard, output: str
) -> dict[str, SliceSpec]:
    """Heads of queries, of what expands latents and of the output; what makes latents is whole on every rank."""
    queries = [name for name in LATENT_QUERIES if name in linears]
    if len(queries) != 1:
        raise refusal(module, model_type, f"has {len(queries)} linears {' and '.join(LATENT_QUERIES)}")
    cut = {(queries[0], 0): linears[queries[0]].out_features, (LATENT, 0): linears[LATENT].out_features}
    cut[output, 1] = linears[output].in_features
    specs = {name: WHOLE for name, _ in module.named_parameters()}
    for (name, side), size in cut.items():
        if size % heads.n_heads:
            raise refusal(module, model_type, f"has {name} of {size} columns for {heads.n_heads} heads")
        specs[f"{name}.weight"] = SliceSpec(side, blocks(shard.query_heads, size // heads.n_heads))
        if side == 0 and f"{name}.bias" in specs:
            specs[f"{name}.bias"] = specs[f"{name}.weight"]
    known = {*linears, *LATENT_NORMS}
    strange = [name for name in specs if name.partition(".")[0] not in known]
    if strange:
        raise refusal(module, model_type, f"has a parameter {strange[0]} that cannot be split by heads")
    return specs


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a norm divides by the root of its input's mean square and multiplies with a weight, as Llama's does."""
    return hasattr(module, "variance_epsilon") and [name for name, _ in module.named_parameters()] == ["weight"]


def _extra(
    name: str, shape: tuple[int, ...], head_dim: int, heads: HeadMap, shard: HeadShard, *, over_heads: bool
) -> SliceSpec | None:
    """Norms of queries and keys, each head's own or one `over_heads`, and attention sinks."""
    owner = name.split(".")[0]
    if owner in QUERY_NORMS + KEY_NORMS:
        queries = owner in QUERY_NORMS
        count, kept = (heads.n_heads, shard.query_heads) if queries else (heads.n_kv_heads, shard.kv_heads)
        if shape == (head_dim,):
            return WHOLE
        if shape == (count, head_dim):
            return SliceSpec(0, blocks(kept, 1))
        return SliceSpec(0, blocks(kept, head_dim)) if over_heads and shape == (count * head_dim,) else None
    return SliceSpec(0, blocks(shard.query_heads, 1)) if name == "sinks" and shape == (heads.n_heads,) else None


def attention_modules(model: nn.Module) -> list[Any]:
    """The modules that have an index in the cache."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__
    ]

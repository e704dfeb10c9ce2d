"""The part of every parameter of a model that a tensor-parallel rank keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepspeed.module_inject.auto_tp import AutoTP
from torch import nn
from transformers import PreTrainedModel

from megakv.weights.placement.attention import NAMES_ROWS, attention_specs, find_attention, refusal
from megakv.weights.placement.heads import HeadMap
from megakv.weights.placement.slices import WHOLE, SliceSpec, joined, split_width

ROUTERS = ("gate", "router", "shared_expert_gate")
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
TRANSPOSED = ("Llama4TextExperts",)
"""Classes of experts that do not say of themselves that they are transposed, gate beside up."""
InjectionPolicy = Mapping[type[nn.Module] | str, str | Sequence[str]]
"""Names of row-parallel linears by the class of decoder layers, or its name, as `deepspeed.init_inference` takes it."""


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of a model's decoder layers; refused if there is no list as long as the config says."""
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and any(module is m for m in decoder.modules()):
            return name, module
    raise refusal(model, model.config.model_type, f"has no list of {count} decoder layers")


def row_parallel_names(model: PreTrainedModel, policy: InjectionPolicy | None = None) -> frozenset[str]:
    """Last names of the linears whose outputs must be summed over ranks: those that a policy names for the model's
    decoder layers, else as DeepSpeed's AutoTP finds them.

    Raises
    ------
    ValueError
        If no class of the policy is one of a decoder layer, a name is not one of a linear there, or AutoTP does not
        know the model.
    """
    if policy:
        layers = {type(layer): layer for layer in decoder_layers(model)[1]}
        given = {own: policy[key] for own in layers for key in (own, own.__name__) if key in policy}
        if not given:
            named = ", ".join(getattr(kind, "__name__", str(kind)) for kind in policy)
            allowed = " or ".join(sorted(kind.__name__ for kind in layers))
            raise ValueError(f"injection_policy is for {named}, but the model's decoder layers are {allowed}")
        found = set[str]()
        for kind, names in given.items():
            linears = [name for name, module in layers[kind].named_modules() if isinstance(module, nn.Linear)]
            for name in (names,) if isinstance(names, str) else names:
                if not any(f".{linear}".endswith(f".{name}") for linear in linears):
                    raise ValueError(
                        f"injection_policy names {name!r} for {kind.__name__}, which has no such linear; allowed: "
                        f"{', '.join(linears)}"
                    )
                found.add(name.rpartition(".")[2])
        return frozenset(found)
    try:
        found = AutoTP.tp_parser(model)
    except AssertionError as error:
        kind, why = model.config.model_type, f"is unknown to DeepSpeed's AutoTP ({error}): {NAMES_ROWS}"
        raise refusal(decoder_layers(model)[1][0], kind, why) from error
    return frozenset(entry.rpartition(".")[2] for _, entries in found for entry in entries) | {"down_proj"}


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in three-dimensional weights."""
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in EXPERT_WEIGHTS)


def are_transposed(experts: nn.Module) -> bool:
    """Whether a module holds its experts' weights as ``[E, in, out]``."""
    return type(experts).__name__ in TRANSPOSED or bool(getattr(experts, "is_transposed", False))


def unknown_experts(module: nn.Module) -> str | None:
    """Why it is not known what a module does with the weights of its experts; None where it is."""
    known = {f"{name}{end}" for name in EXPERT_WEIGHTS for end in ("", "_bias")}
    strange = [name for name, _ in module.named_parameters() if name not in known]
    described = all(isinstance(getattr(module, name, None), bool) for name in ("is_transposed", "is_concatenated"))
    gated = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    return None if described and gated and not strange else f"stores its experts in an unknown way {strange or ''}"


def _experts(
    module: nn.Module, model_type: str, rank: int, size: int, multiples: Sequence[int]
) -> dict[str, SliceSpec]:
    """Parts of ``[E, 2I, H]`` and ``[E, H, I]`` weights (or transposed), cut along the width I of every expert."""
    if type(module).__name__ not in TRANSPOSED and (reason := unknown_experts(module)):
        raise refusal(module, model_type, reason)
    transposed, concatenated = are_transposed(module), getattr(module, "is_concatenated", True)
    assert isinstance(module.down_proj, nn.Parameter)
    width = module.down_proj.shape[1 if transposed else 2]
    start, stop = split_width(width, size, rank, multiples)
    both = joined([(start, stop), (width + start, width + stop)] if concatenated else [(2 * start, 2 * stop)])
    specs = {
        "gate_up_proj": SliceSpec(2 if transposed else 1, both),
        "gate_up_proj_bias": SliceSpec(1, both),
        "down_proj": SliceSpec(1 if transposed else 2, ((start, stop),)),
        "down_proj_bias": SliceSpec(zero=rank > 0),
    }
    return {name: specs[name] for name, _ in module.named_parameters()}


def _mlp(
    module: nn.Module,
    model_type: str,
    rows: frozenset[str],
    rank: int,
    size: int,
    multiples: Sequence[int],
    *,
    holds_attention: bool,
) -> dict[str, SliceSpec]:
    """Parts of the linears that are direct children of `module`, an MLP or a whole layer (OPT)."""
    children = dict(module.named_children())
    linears = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
    down = [child for name, child in linears.items() if name in rows]
    others = [name for name in children if name not in linears and next(children[name].parameters(), None) is not None]
    if down and others and not holds_attention:
        raise refusal(module, model_type, f"has parameters in {', '.join(others)} between its linears")
    specs: dict[str, SliceSpec] = {}
    for name, linear in linears.items():
        if name in ROUTERS:
            specs[f"{name}.weight"] = specs[f"{name}.bias"] = WHOLE
            continue
        if len(down) != 1:
            raise refusal(module, model_type, f"has {len(down)} row-parallel linears beside {name}: {NAMES_ROWS}")
        width = down[0].in_features
        start, stop = split_width(width, size, rank, multiples)
        if name in rows:
            specs[f"{name}.weight"], specs[f"{name}.bias"] = SliceSpec(1, ((start, stop),)), WHOLE
            continue
        if linear.out_features == width:
            ranges = joined([(start, stop)])
        elif linear.out_features == 2 * width and name == "gate_up_proj":
            ranges = joined([(start, stop), (width + start, width + stop)])
        else:
            raise refusal(module, model_type, f"has a linear {name} of {linear.out_features} outputs, not {width}")
        specs[f"{name}.weight"] = specs[f"{name}.bias"] = SliceSpec(0, ranges)
    return specs


def beside_attention(layer: nn.Module, attention: str) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of a decoder layer, itself included, but for its attention and what is in that."""
    for name, module in layer.named_modules():
        if name != attention and not name.startswith(f"{attention}."):
            yield name, module


def feed_forward_linears(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """The linears of a decoder layer outside its attention, as parent and name; routers are none of them."""
    found: list[tuple[nn.Module, str]] = []
    for name, child in layer.named_children():
        if isinstance(child, nn.Linear):
            if name not in ROUTERS:
                found.append((layer, name))
        elif "Attention" not in type(child).__name__:
            found += feed_forward_linears(child)
    return found


def feed_forward_specs(
    module: nn.Module,
    model_type: str,
    rows: frozenset[str],
    rank: int,
    size: int,
    *,
    holds_attention: bool,
    multiples: Sequence[int] = (),
) -> dict[str, SliceSpec]:
    """Parts of one module's own linears or experts, by their names inside it; none where it has neither.

    `rows` are the names of linears that are cut along their inputs; the module may be a layer that `holds_attention`.
    `multiples` are as in `plan_placement`. A ValueError says what cannot be cut.
    """
    if is_experts(module):
        return _experts(module, model_type, rank, size, multiples)
    return _mlp(module, model_type, rows, rank, size, multiples, holds_attention=holds_attention)


def plan_placement(
    model: PreTrainedModel,
    head_map: HeadMap,
    tp_rank: int,
    policy: InjectionPolicy | None = None,
    multiples: Sequence[int] = (),
) -> dict[str, SliceSpec]:
    """The part of every parameter, by its name (tied ones included), that `tp_rank` keeps.

    Attention is cut by `head_map`, MLPs and every expert along their width; embeddings, norms, routers and the output
    head are kept whole. Of the whole model only names and shapes are looked at, so it may be on the meta device.
    `policy` names the linears that are cut along their inputs, where AutoTP does not find them. Widths are cut at
    `multiples` of which weights' blocks are made, the first that does. An architecture with something that would be
    wrong when cut is a `ValueError`.
    """
    placement = {name: WHOLE for name, _ in model.named_parameters(remove_duplicate=False)}
    size = head_map.tp_size
    if size == 1:
        return placement
    model_type = model.config.get_text_config().model_type
    prefix, layers = decoder_layers(model)
    rows = row_parallel_names(model, policy)
    for index, layer in enumerate(layers):
        here = f"{prefix}.{index}."
        attention_name, attention = find_attention(layer, model_type)
        shard = head_map.shard(index, tp_rank)
        cut = attention_specs(attention, model_type, head_map, shard, rows if policy else ())
        found = {f"{attention_name}.{name}": spec for name, spec in cut.items()}
        for name, module in beside_attention(layer, attention_name):
            inside = f"{name}." if name else ""
            parts = feed_forward_specs(
                module, model_type, rows, tp_rank, size, holds_attention=not name, multiples=multiples
            )
            found |= {inside + child: spec for child, spec in parts.items()}
        for name, parameter in layer.named_parameters():
            if name not in found and parameter.ndim > 1 and name.split(".")[-2] not in ROUTERS:
                raise refusal(layer, model_type, f"has a parameter {name} of shape {list(parameter.shape)}")
            placement[here + name] = found.get(name, WHOLE)
    return placement

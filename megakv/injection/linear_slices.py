"""Decoding as tensor parallelism over the context-parallel ranks, without more memory.

Every context-parallel rank holds all weights of its tensor-parallel shard. Where few rows are computed, and every rank
has them all, a rank multiplies them with its slice of each weight alone, a view of what it holds: a step then reads
every weight once over all ranks, instead of once on each.

- Queries, keys and values: a rank computes a run of the rows of their weights, one behind the other, wherever heads
  begin; one message gathers them. The output projection: a run of its columns; one message sums what ranks have.
- Feed-forward: runs of the width, as tensor parallelism cuts it (`megakv.weights.placement`); one sum at its end.
- The output head: runs of the vocabulary, over all ranks of the mesh; the logits are gathered.

What is not known to be right when cut is computed whole, as are norms and routers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.attention.layer import Weight
from megakv.distributed.comm import Communicator, Over
from megakv.forward.pass_plan import PassPlan
from megakv.injection.linears import (
    FewRowsLinears,
    Slice,
    all_reduce_of,
    at_blocks,
    columns_of,
    cut_columns,
    cut_product,
    product,
    summands,
    summed,
)
from megakv.weights.placement.attention import FUSED, LATENT, OUTPUTS, SEPARATE, find_attention
from megakv.weights.placement.plan import (
    beside_attention,
    decoder_layers,
    feed_forward_specs,
    is_experts,
    row_parallel_names,
    unknown_experts,
)
from megakv.weights.placement.slices import Ranges, SliceSpec, split_width

Current = Callable[[], PassPlan | None]
Pays = Callable[[dict[str, int]], dict[str, bool]]
"""By kind of linears, ``inputs`` and ``outputs`` of attention and ``feed_forward``: the bytes of weights that a rank is
spared in a layer, and whether that takes more time than a message. All ranks hear the same."""


class GatheredRows:
    """Linears of one input, whose rows one behind the other are cut into as many runs as a group has ranks.

    Whoever is called first with an input computes for all; the others are called with the very same one, or compute
    whole.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], comm: Communicator, over: Over, rank: int, size: int, layer: int | None
    ):
        self._linears, self._comm, self._over, self._layer = linears, comm, over, layer
        rows = [linear.weight.shape[0] for linear in linears]
        self.own: dict[int, Slice] = {}
        """This rank's slices, by the identity of their linears: of some it may have none."""
        runs = [split_width(sum(rows), size, part) for part in range(size)]
        self._rows, self.widths = rows, [stop - start for start, stop in runs]
        first, (start, stop) = 0, runs[rank]
        for linear, count in zip(linears, rows, strict=True):
            a, b = max(start - first, 0), min(stop - first, count)
            if a < b:
                self.own[id(linear)] = Slice(linear, rows=(a, b))
            first += count
        self._x: Tensor | None = None
        self._found: dict[int, Tensor] = {}

    def output(self, linear: nn.Linear, x: Tensor) -> Tensor | None:
        """That of one of the linears; None where it was not computed with the others of this input."""
        if linear is self._linears[0]:
            self._x, self._found = x, self._computed(x)
        found = self._found.pop(id(linear), None) if x is self._x else None
        if not self._found:
            self._x = None
        return found

    def _computed(self, x: Tensor) -> dict[int, Tensor]:
        parts = [part.product(x) for part in self.own.values()]
        whole = self.gathered(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))
        outputs = whole.split(self._rows, dim=-1)
        return {id(linear): out.contiguous() for linear, out in zip(self._linears, outputs, strict=True)}

    def gathered(self, own: Tensor) -> Tensor:
        """``[..., out of all]`` from this rank's run of it."""
        if (missing := max(self.widths) - own.shape[-1]) > 0:
            own = F.pad(own, (0, missing))
        gathered = self._comm.all_gather(own, self._over, operation="linear_gather", layer=self._layer)
        if own.numel() == self.widths[-1]:
            # Of one row all runs, which are equally long, lie one behind the other.
            return gathered.view(*own.shape[:-1], -1)
        return torch.cat([part[..., :width] for part, width in zip(gathered, self.widths, strict=True)], dim=-1)


class SummedColumns:
    """A linear of which a rank computes a run of columns: the outputs are summed, and a bias is added to the sum.

    Its input is whole, or that run of it alone. The sum goes over tensor-parallel ranks too, where it is spread there.
    """

    def __init__(self, linear: nn.Linear, columns: tuple[int, int], comm: Communicator, layer: int):
        self.columns, self._comm, self._layer = columns, comm, layer
        self.own, self._inputs = Slice(linear, columns=columns), columns_of(linear)[0]
        self.over: Over = "cp" if all_reduce_of(linear) is None else "world"

    def output(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        start, stop = self.columns
        x = x[..., start:stop] if x.shape[-1] == self._inputs else x
        out = summed(self.summands(self.own.product(x)))
        return out if linear.bias is None else (out + linear.bias).to(out.dtype)

    def summands(self, own: Tensor) -> Tensor:
        """``[N, ..., out]``, whose sum it is but for the bias, from what this rank's columns make of the input."""
        return summands(self._comm, own, self.over, self._layer)


class KeptRows:
    """A linear of which a rank computes some rows, which go on alone."""

    def __init__(self, linear: nn.Linear, ranges: Ranges):
        self.own = [Slice(linear, rows=rows) for rows in ranges]

    def output(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """``[..., in]`` to the outputs of those rows."""
        parts = [part.product(x) for part in self.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


Part = GatheredRows | SummedColumns | KeptRows


class SlicedExperts:
    """In the place of the `forward` of a module with all experts of a layer: a rank has a run of each one's width."""

    def __init__(
        self, module: nn.Module, specs: dict[str, SliceSpec], comm: Communicator, layer: int, active: Callable[[], bool]
    ):
        self.experts: Any = module
        self._comm, self._layer, self._active = comm, layer, active
        self._rows, self._columns = specs["gate_up_proj"].ranges, specs["down_proj"].ranges
        self.before = module.forward

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[L, h]`` to the same, by the experts ``[L, k]`` of every token and how much each of them counts."""
        if not self._active():
            return self.before(hidden_states, top_k_index, top_k_weights)
        experts, chosen, each = self.experts, top_k_index.reshape(-1), top_k_index.shape[-1]
        counts = torch.bincount(chosen, minlength=len(experts.down_proj)).tolist()
        found = hidden_states.new_empty(len(chosen), hidden_states.shape[-1])
        assert self._rows is not None and self._columns is not None
        ((start, stop),) = self._columns
        for expert, places in enumerate(chosen.argsort(stable=True).split(counts)):
            if len(places):
                up, up_bias = self._weight("gate_up_proj", expert)
                down, down_bias = self._weight("down_proj", expert)
                inner = experts._apply_gate(cut_product(hidden_states[places // each], up, up_bias, self._rows))
                out = product(inner, Weight(down[:, start:stop]))
                # Added once.
                found[places] = out if down_bias is None or self._comm.mesh.cp_rank else out + down_bias
        weighted = found * top_k_weights.reshape(-1, 1)
        out = weighted.unflatten(0, (-1, each)).sum(1).to(found.dtype)
        return summed(summands(self._comm, out, "cp", self._layer))

    def _weight(self, name: str, expert: int) -> tuple[Tensor, Tensor | None]:
        weight, bias = getattr(self.experts, name)[expert], getattr(self.experts, f"{name}_bias", None)
        return weight.t() if self.experts.is_transposed else weight, None if bias is None else bias[expert]


class LinearSlices:
    """Slices of a model's linears for the passes of which `current` says that they go by them, until `remove`.

    `pays` says whether to cut the projections around attention, which takes a message for each of the two places; the
    feed-forward and the output head are cut in any case, and `gains` says whether that pays. Every rank must make them.
    """

    def __init__(
        self, model: PreTrainedModel, linears: FewRowsLinears, comm: Communicator, *, current: Current, pays: Pays
    ):
        self._comm, self._current = comm, current
        self._forwards = {id(forward.linear): forward for forward in linears.forwards}
        self._experts: list[SlicedExperts] = []
        self._parts: dict[int, Part] = {}
        self._spared = dict.fromkeys(("inputs", "outputs", "feed_forward"), 0)
        self._inputs: list[tuple[int, list[Any]]] = []
        self._outputs: list[tuple[int, Any]] = []
        model_type = model.config.get_text_config().model_type
        self._cut_head(model.get_output_embeddings())
        try:
            layers, rows = decoder_layers(model)[1], row_parallel_names(model)
        except ValueError:
            # It is not known which layers it has.
            layers, rows = nn.ModuleList(), frozenset()
        for index, layer in enumerate(layers):
            self._cut_layer(index, layer, model_type, rows)
        # One answer for all layers and ranks: they meet in each.
        found = pays({kind: nbytes // max(len(layers), 1) for kind, nbytes in self._spared.items()})
        self.gains = found["feed_forward"]
        if found["inputs"]:
            for index, linears_in in self._inputs:
                group = GatheredRows(linears_in, comm, "cp", comm.mesh.cp_rank, comm.mesh.cp_size, index)
                self._install(linears_in, group)
        if found["outputs"]:
            for index, linear in self._outputs:
                columns = cut_columns(linear, comm.mesh.cp_rank, comm.mesh.cp_size)
                self._install([linear], SummedColumns(linear, columns, comm, index))

    def remove(self) -> None:
        """Give experts their own `forward` back. Linears forget their slices when `FewRowsLinears` goes."""
        for experts in self._experts:
            del experts.experts.forward

    def part(self, linear: nn.Linear) -> Part | None:
        """What this rank computes of a linear in such passes; None where that is all of it."""
        return self._parts.get(id(linear))

    def _active(self) -> bool:
        step = self._current()
        return step is not None and step.slices and not step.state.recomputing

    def _cut_layer(self, index: int, layer: nn.Module, model_type: str, rows: frozenset[str]) -> None:
        try:
            name, attention = find_attention(layer, model_type)
        except ValueError:
            # Attention of a kind that is not known: the layer is computed whole.
            return
        self._find_projections(index, attention)
        mixed = any(isinstance(module, nn.ModuleList) for module in layer.modules())
        rank, size = self._comm.mesh.cp_rank, self._comm.mesh.cp_size
        for inner, module in beside_attention(layer, name):
            try:
                specs = feed_forward_specs(module, model_type, rows, rank, size, holds_attention=not inner)
            except ValueError:
                continue
            if is_experts(module):
                self._cut_experts(index, module, specs)
            elif specs and not mixed:
                # Tokens are not sent to experts that are modules of their own.
                self._cut_linears(index, module, specs)

    def _find_projections(self, index: int, attention: nn.Module) -> None:
        children = {name: child for name, child in attention.named_children() if isinstance(child, nn.Linear)}
        inputs = [children[name] for name in (*SEPARATE, *FUSED) if name in children]
        # Latents are made in several steps.
        if LATENT not in children and self._known(inputs):
            self._inputs.append((index, inputs))
            self._spare("inputs", *(linear.weight for linear in inputs))
        output = [children[name] for name in OUTPUTS if name in children][:1]
        if self._known(output):
            self._outputs.append((index, output[0]))
            self._spare("outputs", output[0].weight)

    def _cut_linears(self, index: int, module: nn.Module, specs: dict[str, SliceSpec]) -> None:
        cut = {
            name.rpartition(".")[0]: spec
            for name, spec in specs.items()
            if name.endswith(".weight") and spec.ranges is not None
        }
        linears: list[Any] = [module.get_submodule(name) for name in cut]
        if not self._known(linears) or not all(map(at_blocks, linears, cut.values())):
            return
        self._spare("feed_forward", *(linear.weight for linear in linears))
        for linear, spec in zip(linears, cut.values(), strict=True):
            assert spec.ranges is not None
            part: Part = KeptRows(linear, spec.ranges)
            if spec.dim == 1:
                part = SummedColumns(linear, spec.ranges[0], self._comm, index)
            self._install([linear], part)

    def _cut_experts(self, index: int, module: nn.Module, specs: dict[str, SliceSpec]) -> None:
        if "forward" in vars(module) or unknown_experts(module):
            # They are computed in another way.
            return
        sliced: Any = SlicedExperts(module, specs, self._comm, index, self._active)
        module.forward = sliced
        self._experts.append(sliced)
        # A token goes to one of them at least.
        self._spare("feed_forward", sliced.experts.gate_up_proj[0], sliced.experts.down_proj[0])

    def _cut_head(self, head: Any) -> None:
        comm, mesh = self._comm, self._comm.mesh
        if self._known([head]) and head.weight.shape[0] >= mesh.world_size:
            # All ranks have it whole.
            self._install([head], GatheredRows([head], comm, "world", mesh.rank, mesh.world_size, None), last=True)

    def _known(self, linears: Sequence[Any]) -> bool:
        return bool(linears) and all(id(linear) in self._forwards for linear in linears)

    def _spare(self, kind: str, *weights: Tensor) -> None:
        nbytes = sum(weight.nbytes for weight in weights)
        self._spared[kind] += nbytes - nbytes // self._comm.mesh.cp_size

    def _install(self, linears: Sequence[Any], part: Part, *, last: bool = False) -> None:
        for linear in linears:
            self._parts[id(linear)] = part
            self._forwards[id(linear)].sliced = partial(self._sliced, linear, part, last)

    def _sliced(self, linear: nn.Linear, part: Any, last: bool, x: Tensor) -> Tensor | None:
        """One linear's part in passes that go by slices; None in others. The output head is the `last` linear."""
        step = self._current()
        if step is None or not self._active():
            return None
        out: Tensor | None = part.output(linear, x)
        if last:
            step.state.gathered_logits = out
        return out

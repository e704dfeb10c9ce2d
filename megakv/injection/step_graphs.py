"""A decoder's steps of one token of every sequence as CUDA graphs: one launch for what is hundreds of kernels.

A GPU takes less time for a small step than Python to start its kernels. What changes from step to step lies in device
memory at fixed places (`StepTables`), so one graph serves all steps of as many sequences, whatever caches they have.
"""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from megakv.attention.device_step import LayerKind, StepTables, attends_on_device
from megakv.distributed.comm import Communicator
from megakv.forward.pass_plan import Generation, PassPlan
from megakv.forward.runtime import Runtime
from megakv.injection.layer_kind import heard, plain_values, settings_of
from megakv.tracking.measurements import CAPTURED

logger = logging.getLogger(__name__)

INPUTS = ("input_ids", "inputs_embeds", "position_ids")
"""What a decoder is given in tensors; with any other it is left alone."""
CACHE = "past_key_values"
STEPS = ((8, 1), (64, 8), (256, 32))
"""Up to so many sequences, a graph is of a multiple of that."""
WAITED = "synchronizing CUDA operation"
"""What PyTorch warns of where the host waits for the device."""
OTHER_LENGTH, ALIKE = 10007, 1e-3
"""Tokens by which a cache is said to be longer, to see what follows from that, and how alike results are then."""
TRIES = 3
"""So many steps may show that before none is captured."""


def padded(sequences: int) -> int | None:
    """Of how many a graph is that takes so many sequences; None for more than any takes."""
    return next((-(-sequences // step) * step for most, step in STEPS if sequences <= most), None)


class StepGraphs:
    """Another `forward` for the decoder of a model, until `remove`.

    The first step shows how layers attend. Of as many sequences, the next one computes as graphs do, and the one behind
    it is captured, if steps are to be; tensor-parallel ranks do all of it together, as sums over them are captured too.
    Steps of other models are what they are without it, and so are captured ones that somebody listens to.
    """

    def __init__(self, model: PreTrainedModel, runtime: Runtime, *, capture: bool = True):
        self._decoder: Any = model.get_decoder()
        self._runtime, self._comm = runtime, runtime.comm
        self._generation: Callable[[], Generation | None] = lambda: None
        self._stale, self._heard, self._hooks, self._state = True, False, 0, list[Any]()
        self._kinds: dict[int, LayerKind] | None = {}
        self._steps: dict[int, StepGraph] = {}
        # Of all graphs, as they run one after the other.
        self._stream = torch.cuda.Stream(self._comm.mesh.device) if capture else None
        # One that hears of something by itself, in the midst of a call, would be waited for by the others.
        self._together = capture and self._comm.mesh.world_size > 1
        self._names = list(inspect.signature(self._decoder.forward).parameters)
        self._decoder.forward = self

    def remove(self) -> None:
        """See `StepKernel`."""
        if vars(self._decoder).get("forward") is self:
            del self._decoder.forward
        self._steps.clear()

    def takes(self, step: PassPlan) -> bool:
        """See `StepKernel`. What graphs were captured of is looked at before the first step of a call."""
        tokens = step.tokens
        plain = step.compression.idle and step.layout.wanted is None
        if len(tokens) != tokens.batch or not tokens.single or not plain:
            self._stale = True
            return False
        called = step.generation is not None and step.generation is self._generation()
        goes_on = called or (step.generation is None and step.cache.outlives)
        if self._stale or not goes_on or (self._hooks != RemovableHandle.next_id and not self._together):
            self._look()
        self._generation = (lambda: None) if step.generation is None else weakref.ref(step.generation)
        self._stale = False
        usual = torch.is_autocast_enabled("cuda") or torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        listening = self._heard and self._stream is not None
        return self._kinds is not None and padded(len(tokens)) is not None and not listening and not usual

    def _look(self) -> None:
        modules = list(self._decoder.modules())
        self._heard, self._hooks = heard(modules), RemovableHandle.next_id
        own = [own for each in modules for own in (*each._parameters.values(), *each._buffers.values())]
        state: list[Any] = [(id(each), type(each), *settings_of(each)) for each in modules]
        state += [(id(each), each.data_ptr()) for each in own if each is not None]
        state.append(plain_values(vars(getattr(self._decoder, "config", self._decoder))))
        # With its groups, those of a mesh that failed are over.
        state.append(self._comm.watch.failures.life)
        changed = state != self._state
        if self._together:
            told = self._comm.gather_objects((self._heard, changed))
            self._heard, changed = (any(each) for each in zip(*told, strict=True))
        if changed:
            self._state, self._kinds = state, {}
            self._steps.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the decoder returns."""
        step = self._runtime.current
        if step is None or step.state.kernel is not self or self._kinds is None:
            return self._forward(*args, **kwargs)
        kwargs |= zip(self._names, args, strict=False)
        given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        if not {*given} <= {*INPUTS}:
            return self._forward(**kwargs)
        if not self._kinds:
            return self._shown(step, kwargs)
        size = padded(len(step.tokens))
        assert size is not None
        if size not in self._steps:
            self._steps[size] = StepGraph(self._forward, self._kinds, size, self._comm, self._stream)
        graph = self._steps[size]
        if not graph.fits(given, kwargs) or not graph.tables.take(step.cache, step.tokens, step.rank):
            return self._forward(**kwargs)
        pool = next((other.pool for other in self._steps.values() if other.captured), None)
        output = graph.run(step, given, kwargs, pool)
        for layer, kind in self._kinds.items():
            self._runtime.stepped(step, layer, kind.scoring.window, CAPTURED if graph.captured else None)
        return output

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._decoder).forward(self._decoder, *args, **kwargs)

    def _shown(self, step: PassPlan, kwargs: dict[str, Any]) -> Any:
        """An ordinary step, in which layers show how they attend."""
        step.state.kinds = {}
        output = self._forward(**kwargs)
        known = step.state.kinds and isinstance(output, ModelOutput) and CACHE in output
        known = known and all(kind is not None for kind in step.state.kinds.values())
        known = _agreed(self._comm, bool(known)) if self._together else known
        self._kinds = {layer: kind for layer, kind in step.state.kinds.items() if kind is not None} if known else None
        return output


class StepGraph:
    """Steps of up to `size` sequences: computed as graphs are at first, then replayed. Without a stream to capture in,
    they are only computed, and of no more sequences than there are.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        kinds: dict[int, LayerKind],
        size: int,
        comm: Communicator,
        stream: torch.cuda.Stream | None,
    ):
        self._forward, self._size, self._comm, self._stream = forward, size, comm, stream
        self.tables = StepTables(kinds, size, comm.mesh.device)
        self._inputs: dict[str, Tensor] = {}
        self._others: dict[str, Any] = {}
        self._graph: Any = None
        self._output: Any = None
        self._sent: list[tuple[str, int | None, int]] = []
        self._warm, self._tries = False, 0 if stream is None else TRIES

    @property
    def captured(self) -> bool:
        """Whether steps are replayed."""
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """The memory that it computes in, for others to compute in, too."""
        return self._graph.pool()

    def fits(self, given: dict[str, Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether a decoder is called as it was for the first time, but for what its tensors hold, and its cache."""
        others = {name: value for name, value in kwargs.items() if name not in given and name != CACHE}
        if not self._inputs:
            shapes = {name: (1, self._size, *tensor.shape[2:]) for name, tensor in given.items()}
            self._inputs = {name: given[name].new_zeros(shape) for name, shape in shapes.items()}
            self._others = others
        same = {*given} == {*self._inputs} and {*others} == {*self._others}
        same = same and all(_same(value, self._others[name]) for name, value in others.items())
        return same and all(
            (tensor.dtype, tensor.shape[2:]) == (self._inputs[name].dtype, self._inputs[name].shape[2:])
            and tensor.shape[0] == 1
            for name, tensor in given.items()
        )

    def run(self, step: PassPlan, given: dict[str, Tensor], kwargs: dict[str, Any], pool: Any) -> Any:
        """The decoder's output for the sequences of a step, whose rows `tables` has taken."""
        rows, cache = len(step.tokens), kwargs.get(CACHE)
        if not self._tries:
            return self._computed(step, {**kwargs, **given}, cache)
        for name, tensor in given.items():
            self._inputs[name][:, :rows] = tensor
        inputs = {**kwargs, **self._inputs}
        if self._graph is None and self._warm:
            self._capture(step, inputs, pool)
        if self._graph is None:
            output = self._watched(step, inputs)
        else:
            self._graph.replay()
            for sent in self._sent:
                self._comm.ledger.sent(*sent)
            output = self._output
        cut = {name: value[:, :rows] if isinstance(value, Tensor) else value for name, value in output.items()}
        return type(output)(**{**cut, CACHE: cache})

    def _computed(self, step: PassPlan, inputs: dict[str, Any], cache: Any = None) -> Any:
        """With that cache in the output: in one that a graph holds there must be none."""
        step.state.device_step = self.tables
        try:
            output = self._forward(**inputs)
        finally:
            step.state.device_step = None
        return type(output)(**{**output, CACHE: cache})

    def _watched(self, step: PassPlan, inputs: dict[str, Any]) -> Any:
        """The same, to see whether the host waits for the device in it: then a capture would fail, and leave things
        behind.
        """
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                output = self._computed(step, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        waited = [each for each in caught if WAITED in str(each.message)]
        for each in caught:
            if each not in waited:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        self._warm = _agreed(self._comm, not waited)
        if not self._warm:
            # Perhaps that was another thread: there is another try.
            where = f"{waited[0].filename}:{waited[0].lineno}" if waited else "on another rank"
            self._failed(f"the host waits for the device in it ({where})")
        elif not _agreed(self._comm, not self._follows_length(step, inputs, output)):
            self._tries = 1
            self._failed("it goes by the number of cached tokens, which would stay as it was")
        return output

    def _follows_length(self, step: PassPlan, inputs: dict[str, Any], output: Any) -> bool:
        """Whether Python makes something of how many tokens are cached, beside masks: the same step with another
        number gives other results.
        """
        cache = inputs[CACHE]
        cache.length += OTHER_LENGTH
        try:
            other = self._computed(step, inputs)
        finally:
            cache.length -= OTHER_LENGTH
        pairs = ((each, other[name]) for name, each in output.items() if isinstance(each, Tensor))
        # Some sums of experts are not the same bits each time.
        return any(bool((one - two).norm() > ALIKE * one.norm()) for one, two in pairs)

    def _capture(self, step: PassPlan, inputs: dict[str, Any], pool: Any) -> None:
        graph, index = torch.cuda.CUDAGraph(), self._comm.mesh.device.index or 0
        generator, reason = torch.cuda.default_generators[index], ""
        # A capture that fails leaves the device's random numbers to itself.
        random_state = generator.clone_state()
        try:
            # Other threads, as those of links to host memory and NCCL's, go on with what they do.
            graphed = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
            with self._comm.ledger.capturing() as self._sent, graphed:
                self._output = self._computed(step, inputs)
        except RuntimeError as error:
            generator.graphsafe_set_state(random_state)
            reason = str(error).partition("\n")[0]
        if _agreed(self._comm, not reason):
            self._graph = graph
            return
        self._output, self._tries = None, 1
        self._failed(reason or "another rank could not")

    def _failed(self, reason: str) -> None:
        self._tries -= 1
        if not self._tries:
            logger.warning("steps of %d sequences are not captured in a CUDA graph: %s", self._size, reason)


def _agreed(comm: Communicator, holds: bool) -> bool:
    """Whether something holds on all ranks: sums over them are in all their graphs, or in none."""
    return holds if comm.mesh.world_size == 1 else all(comm.gather_objects(holds))


def _same(value: Any, other: Any) -> bool:
    """Whether they are one, or equal numbers or texts."""
    return value is other or (
        isinstance(value, bool | int | float | str) and type(value) is type(other) and value == other
    )


def step_graphs(model: PreTrainedModel, runtime: Runtime, *, capture: bool = True) -> StepGraphs | None:
    """Those of an engine whose caches lie on the device, of which none is captured if not to `capture`.

    None where there are none: on processors, where sequences are spread over ranks, caches compressed or heads shared,
    without the kernels, and where the decoder's `forward` is somebody's own.
    """
    mesh = runtime.comm.mesh
    alone = mesh.cp_size == 1 and runtime.compressor is None and runtime.replicas is None
    own = "forward" in vars(model.get_decoder())
    if mesh.device.type != "cuda" or not alone or own or not attends_on_device():
        return None
    return StepGraphs(model, runtime, capture=capture)

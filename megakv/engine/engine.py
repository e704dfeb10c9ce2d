"""The engine: DeepSpeed's inference engine, with tokens sharded over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megakv.base.device import on_device, without_autograd
from megakv.base.errors import MegaKVError
from megakv.cache.cache import ShardedCache
from megakv.distributed.agreement import Agreement
from megakv.engine.assisted import AssistedModel
from megakv.engine.candidates import check_candidates, proposes
from megakv.engine.config import MegaKVConfig
from megakv.engine.generation import (
    LengthLimits,
    candidates_beyond,
    check_options,
    given_option,
    new_token_limit,
    pad_left,
)
from megakv.engine.generation_call import TokenClock, agreed_call
from megakv.engine.joint_pass import ServedEngine, Tokens, joint_input, last_tokens, own_input
from megakv.engine.loading import LoadedModel
from megakv.engine.record import RunRecord
from megakv.engine.session import Session
from megakv.engine.session_files import HeadsHere, heads_of
from megakv.fairkv.observation import Turn
from megakv.forward.pass_plan import Generation
from megakv.forward.runtime import Runtime
from megakv.injection.hooks import ForwardHooks
from megakv.injection.ownership import attach, detach
from megakv.injection.rotation import KeyRotation
from megakv.runahead.source import PartitionSource
from megakv.tracking.machine import reset_peak_memory
from megakv.tracking.measurements import CandidateCounts
from megakv.tracking.report import RunReport
from megakv.tracking.tracker import Tracker
from megakv.weights.fingerprint import check_same_config, check_same_weights

if TYPE_CHECKING:
    from megakv.fairkv.mapping import HeadMapping


class MegaKVEngine(ServedEngine):
    """A Hugging Face causal language model over a context-parallel x tensor-parallel mesh.

    Made by `init_inference`. Every rank must make the same calls with the same arguments; where ranks could differ
    (random state, stop decisions), rank 0 decides.

    `name` is what the model is called in reports, `mapping` what its KV heads were placed by. `owned` gives back, when
    the engine is destroyed or cannot be made, what was made for it; what it makes itself comes on top.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: MegaKVConfig,
        runtime: Runtime,
        name: str,
        mapping: HeadMapping | None,
        owned: ExitStack,
    ):
        model = loaded.module
        # Weights are sharded and typed already: DeepSpeed must not make groups of its own, nor shard again.
        plain = config.model_copy(update={"dtype": model.dtype, "enable_cuda_graph": False, "injection_policy": None})
        plain.tensor_parallel = config.tensor_parallel.model_copy(update={"tp_size": 1})
        super().__init__(model, plain)
        # DeepSpeed hides our method behind its own, which refuses beams and long prompts.
        self.__dict__.pop("generate", None)
        comm = runtime.comm
        self._config, self._runtime, self._comm = config, runtime, comm
        self._name, self._mapping = name, mapping
        self._weights = loaded.form, loaded.bytes_by_type
        self.mp_group = comm.mesh.group("tp")
        self.agreement = Agreement(comm)
        check_same_config(model, comm)
        self.weights_digest = check_same_weights(loaded.contents, comm)
        self.heads_here = HeadsHere(heads_of(loaded.head_map), comm.mesh.tp_rank, runtime.replicas)
        owned.callback(detach, model)
        layers = attach(model, runtime.attend)
        runtime.rotate = rotation = KeyRotation(model)
        if runtime.compressor is not None and runtime.compressor.moves:
            rotation.check()
        self._offloader = None
        if config.megakv.offload.enabled:
            from megakv.offload.assembly import make_offloader

            self._offloader = make_offloader(model, config.megakv.offload, self._runtime, layers, loaded.layer_weights)
        if self._offloader is not None:
            owned.callback(self._offloader.close)
        new_cache = runtime.new_cache if self._offloader is None else self._offloader.new_cache
        here = loaded.layer_weights is None
        in_memory = self._offloader is None
        graphs = config.enable_cuda_graph is not False
        own_cache = partial(new_cache, layers)
        hooks = ForwardHooks(model, runtime, own_cache, here=here, in_memory=in_memory, graphs=graphs)
        owned.callback(hooks.remove)
        runtime.planner.traits = hooks.traits
        self._limits = LengthLimits(model, config)
        comm.ledger.timeline = config.megakv.tracking.records_events
        settings = config.model_dump(mode="json", by_alias=True, fallback=str)
        with self.agreement.call():
            self.tracker = self.agreement.together(lambda: Tracker(config.megakv.tracking, settings, comm.mesh.rank))
        owned.callback(self.tracker.close)
        self._record = RunRecord(TokenClock(comm.ledger.now))
        comm.watch.install()
        model.eval()
        self._hooks = hooks
        self._owned = owned.pop_all()

    def __enter__(self) -> MegaKVEngine:
        return self

    def __exit__(self, *ending: object) -> None:
        self.destroy()

    def _convert_to_dtype(self, config: Any) -> None:
        """Weights are loaded in their type; converting the module would also round its rotary frequencies."""

    # Use

    @without_autograd
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward over all ranks; an argument that is not supported is a ValueError that names it.

        Arguments are as the transformers model takes them: ``input_ids`` ``[B, S]`` with optional 2-D
        ``attention_mask`` (left or right padding), ``position_ids``, ``past_key_values`` of an earlier call,
        ``use_cache``, ``logits_to_keep``. Returned is a `ModelOutput` with ``logits`` ``[B, S, V]`` in input order on
        every rank (zero at padding), or the last ``logits_to_keep`` of them, or those of the columns in it, in its
        order.
        """
        self.check_open()
        ids = kwargs.get("input_ids", args[0] if args else None)
        with self.agreement.call(), on_device(self.mesh.device):
            if ids is not None:
                given = (ids, kwargs.get("attention_mask", args[1] if len(args) > 1 else None))
                self._check_prompt(*given, kwargs.get("past_key_values"), {"max_new_tokens": 0})
            return self.module(*args, **kwargs)

    @without_autograd
    def generate(self, inputs: Tensor | None = None, **options: Any) -> Any:
        """transformers' own `generate`, over all ranks; returns the same tokens, or `ModelOutput`, on every rank.

        The prompt is ``[B, S]``, also as ``input_ids=``; options are all that `transformers.GenerationMixin.generate`
        takes, but what needs hidden states. With ``prompt_lookup_num_tokens`` or ``assistant_model`` a step checks
        several tokens of one sequence; an assistant, a plain model, is given on every rank and run on rank 0.

        Raises
        ------
        ValueError
            If an option is not supported, by its name, or the prompt is empty or too long.
        MegaKVError
            If a peer is lost.
        """
        ids = inputs if inputs is not None else options.pop("input_ids", None)
        mask = options.get("attention_mask")
        if not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape:
            return self.generate_into(self.new_cache(), ids, **options)
        aligned, options["attention_mask"] = pad_left(ids, mask)
        output = self.generate_into(self.new_cache(), aligned, **options)
        if aligned is not ids:
            sequences = output if isinstance(output, Tensor) else output.sequences
            sequences[:, : ids.shape[1]] = ids.repeat_interleave(len(sequences) // len(ids), dim=0)
        return output

    _generate = generate

    @without_autograd
    def generate_into(self, cache: ShardedCache, ids: Tensor | None, **options: Any) -> Any:
        """`generate` on top of what a cache holds; `ids` are all tokens, cached ones included."""
        self.check_open()
        with self.agreement.call(), on_device(self.mesh.device):
            check_options(self.module, options)
            mask, embeds = options.get("attention_mask"), options.get("inputs_embeds")
            if ids is not None:
                self._check_prompt(ids, mask, None, options)
                if cache.length >= ids.shape[1]:
                    raise ValueError(f"the cache holds {cache.length} tokens already and input_ids adds none")
                if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] != ids.shape[1]:
                    raise ValueError(f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}")
            if assisted := proposes(self.module, options):
                check_candidates(self.module, self._config, options, ids)
            width, before = 0 if ids is None else ids.shape[1], cache.length
            new_plans = None
            if self._offloader is not None:
                # Beams share most of their tokens.
                beams = (given_option("num_beams", options, self.module) or 1) > 1
                limit = 0 if beams else new_token_limit(self.module, options, width)
                limit += candidates_beyond(self.module, options)
                new_plans = partial(self._offloader.new_run, limit, width)
            self._runtime.planner.choice = None
            # transformers caches after embeddings in any case.
            use_cache = embeds is not None or given_option("use_cache", options, self.module) is not False
            # Beam search reorders whatever goes by that name, None too.
            held = {"past_key_values": cache} if use_cache else {}
            with agreed_call(self.module, ids, options, self._comm, self.agreement, new_plans) as (prepared, rank_zero):
                reset_peak_memory(self.mesh.device)
                self._record = RunRecord(rank_zero.clock)
                if use_cache:
                    # Some models drop the cache on the way.
                    prompt = Turn(cache.length, width if embeds is None else embeds.shape[1])
                    given = ids if embeds is None else embeds
                    self._runtime.generation = Generation(cache, prompt, None if given is None else len(given))
                try:
                    model: Any = self.module
                    if assisted and self._runtime.generation is not None:
                        model = AssistedModel(model, self._runtime.generation, rank_zero, self.agreement)
                    output = model.generate(ids, **held, **prepared)
                finally:
                    self._runtime.generation = None
            self._record.finish(ids, mask, before, cache, output, self._runtime.planner.choice)
            if (checked := rank_zero.candidates) is not None:
                self._record.candidates = CandidateCounts(checked.steps, checked.proposed, checked.accepted)
            if self._offloader is not None:
                self._record.offload = [step.report() for step in self._offloader.steps]
                self._record.disk_io = self._offloader.disk_io
                self._record.schedule = self._offloader.schedule.why
            return output

    @without_autograd
    def extend(
        self,
        caches: Sequence[ShardedCache],
        tokens: Sequence[Tokens],
        *,
        turn: Turn | None = None,
        candidates: Sequence[int] = (),
    ) -> Tensor:
        """One pass over new tokens of several sequences: ``[B, V]`` logits behind the last one of each, on every rank.

        Where the last so many tokens of each are `candidates`, logits ``[R, V]`` are also those behind the token before
        them, and behind each: sequence by sequence. `ShardedCache.cut_back` takes back those that were wrong.

        Each sequence goes on in a cache of its own (`new_cache`), of whatever length, by one token or more; the logits
        are those of `generate` on it alone. If the pass fails, every cache is as before.

        A cache is compressed in passes of its own, which are given the `turn` that its tokens belong to: when one comes
        to its end, to the budget. Joint passes leave all caches as they are. Unless the engine `joins` caches, every
        pass is of one.

        A ValueError where settings cannot be served, or caches and tokens are not such.
        """
        self.check_serves()
        with self.agreement.call(), on_device(self.mesh.device):
            vocabulary, joint = self.module.config.get_text_config().vocab_size, self.joins and turn is None
            if joint:
                inputs = joint_input(caches, tokens, self.new_cache(), vocabulary)
            else:
                inputs = own_input(caches, tokens, vocabulary, turn=turn is not None)
            if candidates:
                inputs["logits_to_keep"] = last_tokens(tokens, candidates)
            lengths = (cache.length + len(own) for cache, own in zip(caches, tokens, strict=True))
            self._limits.check(max(lengths), {"max_new_tokens": 0})
            inputs["input_ids"] = inputs["input_ids"].to(self.mesh.device)
            if self._offloader is not None:
                self._offloader.take_up(caches[0])
            if turn is not None or candidates:
                cache, prompts = inputs["past_key_values"], None if turn is None else 1
                self._runtime.generation = Generation(cache, turn, prompts, proposed=sum(candidates))
            try:
                logits: Tensor = self.module(**inputs).logits
                logits = logits[0] if candidates else logits[:, 0]
            finally:
                self._runtime.generation = None
            if not joint:
                # Of joint passes that is part.
                self._comm.confirm()
            return logits

    def session(self) -> Session:
        """A conversation whose keys and values stay sharded between turns."""
        return Session(self, self.new_cache())

    def restore_session(self, folder: str | Path) -> Session:
        """Continue a session that `Session.save` wrote to a folder that every rank reaches.

        The context-parallel degree may be another one. A MegaKVError if a file is missing or broken, or the session is
        of another model or type, or with FP8 weights of another tensor-parallel degree.
        """
        with self.agreement.call():
            return Session.restore(self, self.new_cache(), Path(folder))

    def report(self) -> RunReport:
        """What the last `generate` did on every rank. Every rank must call it."""
        self.check_open()
        with self.agreement.call():
            rates = () if self._hooks is None else self._hooks.products.rates
            return self._record.run_report(
                self._comm, self._config, self._name, self._runtime.dtype, self._mapping, rates, self._weights
            )

    @without_autograd
    def destroy(self) -> None:
        """Give back hooks, the model's config, signal handlers and groups; the end of ``with engine:`` does it too.

        The engine and its sessions cannot be used afterwards. A model that was given as a module is a plain one again,
        unless tensor parallelism or FP8 have changed its weights. Not within a call of the engine, as in a streamer.
        """
        if getattr(self, "_hooks", None) is not None:
            if self.agreement.under_way:
                raise MegaKVError("the engine cannot be destroyed while a call of it is under way; do it afterwards")
            self._hooks = self.mp_group = None
            self._owned.close()

    @property
    def partitions(self) -> PartitionSource:
        """How prompts are cut for ``"prefill": "runahead"``."""
        return self._runtime.planner.partitions

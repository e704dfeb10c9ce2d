"""What calling costs: passes and generations of models so small that nothing else takes time.

Where the processor that calls operations is the one that computes, what happens between the large ones counts: small
operations of every layer, what transformers does around a pass and a step, and what MegaKV adds to each. Before each
matrix product of a layer here, weights of usual size are read: behind these, as in a decoding step, neither code nor
small tensors are in a cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import CallTimes, HardwareProfile
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.stopwatch import Alone, Case, Cases, Pool
from megakv.distributed.agreement import Agreement
from megakv.engine.generation_call import agreed_call
from megakv.forward.config import ContextParallelConfig
from megakv.forward.pass_plan import Generation
from megakv.forward.planning import PassPlanner
from megakv.forward.runtime import Runtime
from megakv.injection.hooks import ForwardHooks
from megakv.injection.ownership import attach

FEW, MANY = 1, 3
"""Layers of the models."""
ONCE, OFTEN = 1, 3
"""Tokens of the generations, by the models of few layers."""
READ = (1024, 2048)
"""Weights that are read before each product."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    # Whatever the tokens are, a generation goes on.
    "eos_token_id": None,
    "pad_token_id": 0,
}


class _Plain:
    """A small model as transformers runs it."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)

    @torch.no_grad()
    def step(self) -> None:
        self.model(self._ids, use_cache=True)

    def generate(self, tokens: int) -> None:
        options = {"attention_mask": torch.ones_like(self._ids), "max_new_tokens": tokens, "do_sample": False}
        self._generate(options)

    @torch.no_grad()
    def _generate(self, options: dict[str, Any]) -> None:
        model: Any = self.model
        model.generate(self._ids, **options)


class _Own(_Plain):
    """A small model under MegaKV, on a rank that is alone."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self._comm = Alone(model.device)
        self._agreement = Agreement(self._comm)
        heads = {"heads": SIZES["num_attention_heads"], "kv_heads": SIZES["num_key_value_heads"]}
        planner = PassPlanner(comm=self._comm, config=ContextParallelConfig(), **heads)
        self._runtime = Runtime(self._comm, planner, dtype=model.dtype)
        self._new_cache = partial(self._runtime.new_cache, attach(model, self._runtime.attend))
        planner.traits = ForwardHooks(model, self._runtime, self._new_cache).traits

    @torch.no_grad()
    def _generate(self, options: dict[str, Any]) -> None:
        # As an engine does it.
        with agreed_call(self.model, self._ids, options, self._comm, self._agreement) as (prepared, _):
            cache = self._new_cache()
            self._runtime.generation = Generation(cache)
            super()._generate({**prepared, "past_key_values": cache})
            self._runtime.generation = None


class SmallModels:
    def __init__(self, cases: Cases, pool: Pool):
        self._dtype = pool.dtype
        x_TI = pool.take(1, READ[1]).clone()

        def read(*_: Any) -> None:
            """Weights that no cache holds, as a product of one token does."""
            torch.nn.functional.linear(x_TI, pool.take(*READ))

        def reading(times: int) -> None:
            for _ in range(times):
                read()

        self.passes: list[dict[int, Case]] = []
        """By number of layers, of transformers and of MegaKV; `reading` is what of each is no call."""
        self.generations: list[dict[int, Case]] = []
        """Of few layers, by number of tokens."""
        self.reading: dict[int, Case] = {}
        for make in (_Plain, _Own):
            models = {layers: make(self._model(layers)) for layers in (FEW, MANY)}
            for layers, small in models.items():
                products = [part for part in small.model.model.layers.modules() if isinstance(part, nn.Linear)]
                for product in products:
                    product.register_forward_pre_hook(read)
                self.reading[layers] = self.reading.get(layers) or cases.add(partial(reading, len(products)))
            self.passes.append({layers: cases.add(small.step) for layers, small in models.items()})
            generate = models[FEW].generate
            self.generations.append({tokens: cases.add(partial(generate, tokens)) for tokens in (ONCE, OFTEN)})

    def fields(self, profile: HardwareProfile) -> dict[str, Any]:
        """Fields of `HardwareProfile`, from one that lacks them: issue_s, pass_s, step_s, begin_s, added."""
        plain, own = map(self._calls, self.passes, self.generations)
        shape = ModelShape.from_config(self._config(FEW), dtype=self._dtype)
        tokens = TokenTimes(profile, shape)
        attention = LayerTimes(profile, shape.attention(), Workload((1,), (0,), 1)).predict("single").seconds
        return {
            "issue_s": max(0.0, plain.layer_s - attention - tokens.layer(0, 1)),
            "pass_s": max(0.0, plain.pass_s - tokens.head(1)),
            "step_s": plain.step_s,
            "begin_s": plain.begin_s,
            "added": CallTimes(**{name: max(0.0, value - getattr(plain, name)) for name, value in own}),
        }

    def _calls(self, passes: dict[int, Case], generations: dict[int, Case]) -> CallTimes:
        """A layer, a pass beside its layers, a step beside its pass, a generation beside its steps."""
        few, many = (passes[layers].seconds - self.reading[layers].seconds for layers in (FEW, MANY))
        once, often, whole = generations[ONCE].seconds, generations[OFTEN].seconds, passes[FEW].seconds
        layer = max(0.0, many - few) / (MANY - FEW)
        step = max(0.0, (often - once) / (OFTEN - ONCE) - whole)
        rest, begin = max(0.0, few - FEW * layer), max(0.0, once - whole - step)
        return CallTimes(layer_s=layer, pass_s=rest, step_s=step, begin_s=begin)

    @staticmethod
    def _config(layers: int) -> LlamaConfig:
        return LlamaConfig(**SIZES, num_hidden_layers=layers)

    def _model(self, layers: int) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_config(self._config(layers), dtype=self._dtype, attn_implementation="sdpa")
        return model.eval().requires_grad_(False)

"""What calling costs: passes and generations of models so small that nothing else takes time.

Where the processor that calls operations is the one that computes, what happens between the large ones counts: small
operations of every layer, what transformers does around a pass and a step, and what MegaKV adds to each. Before each
matrix product of a layer here, weights of usual size are read: behind these, as in a decoding step, neither code nor
small tensors are in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from megakv.config import ContextParallelConfig
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import CallTimes, HardwareProfile
from megakv.costmodel.measure.stopwatch import Alone, Cases, Pool, Times
from megakv.costmodel.shape import ModelShape
from megakv.distributed.agreement import Agreement
from megakv.forward_pass import Generation
from megakv.generation_call import agreed_call
from megakv.injection.hooks import ForwardHooks
from megakv.injection.ownership import attach
from megakv.planning import PassPlanner
from megakv.runtime import Runtime

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
PLAIN, OWN, READING = "small model", "small model of MegaKV", "reading"


class _Reading:
    """Reads weights that no cache holds, as a product of one token does."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._x_TI = pool.take(1, READ[1]).clone()

    def __call__(self, *hooked: Any) -> None:
        torch.nn.functional.linear(self._x_TI, self._pool.take(*READ))

    def before_products(self, model: PreTrainedModel) -> int:
        products = [each for layer in model.model.layers for each in layer.modules() if isinstance(each, nn.Linear)]
        for product in products:
            product.register_forward_pre_hook(self)
        return len(products)

    def alone(self, times: int) -> None:
        for _ in range(times):
            self()


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
        self._hooks = ForwardHooks(model, self._runtime, attach(model, self._runtime))

    @torch.no_grad()
    def _generate(self, options: dict[str, Any]) -> None:
        # As an engine does it.
        with agreed_call(self.model, self._ids, options, self._comm, self._agreement) as (prepared, _):
            cache = self._hooks.new_cache()
            self._runtime.generation = Generation(cache)
            super()._generate({**prepared, "past_key_values": cache})
            self._runtime.generation = None


@dataclass(frozen=True)
class _Calls:
    """Seconds of a layer, of a pass beside its layers, of a step beside its pass, of a generation beside its steps."""

    layer: float
    rest: float
    step: float
    begin: float

    @classmethod
    def of(cls, times: Times, kind: str) -> _Calls:
        few, many = (times[kind, "pass", layers] - times[READING, layers] for layers in (FEW, MANY))
        once, often = (times[kind, "tokens", tokens] for tokens in (ONCE, OFTEN))
        layer = max(0.0, many - few) / (MANY - FEW)
        whole = times[kind, "pass", FEW]
        step = max(0.0, (often - once) / (OFTEN - ONCE) - whole)
        return cls(layer, max(0.0, few - FEW * layer), step, max(0.0, once - whole - step))


class SmallModelCases:
    def __init__(self, pool: Pool):
        self._pool = pool

    def add(self, cases: Cases) -> None:
        reading = _Reading(self._pool)
        for kind, make in ((PLAIN, _Plain), (OWN, _Own)):
            for layers in (FEW, MANY):
                small = make(self._model(layers))
                products = reading.before_products(small.model)
                cases.add(kind, "pass", layers, call=small.step)
                if kind == PLAIN:
                    cases.add(READING, layers, call=partial(reading.alone, products))
                for tokens in (ONCE, OFTEN) if layers == FEW else ():
                    cases.add(kind, "tokens", tokens, call=partial(small.generate, tokens))

    def fields(self, profile: HardwareProfile, times: Times) -> dict[str, Any]:
        """Fields of `HardwareProfile`, from one that lacks them: issue_s, pass_s, step_s, begin_s, added."""
        plain, own = _Calls.of(times, PLAIN), _Calls.of(times, OWN)
        shape = ModelShape.from_config(self._config(FEW), dtype=self._pool.dtype)
        tokens = TokenTimes(profile, shape)
        attention = LayerTimes(profile, shape.attention(), Workload((1,), (0,), 1)).predict("single").seconds
        return {
            "issue_s": max(0.0, plain.layer - attention - tokens.layer(0, 1)),
            "pass_s": max(0.0, plain.rest - tokens.head(1)),
            "step_s": plain.step,
            "begin_s": plain.begin,
            "added": CallTimes(
                layer_s=max(0.0, own.layer - plain.layer),
                pass_s=max(0.0, own.rest - plain.rest),
                step_s=max(0.0, own.step - plain.step),
                begin_s=max(0.0, own.begin - plain.begin),
            ),
        }

    @staticmethod
    def _config(layers: int) -> LlamaConfig:
        return LlamaConfig(**SIZES, num_hidden_layers=layers)

    def _model(self, layers: int) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_config(
            self._config(layers), dtype=self._pool.dtype, attn_implementation="sdpa"
        )
        return model.eval().requires_grad_(False)

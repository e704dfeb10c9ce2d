"""transformers, DeepSpeed and MegaKV: one `generate`, three engines around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from turns import begin, serve

SETTINGS = begin()

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Tokens(BaseStreamer):
    """Hands on every token but those of the prompt, which come first."""

    def __init__(self, came: Callable[[int], None]):
        self._came = came
        self._prompt = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self._came(int(value))
        self._prompt = False

    def end(self) -> None:
        pass


def deepspeed_engine(model: Any) -> tuple[Any, str]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    engine = deepspeed.init_inference(
        model,
        dtype=DTYPES[SETTINGS["dtype"]],
        tensor_parallel={"tp_size": SETTINGS["ranks"]},
        replace_with_kernel_inject=False,
        max_out_tokens=SETTINGS["positions"],
    )
    return engine, deepspeed.__version__


def megakv_engine(model: Any, stack: ExitStack) -> tuple[Any, str]:
    import megakv

    config = {"dtype": SETTINGS["dtype"], "megakv": {"context_parallel": {"size": SETTINGS["ranks"]}}}
    stack.callback(megakv.stop_distributed)
    engine = stack.enter_context(megakv.init_inference(model, config=config))
    without_stop(engine.module)
    return engine, megakv.__version__


def without_stop(model: Any) -> None:
    """Let the number of tokens be the benchmark's, whatever they are."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0


def main() -> None:
    torch.set_num_threads(SETTINGS["threads"])
    model: Any = SETTINGS.get("weights")
    if model is None:
        dtype = DTYPES[SETTINGS["dtype"]]
        model = transformers.AutoModelForCausalLM.from_pretrained(SETTINGS["model"], dtype=dtype).eval()
        without_stop(model)
    with ExitStack() as stack:
        engine, version = model, transformers.__version__
        if SETTINGS["library"] == "deepspeed":
            engine, version = deepspeed_engine(model)
        elif SETTINGS["library"] == "megakv":
            engine, version = megakv_engine(model, stack)

        def generate(prompt: list[int], new_tokens: int, came: Callable[[int], None]) -> None:
            options = {"max_new_tokens": new_tokens, "do_sample": False, "streamer": Tokens(came)}
            with torch.inference_mode():
                engine.generate(torch.tensor([prompt]), **options)

        stored = sum(weight.nbytes for weight in engine.module.parameters()) if engine is not model else None
        serve(SETTINGS, {"version": version, "torch": torch.__version__, "weight_bytes": stored}, generate)


if __name__ == "__main__":
    main()

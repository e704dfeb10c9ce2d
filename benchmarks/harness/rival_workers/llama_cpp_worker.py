"""llama.cpp's server in this process (xllamacpp), without its caches of prompts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from turns import begin, serve

SETTINGS = begin()

import xllamacpp  # noqa: E402


def main() -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = SETTINGS["weights"]
    parameters.n_ctx = SETTINGS["positions"]
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = SETTINGS["threads"]
    parameters.cache_prompt = False
    parameters.cache_ram_mib = 0
    parameters.fit_params = False
    parameters.verbosity = 1
    if SETTINGS["dtype"] == "fp32":
        # Keys and values would be fp16.
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(parameters)

    def generate(prompt: list[int], new_tokens: int, came: Callable[[int], None]) -> None:
        def chunk(found: dict[str, Any]) -> None:
            if "error" in found:
                raise RuntimeError(str(found["error"]))
            for choice in found["choices"]:
                for token in (choice["logprobs"] or {}).get("content", ()):
                    came(token["id"])

        # Only chunks with probabilities name their tokens.
        options = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True, "logprobs": 1}
        server.handle_completions({"prompt": prompt, "max_tokens": new_tokens, **options}, chunk)

    system = str(xllamacpp.get_system_info())
    serve(SETTINGS, {"version": version("xllamacpp"), "system": system}, generate)


if __name__ == "__main__":
    main()

"""llama.cpp as it was built for this machine (llama-cpp-python), in this process, without its caches of prompts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from turns import begin, serve

SETTINGS = begin()

import llama_cpp  # noqa: E402


def main() -> None:
    threads = {"n_threads": SETTINGS["threads"], "n_threads_batch": SETTINGS["threads"]}
    sizes = {"n_ctx": SETTINGS["positions"], "n_batch": 2048, "n_ubatch": 512}
    model = llama_cpp.Llama(SETTINGS["weights"], **sizes, **threads, verbose=False)

    def generate(prompt: list[int], new_tokens: int, came: Callable[[int], None]) -> None:
        model.reset()
        for count, token in enumerate(model.generate(prompt, temp=0.0, repeat_penalty=1.0), 1):
            came(token)
            if count == new_tokens:
                return

    system = llama_cpp.llama_print_system_info().decode()
    serve(SETTINGS, {"version": version("llama-cpp-python"), "system": system}, generate)


if __name__ == "__main__":
    main()

"""vLLM's engine in this process, stepped by hand, without its cache of prefixes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

from turns import begin, serve

SETTINGS = begin()
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, SETTINGS["cores"][0])),
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

import torch  # noqa: E402
import vllm  # noqa: E402

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    engine = vllm.LLM(
        SETTINGS["model"],
        dtype=DTYPES[SETTINGS["dtype"]],
        max_model_len=SETTINGS["positions"],
        max_num_seqs=1,
        enable_prefix_caching=False,
    ).llm_engine
    names = itertools.count()

    def generate(prompt: list[int], new_tokens: int, came: Callable[[int], None]) -> None:
        asked = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, asked)
        known = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                for token in tokens[known:]:
                    came(int(token))
                known = len(tokens)

    serve(SETTINGS, {"version": vllm.__version__, "torch": torch.__version__}, generate)


if __name__ == "__main__":
    main()

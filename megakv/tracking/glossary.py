"""One line for each term of a page."""

from __future__ import annotations

import re

GLOSSARY = {
    "TTFT": "time to first token: from the start of the call until the first new token is known",
    "TTIT": "time to incremental token: mean time from one new token to the next",
    "CP": "context parallelism: ranks that share the tokens of a prompt",
    "TP": "tensor parallelism: ranks that share the heads and weights of each layer",
    "KV cache": "keys and values of all tokens so far, which later tokens attend to",
    "pass-KV": "ring attention in which keys and values travel from rank to rank, and queries stay ('pass_kv')",
    "pass-Q": "ring attention in which queries travel, and keys and values stay ('pass_q', 'pass_q_return')",
    "all-gather": "every rank first gathers all keys and values, then attends ('all_gather')",
    "KV-Runahead": "a chain: a rank takes the keys and values of all tokens before its own from the rank before",
    "TSP": "tensor and sequence parallelism, the baseline of KV-Runahead: even parts and an all-gather",
    "replicated": "all ranks compute the new token and attend to their own keys; one gather merges the results",
    "linear_sum": "decoding by 'tensor': sums over ranks that each computed a slice of a linear",
    "linear_gather": "decoding by 'tensor': outputs of a linear's slices, put together on all ranks",
    "tp_all_reduce": "sums over the heads and feed-forward parts of tensor-parallel ranks",
    "logits": "the new token's scores, shared with all ranks",
    "control": "small messages that keep ranks in step: seeds, decisions, stops",
    "compute": "what a rank computes, where events were recorded (megakv.tracking.timeline)",
    "other": "time in which a rank neither waits for communication nor is known to compute",
    "hidden": "communication behind compute, which costs no time; transfers at the same time count each",
    "exposed": "communication in which a rank does nothing but wait",
    "simulated": "played through by the cost model, not run",
    "lossy": "tokens may differ from those of the plain model",
    "compression": "what ranks tell each other to choose the tokens that a compressed cache keeps",
    "budget": "what part of a prompt's tokens, or how many of them, a KV head keeps on average",
    "busy rate": "time in attention over that of the slowest rank beside it, which it waits for",
    "utilisation": "mean load over the largest: 100% where no rank, or nothing of a link, stands idle",
    "stream": "all keys and values off the accelerator are sent to it",
    "kvpr": "some keys and values are recomputed from activations that come whole, while the rest is sent",
    "chunked": "as kvpr, with activations in chunks, recomputed as they land",
    "cpu_rank": "the host's processor attends to some keys and values where they lie",
    "recomputed": "tokens whose keys and values are made anew from activations: the split point",
    "hit rate": "prompt tokens found in the prefix store, of all prompt tokens of served requests",
    "tier": "where keys and values lie: on the device, in host memory, on disk",
    "prediction error": "what was predicted over what was measured, minus 1",
}


def glossary(shown: str) -> dict[str, str]:
    """The terms that stand in a text, with what they mean."""
    names = {term: re.escape(term).replace("replicated", "replicated( queries)?") for term in GLOSSARY}
    return {
        term: meaning for term, meaning in GLOSSARY.items() if re.search(rf"(?<![\w-]){names[term]}(?![\w-])", shown)
    }

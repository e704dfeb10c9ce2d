"""What an engine remembers of a turn: what it read, apart from what was cached."""

import torch
from transformers import LlamaForCausalLM

import megakv
from megakv.tracking.overview import overview
from megakv.tracking.page import page
from tests.families import llama

PROMPT, TURN, NEW = 70, 5, 3


def test_a_turn_reads_what_is_not_cached(alone: None) -> None:
    ids, greedy = torch.randint(2, 90, (2, PROMPT)), {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    # Padding is nothing that was read.
    mask[1, :4] = 0
    with megakv.init_inference(LlamaForCausalLM(llama()), {"dtype": "fp32"}) as engine:
        session = engine.session()
        session.generate(ids, attention_mask=mask, **greedy)
        first = engine.report()
        session.generate(ids[:, :TURN], **greedy)
        second = engine.report()
    assert (first.prompt_tokens, first.cached_tokens, first.new_tokens) == (2 * PROMPT - 4, 0, 2 * NEW)
    # The last token of an answer is computed by the turn behind it.
    cached = 2 * (PROMPT + NEW - 1) - 4
    assert (second.prompt_tokens, second.cached_tokens) == (2 * (TURN + 1), cached)
    assert overview(second)["tokens"] == f"{2 * (TURN + 1)} prompt (behind {cached} cached) + {2 * NEW} new"
    scalars = second.scalars()
    assert (scalars["prompt_tokens"], scalars["cached_tokens"]) == (2 * (TURN + 1), cached)
    assert scalars["prompt_tokens_per_s"] == scalars["prompt_tokens"] / scalars["ttft_s"]
    assert "cached_tokens" not in first.scalars() and "cached" not in overview(first)["tokens"]
    assert f"behind {cached} cached" in page([("turn 2", second)])

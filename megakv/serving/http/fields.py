"""Fields of bodies that no endpoint here knows: hints are passed over, and what would change the answer is refused."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from megakv.serving.http.errors import ApiError
from megakv.serving.http.schemas import MOST_FIELDS, Body

HINTS = frozenset(
    """
    api_base api_key api_type api_version base_url cache_control cache_salt client_id container context_management
    conversation_id custom_llm_provider deployment_id drop_params extra_headers extra_query fallbacks
    guided_decoding_backend id include inference_geo kv_transfer_params litellm_call_id litellm_metadata
    litellm_session_id litellm_trace_id max_retries metadata moderation mm_processor_kwargs model_id models
    num_retries object prediction prompt_cache_key prompt_cache_options prompt_cache_retention provider
    provider_specific_fields reasoning reasoning_content reasoning_details reasoning_effort reasoning_split
    request_id request_timeout route safety_identifier safety_settings service_tier session_id slot_id store
    keep_alive cache_prompt stream_options thinking timeout trace transforms truncation usage user user_id verbosity
    vllm_xargs web_search_options weight_version
    """.split()
)
"""Those that say who asks, where, how soon, or what the answer might look like."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "adapter": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "assistant_prefix": (),
    "audio": (),
    "background": (),
    "bad_words": (),
    "bad_words_ids": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (),
    "conversation": (),
    "decoder_input_details": (),
    "details": (),
    "detokenize": (True,),
    "do_sample": (True,),
    "documents": (),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (),
    "ebnf": (),
    "echo": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "extra_body": (),
    "forced_decoder_ids": (),
    "format": ("text",),
    "function_call": ("auto", "none"),
    "functions": (),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "images": (),
    "include_stop_str_in_output": (),
    "inputs": (),
    "json_schema": (),
    "length_penalty": (0, 1),
    "logits_processors": (),
    "lora": (),
    "lora_request": (),
    "max_length": (),
    "max_new_tokens": (-1,),
    "min_length": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_predict": (-1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (-1,),
    "options": (),
    "penalty_alpha": (0,),
    "prompt_logprobs": (),
    "raw": (),
    "regex": (),
    "repeat_penalty": (1,),
    "response_schema": (),
    "return_token_ids": (),
    "return_tokens_as_token_ids": (),
    "sampling_params": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_sequences": (),
    "stop_token_ids": (),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": (),
    "system": (),
    "system_prompt": (),
    "template": (),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (),
    "watermark": (),
    "xtc_probability": (0,),
}
"""Those that would change the answer, and what each may say because it changes nothing."""

NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""It asks for nothing, whatever the field."""
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
REMEDIES = {
    "add_special_tokens": "leave it out; /tokenize has it",
    "chat_template": "leave it out, and serve the model with that template",
    "extra_body": "put its fields into the body itself",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "modalities": "answers are text",
    "options": "put its fields into the body itself",
    "repeat_penalty": "use repetition_penalty",
    "stop_sequences": "use stop",
    "suffix": "models here write on from their prompt: put the model's own marks into it",
    "system": "use a message of the role 'system'",
    "system_prompt": "use a message of the role 'system'",
    **dict.fromkeys((*LENGTHS, "max_length", "max_new_tokens", "n_predict", "num_predict"), "use {length}"),
}
USUAL: dict[str, tuple[Any, ...]] = {"n": (1,), "tool_choice": ("auto", "none"), "parallel_tool_calls": (True, False)}
"""What fields of other endpoints may say where they are not known."""


KNOWN_HINT, UNKNOWN = "known hint", "unknown"
"""Why a field is passed over: never in a client's own words."""


def pass_over(given: Any, kind: type[Body], others: Container[str]) -> dict[str, int]:
    """Take fields that `kind` lacks out of a body, and count them by why; an ApiError names one that is not supported.

    `others` are fields of other endpoints: what has a meaning there is not passed over here.
    """
    passed = {KNOWN_HINT: 0, UNKNOWN: 0}
    if not isinstance(given, dict) or len(given) > MOST_FIELDS:
        return passed
    known = kind.names()
    for name in [name for name in given if name not in known]:
        value = given.pop(name)
        if name not in HINTS and name not in UNSUPPORTED and name not in others:
            passed[UNKNOWN] += 1
            continue
        passed[KNOWN_HINT] += 1
        usual = UNSUPPORTED.get(name) or USUAL.get(name, ())
        # Where true changes nothing, false does.
        nothing = [each for each in NOTHING if each is not False or True not in usual]
        if name not in HINTS and not any(_same(value, each) for each in (*nothing, *usual)):
            remedy = REMEDIES.get(name) or (f"allowed: {' or '.join(map(repr, usual))}" if usual else "leave it out")
            length = next((each for each in LENGTHS if each in known), LENGTHS[0])
            message = f"{name}: it is not supported at this endpoint; {remedy.format(length=length)}"
            raise ApiError(400, message, code="unsupported_value", param=name)
    return passed


def _same(value: Any, other: Any) -> bool:
    """Numbers are the same whatever their type; flags are no numbers."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)

"""What `generate` may be asked for, and what of it ranks can compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from megakv.costmodel.config_sizes import positions as positions_of
from megakv.engine.config import MegaKVConfig
from megakv.injection.interface import CHUNK_SIZE, TEMPERATURE
from megakv.injection.policy import depends_on_length, policy_for

REFUSED_OPTIONS = {
    "assistant_tokenizer": "an assistant's tokens are checked as they are; take one with the model's own tokenizer",
    "assistant_early_exit": "an assistant is a model of its own; use assistant_model",
    "use_mtp": "the model's extra layers propose tokens from hidden states; use assistant_model",
    "speculation_type": "such an assistant proposes tokens from hidden states; use another assistant_model",
    "custom_generate": "only transformers' own generation loops are supported",
    "negative_prompt_ids": "classifier-free guidance runs the model on a second prompt",
    "guidance_scale": "classifier-free guidance runs the model on a second prompt",
    "dola_layers": "DoLa needs the hidden states of every layer",
    "penalty_alpha": "contrastive search needs hidden states",
    "cache_implementation": "MegaKV keeps its own sharded cache",
    "past_key_values": "MegaKV keeps its own sharded cache; use engine.session()",
    "synced_gpus": "all ranks take every step together anyway",
    "output_attentions": "attention weights are never materialised",
    "output_hidden_states": "hidden states stay on the rank that computed them",
}


REPLACED_DEFAULTS = {**REFUSED_OPTIONS, "use_cache": "MegaKV answers from its sharded cache, with the same tokens"}
"""Options that give way where a model's files alone ask for them."""


def check_tokens(ids: Any) -> None:
    """Refuse what is no ``[B, S]`` tensor of tokens, and say how one is made."""
    if not isinstance(ids, Tensor):
        how = "pass its ['input_ids']" if isinstance(ids, Mapping) else "tokenizer(text, return_tensors='pt').input_ids"
        raise ValueError(f"input_ids is a {type(ids).__name__}: allowed: tokens [B, S] in a tensor; {how}")
    if ids.is_floating_point():
        raise ValueError(f"input_ids has type {ids.dtype}: allowed: whole numbers; embeddings go in as inputs_embeds")
    if ids.dim() != 2:
        raise ValueError(f"input_ids must be [B, S], not {list(ids.shape)}")


def check_vocabulary(ids: Tensor, mask: Any, model: PreTrainedModel) -> None:
    """Refuse tokens ``[B, S]`` that the model has not; those that the mask hides may be anything."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", model.config.get_text_config().vocab_size)
    wrong = (ids < 0) | (ids >= size)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        wrong &= mask.to(wrong.device) != 0
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        where = f"input_ids[{row}, {column}] = {int(ids[row, column])}"
        raise ValueError(f"{where} is no token: the model has {size}, from 0 to {size - 1}")


def check_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Refuse the options of `generate` that cannot work."""
    for name, reason in REFUSED_OPTIONS.items():
        value = given_option(name, options, model)
        if _asks(name, value):
            shown = type(value).__name__ if isinstance(value, torch.nn.Module | Tensor) else repr(value)
            raise ValueError(f"generate({name}={shown}) is not supported with MegaKV: {reason}")


def _asks(name: str, value: Any) -> bool:
    """Whether an option with this value asks for what MegaKV does not do."""
    if name == "use_cache":
        return value is False
    return value is not None and value is not False and not (name == "guidance_scale" and value == 1)


@contextmanager
def own_defaults(model: PreTrainedModel) -> Iterator[list[str]]:
    """Take out of an engine's model, for a while, what its files ask for and MegaKV does not do; yields that in words.

    Whoever loads a model has asked for nothing yet: only what a call asks for is refused. The config, which is the
    engine's own, stays changed.
    """
    configs = {id(each): each for each in (model.config, model.config.get_text_config())}
    outputs = [name for name in REFUSED_OPTIONS if name.startswith("output_")]
    found = {name: getattr(model.generation_config, name, None) for name in REPLACED_DEFAULTS}
    changed = {name: value for name, value in found.items() if _asks(name, value)}
    notes = dict(changed)
    for name in changed:
        setattr(model.generation_config, name, None)
    for config in configs.values():
        for name in outputs:
            if _asks(name, value := getattr(config, name, None)):
                notes[name] = value
                setattr(config, name, False)
    try:
        yield [
            f"{name} = {value!r} of the model's files is left out: {REPLACED_DEFAULTS[name]}"
            for name, value in notes.items()
        ]
    finally:
        for name, value in changed.items():
            setattr(model.generation_config, name, value)


class LengthLimits:
    """How long a prompt may be, and what follows it: for a model and a configuration."""

    def __init__(self, model: PreTrainedModel, config: MegaKVConfig):
        self._model = model
        # Rotary frequencies that follow the length have no end.
        self._positions = None if depends_on_length(model) else positions_of(model.config.get_text_config())
        # Generated tokens beyond a table cannot be computed either.
        self._table = policy_for(model.config.model_type).learned_positions
        self._whole = _length_of_one_chunk(model.config.get_text_config())
        self._most = config.max_out_tokens if "max_out_tokens" in config.model_fields_set else None

    def check(self, prompt: int, options: dict[str, Any]) -> None:
        """Refuse a prompt, cached tokens included, that the model or the configuration has no room for."""
        total, positions = prompt + new_token_limit(self._model, options, prompt), self._positions
        if positions is not None and prompt > positions:
            raise ValueError(
                f"the prompt has {prompt} tokens but the model has positions for {positions} "
                "(max_position_embeddings); shorten the prompt or use a model with a longer context"
            )
        beyond = candidates_beyond(self._model, options)
        if positions is not None and self._table and total + beyond > positions:
            raise ValueError(
                f"prompt and output need {total + beyond} positions but the model has a table of {positions} "
                f"(max_position_embeddings); ask for at most {max(0, positions - prompt - beyond)} new tokens"
            )
        if self._whole is not None and total > self._whole:
            raise ValueError(
                f"prompt and output need {total} tokens but the model attends in chunks (attention_chunk_size, "
                f"floor_scale), of which MegaKV computes the first: {self._whole}; ask for less"
            )
        if self._most is not None and total > self._most:
            raise ValueError(
                f"prompt and output need {total} tokens but max_out_tokens = {self._most}; raise it in the JSON"
            )


def _length_of_one_chunk(text: Any) -> int | None:
    """Tokens up to which attention in chunks is causal attention, and queries are not scaled by their position."""
    chunk = getattr(text, CHUNK_SIZE, None)
    scale = text.floor_scale - 1 if getattr(text, TEMPERATURE, False) else chunk
    return None if chunk is None else min(chunk, scale)


def given_option(name: str, options: dict[str, Any], model: PreTrainedModel) -> Any:
    """An option of a `generate` call: its own, or else its configuration's, or else the model's."""
    configs: tuple[GenerationConfig | None, ...] = (options.get("generation_config"), model.generation_config)
    values = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def new_token_limit(model: PreTrainedModel, options: dict[str, Any], prompt: int) -> int:
    """Tokens that a call may add to each row of its prompt."""
    new = given_option("max_new_tokens", options, model)
    return int(new) if new is not None else max(0, (given_option("max_length", options, model) or 0) - prompt)


def candidates_beyond(model: PreTrainedModel, options: dict[str, Any]) -> int:
    """Looked-up candidates that may be computed behind the last token that a call may add; drawn as transformers draws
    them, for the same random numbers. Otherwise none are proposed there.
    """
    lookup = given_option("prompt_lookup_num_tokens", options, model)
    return int(lookup) if lookup is not None and given_option("do_sample", options, model) else 0


def pad_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding behind a row's tokens to their front, since transformers continues at the last column.

    Both are ``[B, S]``, the mask 0 where a token is padding.
    """
    if not mask.numel() or bool((mask[:, -1] != 0).all()):
        return ids, mask
    order = (mask != 0).to(torch.int8).argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


OF_ONE_RANK = {
    "streamer",
    "stopping_criteria",
    "max_time",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "transformers_version",
}
"""Options in which ranks may differ: rank 0's hold, or they are of no effect on what ranks do together."""


def described(model: PreTrainedModel, ids: Tensor | None, options: dict[str, Any]) -> dict[str, str]:
    """What a `generate` call was given, as far as it can be told by value: equal where ranks were given the same."""
    config = options.get("generation_config")
    names = {*options, *model.generation_config.to_dict(), *(() if config is None else config.to_dict())} - OF_ONE_RANK
    values = {name: given_option(name, options, model) for name in sorted(names) if not name.startswith("_")}
    texts = {name: _value_text(value) for name, value in {"input_ids": ids, **values}.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _value_text(value: Any) -> str | None:
    """None for what is no plain value, such as a function."""
    if isinstance(value, Tensor):
        # Of token ids and masks all elements count; of embeddings, which can be large, some.
        step = max(1, value.numel() // 2**20) if value.is_floating_point() else 1
        elements = value.detach().flatten()[::step].cpu().contiguous()
        elements = elements.double() if value.is_floating_point() else elements
        return f"{list(value.shape)} with checksum {crc32(elements.numpy().tobytes()):08x}"
    if isinstance(value, list | tuple):
        texts = [_value_text(item) for item in value]
        return None if None in texts else f"[{', '.join(str(text) for text in texts)}]"
    return repr(value) if isinstance(value, bool | int | float | str | dict) else None

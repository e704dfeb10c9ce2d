"""What `generate` may be asked for, and the agreement of all ranks on seeds, tokens and stops."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from megakv.comm import Communicator
from megakv.errors import MegaKVError

REFUSED_OPTIONS = {
    "assistant_model": "assisted decoding runs a second model",
    "assistant_tokenizer": "assisted decoding runs a second model",
    "prompt_lookup_num_tokens": "assisted decoding is not supported",
    "assistant_early_exit": "assisted decoding is not supported",
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


def _given(name: str, options: dict[str, Any], config: GenerationConfig) -> Any:
    return options[name] if options.get(name) is not None else getattr(config, name, None)


def _is_set(name: str, value: Any) -> bool:
    if name == "guidance_scale":
        return value is not None and value != 1
    return value is not None and value is not False


def check_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Refuse the options of `generate` that cannot work.

    Raises
    ------
    ValueError
        Naming the option, its value and the reason.
    """
    config = options.get("generation_config") or model.generation_config
    for name, reason in REFUSED_OPTIONS.items():
        value = _given(name, options, config)
        if _is_set(name, value):
            shown = type(value).__name__ if isinstance(value, torch.nn.Module | Tensor) else repr(value)
            raise ValueError(f"generate({name}={shown}) is not supported with MegaKV: {reason}")


def check_length(
    prompt: int,
    options: dict[str, Any],
    model: PreTrainedModel,
    *,
    positions: int | None,
    learned: bool,
    max_out_tokens: int | None,
) -> None:
    """Refuse a prompt that the model, or the configuration, has no room for.

    Parameters
    ----------
    prompt : int
        Tokens of the longest prompt, cached ones included.
    positions : int, optional
        The model's ``max_position_embeddings``.
    learned : bool
        Whether generated tokens beyond it cannot be computed either.
    max_out_tokens : int, optional
        DeepSpeed's bound on prompt plus output, where the JSON gives one.

    Raises
    ------
    ValueError
        Naming the lengths and the limit.
    """
    config = options.get("generation_config") or model.generation_config
    new = _given("max_new_tokens", options, config)
    total = prompt + new if new is not None else max(prompt, _given("max_length", options, config) or 0)
    if positions is not None and prompt > positions:
        raise ValueError(
            f"the prompt has {prompt} tokens but the model has positions for {positions} "
            "(max_position_embeddings); shorten the prompt or use a model with a longer context"
        )
    if positions is not None and learned and total > positions:
        raise ValueError(
            f"prompt and output need {total} positions but the model has a table of {positions} "
            f"(max_position_embeddings); ask for at most {positions - prompt} new tokens"
        )
    if max_out_tokens is not None and total > max_out_tokens:
        raise ValueError(
            f"prompt and output need {total} tokens but max_out_tokens = {max_out_tokens}; raise it in the JSON"
        )


def given_option(name: str, options: dict[str, Any], model: PreTrainedModel) -> Any:
    """An option of a `generate` call: its own, or its configuration's, or the model's."""
    return _given(name, options, options.get("generation_config") or model.generation_config)


def new_token_limit(model: PreTrainedModel, options: dict[str, Any], prompt: int) -> int:
    """Tokens that a call may add to each row of its prompt; 0 for beams, which share most of theirs."""
    config = options.get("generation_config") or model.generation_config
    if (_given("num_beams", options, config) or 1) > 1:
        return 0
    new = _given("max_new_tokens", options, config)
    return int(new) if new is not None else max(0, (_given("max_length", options, config) or 0) - prompt)


def pad_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding behind a row's tokens to their front, since transformers continues at the last column.

    Parameters
    ----------
    ids, mask : Tensor
        ``[B, S]`` tokens, and 0 where they are padding.
    """
    if not mask.numel() or bool((mask[:, -1] != 0).all()):
        return ids, mask
    order = (mask != 0).to(torch.int8).argsort(dim=1, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


def share_random_state(comm: Communicator) -> None:
    """Give every rank the state of rank 0's random number generators, so that all draw the same tokens."""
    device = comm.mesh.device
    state = torch.get_rng_state().to(device)
    torch.set_rng_state(comm.broadcast(state, 0, operation="control").cpu())
    if device.type != "cpu":
        module = torch.get_device_module(device)
        state = module.get_rng_state(device).to(device)
        module.set_rng_state(comm.broadcast(state, 0, operation="control").cpu(), device)


@dataclass
class TokenClock:
    """When each token of a `generate` call was known, in seconds of the ledger's clock."""

    now: Callable[[], float]
    times: list[float] = field(default_factory=list)
    latest: Tensor | None = None
    """Prompt and tokens so far."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.times[0] if self.times else None

    @property
    def ttit_s(self) -> float | None:
        """Mean time to incremental token."""
        steps = len(self.times) - 1
        return (self.times[-1] - self.times[0]) / steps if steps > 0 else None


@contextmanager
def keep_tokens(clock: TokenClock) -> Iterator[None]:
    """Give an error that ends a `generate` call the tokens that it had."""
    try:
        yield
    except MegaKVError as error:
        error.sequences = clock.latest
        raise
    finally:
        clock.latest = None


class Proposals(Protocol):
    """What rank 0 decides for all ranks after each token."""

    def proposal(self) -> int:
        """A number that means the same on every rank."""

    def heed(self, proposal: int) -> None:
        """Take that of rank 0."""


class RankZeroStop(StoppingCriteria):
    """Rank 0's word on when to stop, checked to be said of the same tokens on every rank.

    Parameters
    ----------
    comm : Communicator
    criteria : list of StoppingCriteria
        The user's own, asked on rank 0 only.
    max_time : float, optional
        Seconds, by rank 0's clock.
    clock : TokenClock
    plans : Proposals, optional
        Agreed on by the way.
    """

    def __init__(
        self,
        comm: Communicator,
        criteria: list[Any],
        max_time: float | None,
        clock: TokenClock,
        plans: Proposals | None = None,
    ):
        self._comm = comm
        self._plans = plans
        self._criteria = criteria
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self._clock = clock

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._clock.times.append(self._clock.now())
        self._clock.latest = input_ids
        batch = input_ids.shape[0]
        word = torch.zeros((2 if self._plans is None else 3, batch), dtype=torch.int64)
        word[0] = input_ids[:, -1].cpu()
        if self._comm.mesh.rank == 0:
            done = torch.zeros(batch, dtype=torch.bool)
            for criterion in self._criteria:
                done |= torch.as_tensor(criterion(input_ids, scores, **kwargs)).cpu()
            if self._deadline is not None:
                done |= time.monotonic() > self._deadline
            word[1] = done
            if self._plans is not None:
                word[2] = self._plans.proposal()
        agreed = self._comm.broadcast(word.to(self._comm.mesh.device), 0, operation="control")
        if not torch.equal(agreed[0].cpu(), word[0]):
            raise MegaKVError(
                f"rank {self._comm.mesh.rank} chose other tokens than rank 0 at length {input_ids.shape[1]}: a logits "
                "processor or prefix_allowed_tokens_fn gives different results on different ranks"
            )
        if self._plans is not None:
            self._plans.heed(int(agreed[2, 0]))
        return agreed[1].bool().to(input_ids.device)


def prepare_options(
    model: PreTrainedModel,
    options: dict[str, Any],
    comm: Communicator,
    clock: TokenClock,
    plans: Proposals | None = None,
) -> dict[str, Any]:
    """The options to hand to transformers: stops and plans decided by rank 0, tokens streamed from rank 0."""
    prepared = dict(options)
    config = options.get("generation_config") or model.generation_config
    max_time = _given("max_time", options, config)
    prepared.pop("max_time", None)
    if config.max_time is not None:
        prepared["generation_config"] = copy.deepcopy(config)
        prepared["generation_config"].max_time = None
    criteria = list(prepared.pop("stopping_criteria", None) or [])
    prepared["stopping_criteria"] = StoppingCriteriaList([RankZeroStop(comm, criteria, max_time, clock, plans)])
    if comm.mesh.rank != 0:
        prepared.pop("streamer", None)
    return prepared

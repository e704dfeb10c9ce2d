"""What `generate` may be asked for, and the agreement of all ranks on seeds, tokens and stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from megakv.device import upload
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
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
    for name, reason in REFUSED_OPTIONS.items():
        value = given_option(name, options, model)
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
    new = given_option("max_new_tokens", options, model)
    total = prompt + new if new is not None else max(prompt, given_option("max_length", options, model) or 0)
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
    """An option of a `generate` call: its own, or else its configuration's, or else the model's."""
    configs: tuple[GenerationConfig | None, ...] = (options.get("generation_config"), model.generation_config)
    values = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def new_token_limit(model: PreTrainedModel, options: dict[str, Any], prompt: int) -> int:
    """Tokens that a call may add to each row of its prompt; 0 for beams, which share most of theirs."""
    if (given_option("num_beams", options, model) or 1) > 1:
        return 0
    new = given_option("max_new_tokens", options, model)
    return int(new) if new is not None else max(0, (given_option("max_length", options, model) or 0) - prompt)


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


@dataclass(frozen=True)
class Opening:
    """What rank 0 says where a `generate` call begins.

    Parameters
    ----------
    states : list of Tensor
        Of its random number generators, that of the processor first.
    given : dict
        What it was called with, as `described`.
    streams : bool
        Whether it has a streamer.
    """

    states: list[Tensor]
    given: dict[str, str]
    streams: bool


def open_call(
    agreement: Agreement, device: torch.device, model: PreTrainedModel, ids: Tensor | None, options: dict[str, Any]
) -> bool:
    """Begin a `generate` call with rank 0's random state, so that all draw the same tokens; says whether it streams.

    Raises
    ------
    MegaKVError
        On every rank, if one was called with another prompt or other options than rank 0.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    given = described(model, ids, options)

    def opening() -> Opening:
        states = [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(device)])]
        return Opening(states, given, options.get("streamer") is not None)

    said = agreement.decide(opening)
    torch.set_rng_state(said.states[0])
    if module is not None:
        module.set_rng_state(said.states[1], device)

    def check() -> None:
        for name in sorted(given.keys() | said.given.keys()):
            own, first = given.get(name, "None"), said.given.get(name, "None")
            if own != first:
                raise MegaKVError(
                    f"called with {name} = {own:.200}, rank 0 with {first:.200}: every rank must make the same calls, "
                    "in the same order, with the same options"
                )

    # All start at one time, too.
    agreement.together(check)
    return said.streams


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


class Plans(Protocol):
    """What rank 0 decides for all ranks after each token, besides when to stop."""

    def proposal(self) -> int:
        """A number that means the same on every rank."""

    def heed(self, proposal: int) -> None:
        """Take that of rank 0."""


class RankZeroStreamer(BaseStreamer):
    """The user's streamer on rank 0; the others have one that does nothing, so that transformers treats all alike.

    What it raises is kept, and ends the call on all ranks with the next step's message.

    Parameters
    ----------
    streamer : BaseStreamer, optional
        The user's; None on other ranks.
    """

    def __init__(self, streamer: Any):
        self._streamer = streamer
        self.failure: BaseException | None = None

    def put(self, value: Tensor) -> None:
        """Tokens go to the user's, until it fails."""
        self._attempt(lambda: self._streamer.put(value))

    def end(self) -> None:
        """The last of them has come."""
        self._attempt(lambda: self._streamer.end())

    def check(self) -> None:
        """Raise what the user's streamer raised."""
        if self.failure is not None:
            raise self.failure

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._streamer is not None and self.failure is None:
            try:
                action()
            except BaseException as error:
                self.failure = error


class RankZeroStop(StoppingCriteria):
    """Rank 0's decision after each token: when to stop, the plans of the next step, and whether user code of it failed.

    One message has it all, with rank 0's tokens, by which the others see that they chose the same.

    Parameters
    ----------
    criteria : list of StoppingCriteria
        The user's own, asked on rank 0 only.
    max_time : float, optional
        Seconds, by rank 0's clock.
    """

    def __init__(
        self,
        comm: Communicator,
        agreement: Agreement,
        criteria: list[Any],
        max_time: float | None,
        clock: TokenClock,
        streamer: RankZeroStreamer | None = None,
        plans: Plans | None = None,
    ):
        self._comm = comm
        self._agreement = agreement
        self._plans = plans
        self._criteria = criteria
        self._deadline = None if max_time is None else time.monotonic() + max_time
        self._clock = clock
        self._streamer = streamer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._clock.latest = input_ids
        tokens, device = input_ids[:, -1:].t(), self._comm.mesh.device
        failure = None if self._streamer is None else self._streamer.failure
        said = np.zeros((3, tokens.shape[1]), dtype=np.int64)
        if self._comm.mesh.rank == 0 and failure is None:
            try:
                said[0] = self._done(input_ids, scores, **kwargs).numpy()
                said[1] = 0 if self._plans is None else self._plans.proposal()
            except BaseException as error:
                failure = error
        said[2] = failure is None
        agreed = torch.cat([tokens.to(device), upload(said, device)])
        self._comm.broadcast(agreed, 0, operation="control")
        # All that is to be known of a step is read at once: the host waits for the device here, and nowhere else.
        own, found, stop, plan, well = torch.cat([tokens.to(device), agreed]).cpu()
        self._clock.times.append(self._clock.now())
        if not well[0]:
            self._agreement.decide(lambda: _raise(failure))
        if not torch.equal(found, own):
            raise MegaKVError(
                f"rank {self._comm.mesh.rank} chose other tokens than rank 0 at length {input_ids.shape[1]}: a logits "
                "processor or prefix_allowed_tokens_fn gives different results on different ranks"
            )
        if self._plans is not None:
            self._plans.heed(int(plan[0]))
        return upload(stop.bool().numpy(), input_ids.device)

    def _done(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
        for criterion in self._criteria:
            done |= torch.as_tensor(criterion(input_ids, scores, **kwargs)).cpu()
        if self._deadline is not None:
            done |= time.monotonic() > self._deadline
        return done


def _raise(failure: BaseException | None) -> None:
    assert failure is not None
    raise failure


def prepare_options(
    model: PreTrainedModel,
    options: dict[str, Any],
    comm: Communicator,
    agreement: Agreement,
    clock: TokenClock,
    streamer: RankZeroStreamer | None,
    plans: Plans | None = None,
) -> dict[str, Any]:
    """The options to hand to transformers: stops and plans decided by rank 0, tokens streamed from rank 0."""
    prepared = dict(options)
    max_time = given_option("max_time", options, model)
    if max_time is not None:
        # None as an option goes before what the configurations say: each rank's own clock must not decide.
        prepared["max_time"] = None
    criteria = list(prepared.pop("stopping_criteria", None) or [])
    prepared["stopping_criteria"] = StoppingCriteriaList(
        [RankZeroStop(comm, agreement, criteria, max_time, clock, streamer, plans)]
    )
    prepared.pop("streamer", None)
    if streamer is not None:
        prepared["streamer"] = streamer
    return prepared

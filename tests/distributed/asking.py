"""What random engines are asked, and plain transformers with them: both say what they found in the same words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import megakv
from megakv.base.errors import MegaKVError
from megakv.engine.session import Session
from tests.distributed.random_cases import Action, Case

TOLERANCE = 1e-4
"""Of logits, relative to the largest."""
Answer = dict[str, Any]


def make_batch(action: Action) -> tuple[Tensor, Tensor]:
    """``[B, S]`` tokens and mask of an action; padding has tokens too, which nobody may see."""
    rng, rows = Random(action["seed"]), action["rows"]
    width = max(rows) + action["spare"]
    if not width:
        return torch.zeros(len(rows), 0, dtype=torch.long), torch.zeros(len(rows), 0, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for row, length in enumerate(rows):
        if action["side"] == "holes":
            mask[row, [*rng.sample(range(width - 1), length - 1), width - 1]] = 1
        elif action["side"] == "left":
            mask[row, width - length :] = 1
        else:
            mask[row, :length] = 1
    ids = torch.tensor([[rng.randrange(3, 199) for _ in range(width)] for _ in rows])
    return ids, mask


class Countdown(StoppingCriteria):
    """Ends the first row after some tokens and the others one token later each, or raises."""

    def __init__(self, calls: int, raises: int = 0):
        self.calls, self.raises = calls, raises

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls, self.raises = self.calls - 1, self.raises - 1
        if self.raises == 0:
            raise KeyError("of the user's")
        return self.calls <= -torch.arange(len(input_ids))


class Heard(BaseStreamer):
    """Keeps what is streamed, or raises."""

    def __init__(self, raises: int = 0) -> None:
        self.tokens: list[int] = []
        self.raises = raises

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.raises -= 1
        if self.raises == 0:
            raise KeyError("of the user's")

    def end(self) -> None:
        self.tokens.append(-1)


def generate(action: Action, run: Callable[..., Any], *, rank: int = 0) -> Answer:
    """One call of `generate`; whatever is only rank 0's to say, the others say otherwise."""
    options, heard = dict(action["options"]), Heard()
    if "configured" in action:
        options = {"generation_config": GenerationConfig(**options)}
    if "stop_after" in action:
        options["stopping_criteria"] = StoppingCriteriaList([Countdown(action["stop_after"] + rank)])
    if "logits" in action:
        options |= {"return_dict_in_generate": True, "output_logits": True}
    if "streamed" in action:
        options["streamer"] = heard
    torch.manual_seed(action["seed"] + rank)
    if "raises" in action:
        last = action["raises"] if rank == 0 else 0
        # Whatever is chosen, it goes on for long enough.
        endless: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "stopping_criteria": None}
        if "streamed" in action:
            endless["streamer"] = Heard(last)
        else:
            endless["stopping_criteria"] = StoppingCriteriaList([Countdown(1000, last)])
        with pytest.raises(KeyError if rank == 0 else MegaKVError, match="of the user's"):
            run(**options | endless)
        torch.manual_seed(action["seed"] + rank)
    with torch.inference_mode() if "inference_mode" in action else nullcontext():
        output = run(**options)
    answer: Answer = {"tokens": output if isinstance(output, Tensor) else output.sequences}
    if "logits" in action:
        answer["logits"] = torch.stack(output.logits)
    if "streamed" in action and rank == 0:
        answer["streamed"] = torch.tensor(heard.tokens)
    return answer


def aligned(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's padding moved to its front, where its last token is not in the last column of all."""
    if not mask.numel() or bool(mask[:, -1].all()):
        return ids, mask
    order = [sorted(range(len(row)), key=lambda column, row=row: int(row[column])) for row in mask.tolist()]
    return ids.gather(1, torch.tensor(order)), mask.gather(1, torch.tensor(order))


@dataclass
class Conversation:
    """What the plain model is given of a session, and how many of its slots an engine has cached."""

    ids: Tensor
    mask: Tensor
    cached: int = 0


@dataclass
class Plain:
    """Plain transformers, which is given each whole conversation anew."""

    model: PreTrainedModel
    sessions: dict[str, Conversation] = field(default_factory=dict)
    saved: dict[str, Conversation] = field(default_factory=dict)

    def forward(self, action: Action) -> Answer:
        """Logits of real tokens; where the last one of each row is meant, of that."""
        ids, mask = make_batch(action)
        with torch.no_grad():
            logits = self.model(ids, attention_mask=mask, use_cache=False, **positions(action, mask, self.model)).logits
        columns = wanted_columns(action, ids.shape[1])
        if set(columns) == {ids.shape[1] - 1}:
            last = ids.shape[1] - 1 - mask.flip(1).argmax(1)
            return {"logits": logits[torch.arange(len(ids)), last].repeat_interleave(len(columns), dim=0)}
        return {"logits": logits[:, columns][mask[:, columns].bool()]}

    def generate(self, action: Action) -> Answer:
        """Tokens of one call."""
        ids, mask = make_batch(action)
        answer = self._generate(action, *aligned(ids, mask))
        tokens = answer["tokens"]
        if "embedded" in action:
            return answer
        given = ids.repeat_interleave(len(tokens) // len(ids), dim=0)
        answer["tokens"] = torch.cat([given, tokens[:, ids.shape[1] :]], dim=1)
        return answer

    def _generate(self, action: Action, ids: Tensor, mask: Tensor) -> Answer:
        # What is most likely goes by no candidates; what is drawn does.
        unasked = {"prefill_chunk_size", *(() if action["options"]["do_sample"] else ("prompt_lookup_num_tokens",))}
        options = {name: value for name, value in action["options"].items() if name not in unasked}
        asked = {name: value for name, value in action.items() if name not in ("raises", "inference_mode")}
        run = partial(self.model.generate, **prompt(action, ids, self.model), attention_mask=mask)
        return generate({**asked, "options": options}, run)

    def turn(self, action: Action) -> Answer:
        """Tokens of the whole conversation."""
        ids, mask = aligned(*make_batch(action))
        before = self.sessions.get(action["name"])
        if before is not None:
            ids, mask = torch.cat([before.ids, ids], dim=1), torch.cat([before.mask, mask], dim=1)
        answer = self._generate(action, ids, mask)
        tokens = answer["tokens"]
        mask = torch.cat([mask, mask.new_ones(len(mask), tokens.shape[1] - mask.shape[1])], dim=1)
        cached = tokens.shape[1] - 1
        if "num_beams" in action["options"]:
            cached = 0 if before is None else before.cached
        self.sessions[action["name"]] = Conversation(tokens, mask, cached)
        return answer

    def cut(self, action: Action) -> Answer:
        """What is left."""
        if action["name"] not in self.sessions:
            return {}
        before = self.sessions[action["name"]]
        slots = int(action["share"] * before.ids.shape[1])
        left = Conversation(before.ids[:, :slots], before.mask[:, :slots], min(before.cached, slots))
        self.sessions[action["name"]] = left
        return {"tokens": left.ids}

    def fork(self, action: Action) -> Answer:
        """The fork's tokens."""
        if action["name"] not in self.sessions:
            return {}
        self.sessions[action["as"]] = self.sessions[action["name"]]
        return {"tokens": self.sessions[action["as"]].ids}

    def save(self, action: Action) -> Answer:
        """Nothing; a session without tokens is not saved."""
        if action["name"] not in self.sessions:
            return {}
        if self.sessions[action["name"]].ids.shape[1]:
            self.saved[action["name"]] = self.sessions[action["name"]]
        return {}

    def restore(self, action: Action) -> Answer:
        """The restored tokens; a new session where nothing was saved."""
        if action["name"] not in self.saved:
            return {}
        self.sessions[action["as"]] = self.saved[action["name"]]
        return {"tokens": self.sessions[action["as"]].ids}


@dataclass
class Asked:
    """The same of an engine, over all ranks."""

    case: Case
    folder: Path
    engine: megakv.MegaKVEngine
    sessions: dict[str, Session] = field(default_factory=dict)

    def forward(self, action: Action) -> Answer:
        """Logits of real tokens, from all ways to ask for them."""
        engine, (ids, mask) = self.engine, make_batch(action)
        inputs = {**as_mask(action, mask), **positions(action, mask, engine.module)}
        columns, split = wanted_columns(action, ids.shape[1]), action.get("split", ids.shape[1])
        if split < ids.shape[1]:
            half = engine(ids[:, :split], attention_mask=mask[:, :split], use_cache=True)
            rest = engine(ids[:, split:], attention_mask=mask, past_key_values=half.past_key_values)
            logits = torch.cat([half.logits, rest.logits], dim=1)
        elif "embeds" in action:
            logits = engine(inputs_embeds=engine.module.get_input_embeddings()(ids), **inputs).logits
        elif "tuple" in action:
            logits = engine(ids, return_dict=False, **inputs)[0]
        else:
            keep = torch.tensor(columns) if "columns" in action else action.get("keep", 0)
            logits = engine(ids, logits_to_keep=keep, **inputs).logits
        only_last = set(columns) == {ids.shape[1] - 1}
        return {"logits": logits.flatten(0, 1) if only_last else logits[mask[:, columns].bool()]}

    def generate(self, action: Action) -> Answer:
        """Tokens of one call."""
        ids, mask = make_batch(action)
        inputs = {**prompt(action, ids, self.engine.module), **as_mask(action, mask)}
        return generate(action, partial(self.engine.generate, **inputs), rank=dist.get_rank())

    def turn(self, action: Action) -> Answer:
        """Tokens of the whole conversation."""
        session = self.sessions.setdefault(action["name"], self.engine.session())
        ids, mask = make_batch(action)
        return generate(action, partial(session.generate, ids, **as_mask(action, mask)), rank=dist.get_rank())

    def cut(self, action: Action) -> Answer:
        """What is left."""
        if action["name"] not in self.sessions:
            return {}
        session = self.sessions[action["name"]]
        session.cut_back(int(action["share"] * session.input_ids.shape[1]))
        return {"tokens": session.input_ids}

    def fork(self, action: Action) -> Answer:
        """The fork's tokens."""
        if action["name"] not in self.sessions:
            return {}
        twin = self.sessions[action["as"]] = self.sessions[action["name"]].fork()
        return {"tokens": twin.input_ids}

    def save(self, action: Action) -> Answer:
        """Nothing; a session without tokens cannot be saved."""
        if action["name"] not in self.sessions:
            return {}
        session = self.sessions[action["name"]]
        try:
            session.save(self._saved(action))
        except ValueError:
            assert not session.input_ids.shape[1]
        return {}

    def restore(self, action: Action) -> Answer:
        """The restored tokens; a new session where nothing was saved."""
        if not self._saved(action).exists():
            return {}
        session = self.sessions[action["as"]] = self.engine.restore_session(self._saved(action))
        return {"tokens": session.input_ids}

    def _saved(self, action: Action) -> Path:
        return self.folder / f"session-{self.case.seed}-{self.case.drawn_on}-{action['name']}"


def positions(action: Action, mask: Tensor, model: PreTrainedModel) -> dict[str, Tensor]:
    """`position_ids`, where they are given and the model takes them."""
    takes = "position_ids" in inspect.signature(type(model).forward).parameters
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if takes and "positions" in action else {}


def prompt(action: Action, ids: Tensor, model: PreTrainedModel) -> dict[str, Tensor]:
    """Tokens, or their embeddings."""
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()} if "embedded" in action else {"inputs": ids}


def as_mask(action: Action, mask: Tensor) -> dict[str, Tensor]:
    """The mask in one of the forms that it may have; none where nothing is masked."""
    if action.get("mask") == "none" and bool(mask.all()):
        return {}
    return {"attention_mask": mask.bool() if action.get("mask") == "bool" else mask}


def wanted_columns(action: Action, width: int) -> list[int]:
    """Of the logits, counted from the front."""
    columns = action["columns"] if "columns" in action else range(-min(action.get("keep") or width, width), 0)
    return [column % width for column in columns]


def differs(found: Answer, wanted: Answer, tolerance: float = TOLERANCE) -> str | None:
    """How an answer differs from what it should be; None if it does not."""
    for name, tensor in found.items():
        expected = wanted[name]
        if tensor.shape != expected.shape:
            return f"{name} have shape {list(tensor.shape)}, not {list(expected.shape)}"
        if name == "logits":
            error = ((tensor - expected).abs().max() / expected.abs().max()).item() if expected.numel() else 0.0
            if not error <= tolerance:
                return f"logits differ by {error:.2g}"
        elif not torch.equal(tensor, expected):
            return f"{name} are {tensor.tolist()}, not {expected.tolist()}"
    return None

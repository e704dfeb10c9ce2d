"""Random engines: a seed gives a family, a mesh, a configuration and what is asked of the engine, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from tests.distributed.random_sections import draw_section, is_lossy
from tests.families import CONFIGS

MESHES = {1: ("1x1",), 2: ("2x1", "2x1", "1x2"), 3: ("3x1",), 4: ("2x2", "2x2", "4x1", "1x4")}
"""By the number of ranks; what stands twice is drawn twice as often."""

LENGTH_DEPENDENT = ("llama_dynamic_rope", "phi3_longrope")
"""What was cached of a shorter prompt was rotated otherwise: plain transformers too answers otherwise in chunks."""

LONGEST = 230
"""Slots of a conversation from which on no turn is added."""

Action = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One engine and what is asked of it.

    Parameters
    ----------
    seed : int
        That all of it, and the weights, were drawn from.
    family, mesh : str
    source : {"folder", "module"}
        What the engine is made from.
    section : dict
        ``megakv`` in the JSON.
    neighbour : dict, optional
        That of a second engine in the same processes.
    script : list of Action
    lossy : bool
        Whether its answers, or what it goes on from, are others than the plain model's.
    drawn_on : int
        How many ranks the first case of its seed runs on.
    then : Case, optional
        On fewer ranks, with the sessions that this one saved.
    """

    seed: int
    family: str
    mesh: str
    source: str
    section: dict[str, Any]
    script: list[Action]
    lossy: bool
    drawn_on: int
    neighbour: dict[str, Any] | None = None
    then: Case | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """CP and TP degree."""
        return sizes(self.mesh)

    @property
    def ranks(self) -> int:
        """How many it runs on."""
        cp, tp = self.sizes
        return cp * tp

    @property
    def parts(self) -> list[Case]:
        """This one, and the one that goes on from it."""
        return [self] if self.then is None else [self, self.then]

    @property
    def name(self) -> str:
        """Of files: no other case has it."""
        return f"{self.seed}-{self.drawn_on}-{self.ranks}"


def sizes(mesh: str) -> tuple[int, int]:
    """CP and TP degree."""
    cp, tp = mesh.split("x")
    return int(cp), int(tp)


def draw(seed: int, ranks: int) -> Case:
    """The case of a seed on so many ranks."""
    rng = Random(f"{seed} on {ranks}")
    family, mesh = rng.choice(list(CONFIGS)), rng.choice(MESHES[ranks])
    section = draw_section(rng, *sizes(mesh))
    lossy = is_lossy(section)
    neighbour = draw_section(rng, *sizes(mesh), lossy=False) if not lossy and rng.random() < 0.15 else None
    # Evicted rows do not come back when a candidate is refused.
    evicts = any("decode_interval" in (each or {}).get("fairkv", {}) for each in (section, neighbour))
    # Sessions go on with what they were saved from: a module or a folder.
    source = rng.choice(("folder", "folder", "module"))
    script = Script(rng, turns=family not in LENGTH_DEPENDENT, proposes=not evicts)
    actions = script.draw()
    fewer = [other for size in range(1, ranks) for other in MESHES[size]] if script.saved else []
    then = None
    if fewer and rng.random() < 0.5:
        # Sessions of FP8 go on with the same weights only, which are others on another TP degree.
        smaller = rng.choice([other for other in fewer if other.endswith("x1") or not section.get("weights")])
        then_section = draw_section(rng, *sizes(smaller)) | {"weights": section.get("weights", {})}
        later = Script(rng, turns=True, proposes="decode_interval" not in then_section.get("fairkv", {}))
        later.take_over(script)
        then = Case(
            seed=seed,
            family=family,
            mesh=smaller,
            source=source,
            section=then_section,
            script=later.draw(),
            lossy=lossy or is_lossy(then_section),
            drawn_on=ranks,
        )
    return Case(
        seed=seed,
        family=family,
        mesh=mesh,
        source=source,
        section=section,
        script=actions,
        lossy=lossy,
        drawn_on=ranks,
        neighbour=neighbour,
        then=then,
    )


class Script:
    """What is asked of an engine, one action after the other.

    Parameters
    ----------
    rng : Random
    turns : bool
        Whether the family's answers are the same in turns and chunks as at once.
    proposes : bool
        Whether candidates may be looked up.

    Attributes
    ----------
    saved : dict
        Batch and slots of the sessions that were saved, by name.
    """

    def __init__(self, rng: Random, *, turns: bool, proposes: bool):
        self._rng = rng
        self._turns, self._proposes = turns, turns and proposes
        self._open: dict[str, tuple[int, int]] = {}
        self.saved: dict[str, tuple[int, int]] = {}
        self._names = iter("abcdefghijklmnopqrstuvwxyz")
        self._answered = ""
        self._first: list[Action] = []

    def take_over(self, other: Script) -> None:
        """Begin with a session that another script saved."""
        name = self._rng.choice(list(other.saved))
        self.saved, self._names = dict(other.saved), other._names
        self._first = [self._restore(name)]

    def draw(self) -> list[Action]:
        """Three to seven actions."""
        script = list(self._first)
        for _ in range(self._rng.randint(3, 7)):
            script.append(self._next())
        return script

    def _next(self) -> Action:
        rng, choices = self._rng, [self._forward, self._generate, self._generate]
        if self._turns:
            choices += [*[self._turn] * 4, self._cut, self._fork, self._save] if self._open else [self._open_session]
            choices += [lambda: self._restore(rng.choice(list(self.saved)))] if self.saved else []
        return rng.choice(choices)()

    def _rows(self, batch: int | None = None, *, longest: int = 70) -> Action:
        """Lengths of a batch and where its padding lies."""
        rng = self._rng
        batch = batch or rng.choice((1, 1, 1, 2, 3, 4))
        lengths = [rng.choice((1, 2, 3, rng.randint(1, 9), rng.randint(1, longest))) for _ in range(batch)]
        lengths[rng.randrange(batch)] = rng.choice((1, rng.randint(1, 12), rng.randint(10, longest)))
        spare = rng.choice((0, 0, 0, 1, 5))
        side, mask = rng.choice(("left", "left", "right", "holes")), rng.choice(("long", "bool", "none"))
        return {"rows": lengths, "side": side, "spare": spare, "mask": mask}

    def _forward(self) -> Action:
        rng = self._rng
        action = {"do": "forward", **self._rows(), "seed": rng.getrandbits(31)}
        if not self._turns and action["side"] == "right":
            # Columns that are padding alone count in the plain model's length.
            action["spare"] = 0
        width = max(action["rows"]) + action["spare"]
        kind = rng.choice(("whole", "keep", "columns", "embeds", "tuple", "positions", "continued"))
        if kind == "continued" and not self._turns:
            # The plain model, which is given all at once, rotates the first part by the length of the whole.
            kind = "whole"
        if kind == "keep":
            action["keep"] = rng.choice((1, 1, rng.randint(1, width), width + 3))
        elif kind == "columns":
            action["columns"] = [rng.randrange(-width, width) for _ in range(rng.randint(1, 5))]
        elif kind == "continued":
            # Both parts have tokens.
            action |= {"side": "none", "spare": 0, "split": rng.randint(1, max(action["rows"]))}
        elif kind != "whole":
            action[kind] = True
        return action

    def _generate(self) -> Action:
        rng = self._rng
        action = {"do": "generate", **self._rows(longest=120), "seed": rng.getrandbits(31)}
        action |= self._how(len(action["rows"]))
        options = action["options"]
        if options.get("num_beams") and rng.random() < 0.5:
            options["num_return_sequences"] = rng.randint(1, options["num_beams"])
        if "prompt_lookup_num_tokens" in options:
            return action
        if "prefill_chunk_size" not in options and rng.random() < 0.1:
            options["use_cache"] = False
        if "prefill_chunk_size" not in options and rng.random() < 0.15:
            action |= {"embedded": True, "side": "left"}
        elif rng.random() < 0.15:
            options["max_length"] = max(action["rows"]) + action["spare"] + options.pop("max_new_tokens")
        return action

    def _how(self, batch: int) -> Action:
        """Options of `generate`, and what listens or interferes."""
        rng = self._rng
        options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 7), "pad_token_id": 2, "do_sample": False}
        kind = rng.choice(("greedy", "greedy", "sampled", "beams", "sampled beams"))
        if "sampled" in kind:
            options |= {"do_sample": True, "top_k": rng.choice((0, 5, 30)), "temperature": rng.choice((0.7, 1.0, 2.0))}
            options["top_p"] = rng.choice((1.0, 0.9))
        if "beams" in kind:
            options["num_beams"] = rng.randint(2, 4)
            options |= {"length_penalty": rng.choice((0.0, 1.0, 2.0)), "early_stopping": rng.choice((True, False))}
        if rng.random() < 0.35:
            options["eos_token_id"] = sorted(rng.sample(range(3, 199), 25))
        if rng.random() < 0.15:
            options["repetition_penalty"] = 1.3
        if rng.random() < 0.15:
            options["no_repeat_ngram_size"] = 2
        if rng.random() < 0.15:
            options["min_new_tokens"] = rng.randint(1, options["max_new_tokens"])
        if self._turns and rng.random() < 0.35:
            options["prefill_chunk_size"] = rng.choice((1, 2, 3, 5, 16, 33, 100))
        if self._proposes and batch == 1 and "beams" not in kind and rng.random() < 0.5:
            options |= {"prompt_lookup_num_tokens": rng.choice((1, 3, 10)), "max_new_tokens": rng.randint(1, 20)}
            options.pop("min_new_tokens", None)
        how: Action = {"options": options}
        # Transformers asks at the end of a step, which may be some tokens too late.
        asks = not (options["do_sample"] and "prompt_lookup_num_tokens" in options)
        # Without an end token transformers fills beams that were stopped with tokens that do not exist.
        if asks and rng.random() < 0.2 and ("beams" not in kind or "eos_token_id" in options):
            how["stop_after"] = rng.randint(1, 6)
        if "beams" not in kind and rng.random() < 0.3:
            how["logits"] = True
        if rng.random() < 0.2:
            how["configured"] = True
        if batch == 1 and "beams" not in kind and rng.random() < 0.3:
            how["streamed"] = True
        # Rotary embeddings that follow the length remember how far a call had come that failed, and the plain model,
        # which is not asked for that call, does not.
        if rng.random() < 0.1 and self._turns:
            how["raises"] = rng.randint(1, 3)
        if rng.random() < 0.1:
            how["inference_mode"] = True
        return how

    def _open_session(self) -> Action:
        name = next(self._names)
        self._open[name] = (self._rng.choice((1, 1, 2, 3)), 0)
        return self._turn(name)

    def _turn(self, name: str | None = None) -> Action:
        rng = self._rng
        name = name or rng.choice(list(self._open))
        batch, slots = self._open[name]
        rows = self._rows(batch, longest=80 if slots < 100 else 12)
        if name == self._answered and rng.random() < 0.1:
            # Nothing new: the answer goes on.
            rows = {"rows": [0] * batch, "side": "left", "spare": 0}
        self._answered = name
        action = {"do": "turn", "name": name, **rows, "seed": rng.getrandbits(31), **self._how(batch)}
        slots += max(rows["rows"]) + rows["spare"] + action["options"]["max_new_tokens"]
        self._open[name] = (batch, slots)
        if slots > LONGEST:
            del self._open[name]
        return action

    def _cut(self) -> Action:
        rng, self._answered = self._rng, ""
        return {"do": "cut", "name": rng.choice(list(self._open)), "share": rng.choice((0.0, 1.0, rng.random()))}

    def _fork(self) -> Action:
        name, twin = self._rng.choice(list(self._open)), next(self._names)
        self._open[twin] = self._open[name]
        return {"do": "fork", "name": name, "as": twin}

    def _save(self) -> Action:
        name = self._rng.choice(list(self._open))
        self.saved[name] = self._open[name]
        return {"do": "save", "name": name}

    def _restore(self, name: str) -> Action:
        twin = next(self._names)
        self._open[twin] = self.saved[name]
        return {"do": "restore", "name": name, "as": twin}

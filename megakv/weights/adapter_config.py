"""The settings of an adapter that merging goes by; whatever else in its adapter_config.json changes it is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megakv.base.errors import MegaKVError
from megakv.base.json_files import read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ANYTHING = frozenset(
    "peft_type r lora_alpha rank_pattern alpha_pattern use_rslora use_dora modules_to_save init_lora_weights "
    # Says where the adapter came from, what was trained, or how.
    "base_model_name_or_path revision peft_version task_type inference_mode auto_mapping lora_dropout "
    "target_modules exclude_modules layers_to_transform layers_pattern bias loftq_config eva_config runtime_config "
    "qalora_group_size megatron_core ensure_weight_tying "
    # Goes by the class of a module.
    "fan_in_fan_out".split()
)
"""Keys that may have any value, or are checked."""
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin training that leave the base weights as they are."""
QUANTIFIER, GROUPED = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")
MOST_LETTERS, MOST_REPEATED = 256, 3
"""In a pattern: some take longer than anybody waits."""
MERGE = (
    "merge it where peft is installed: AutoPeftModelForCausalLM.from_pretrained({!r}, dtype='auto').merge_and_unload()"
    ".save_pretrained('MERGED')"
)


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scalings of an adapter's low-rank changes."""

    path: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    """Whether the scaling is ``alpha / sqrt(r)``, not ``alpha / r``."""
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """From an adapter's folder; a `MegaKVError` names what cannot be merged."""
        path = folder / CONFIG_FILE
        values = read_values(path)
        if values.get("peft_type") != "LORA":
            raise _refusal(path, "peft_type", values.get("peft_type"), "allowed: 'LORA', also with use_dora")
        if values.get("init_lora_weights", True) not in STARTS:
            raise _refusal(path, "init_lora_weights", values["init_lora_weights"], "it changed the base weights, too")
        for key, value in values.items():
            if value and key not in ANYTHING:
                raise _refusal(path, key, value, "such an adapter cannot be merged here")
        try:
            return cls(
                path,
                _whole(values["r"]),
                _number(values["lora_alpha"]),
                {str(key): _whole(value) for key, value in (values.get("rank_pattern") or {}).items()},
                {str(key): _number(value) for key, value in (values.get("alpha_pattern") or {}).items()},
                values.get("use_rslora") is True,
                values.get("use_dora") is True,
                tuple(map(str, values.get("modules_to_save") or ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MegaKVError(f"{path}: r, lora_alpha or a pattern is missing or no number ({error})") from error

    def rank_and_scaling(self, module: str) -> tuple[int, float]:
        """The rank of a module's change, and the factor of its product."""
        rank = _matched(self.rank_pattern, module, self.rank)
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)

    def contents(self) -> str:
        """What, beside the adapter's tensors, decides the merged weights."""
        return json.dumps([self.rank, self.alpha, self.rank_pattern, self.alpha_pattern, self.rslora, self.dora])


def read_values(path: Path) -> dict[str, Any]:
    """The object in an adapter_config.json, unchecked."""
    values = read_json(path, str(path))
    if not isinstance(values, dict):
        raise MegaKVError(f"{path} is no adapter's: it holds no object")
    return values


def _matched(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as peft matches them."""
    for pattern, value in patterns.items():
        if len(pattern) > MOST_LETTERS or len(QUANTIFIER.findall(pattern)) > MOST_REPEATED or GROUPED.search(pattern):
            raise MegaKVError(f"{CONFIG_FILE}: pattern {pattern[:80]!r} would take too long to match; name the modules")
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise MegaKVError(f"{CONFIG_FILE}: pattern {pattern!r} is no regular expression: {error}") from error
    return default


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r}: allowed: 1 or more")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return value


def _refusal(path: Path, key: str, value: Any, why: str) -> MegaKVError:
    shown = repr(value)[:80]
    return MegaKVError(f"{path}: {key} = {shown}: {why}; {MERGE.format(str(path.parent))}")

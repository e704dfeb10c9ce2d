"""The JSON of a run: a DeepSpeed inference config plus one ``megakv`` section."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed.inference.config import DeepSpeedInferenceConfig, DtypeEnum
from pydantic import BaseModel, Field, ValidationError, field_serializer, field_validator

from megakv.attention.methods import METHODS as ATTENTION
from megakv.base.errors import CombinationError, repeated
from megakv.base.json_files import read_json
from megakv.base.sections import Section, refusal, shown
from megakv.engine.extensions import import_plugins
from megakv.fairkv.config import FairKVConfig
from megakv.forward.config import ContextParallelConfig
from megakv.offload.config import OffloadConfig
from megakv.offload.method import AUTO, METHODS
from megakv.runahead.config import RunaheadConfig
from megakv.tracking.config import TrackingConfig
from megakv.weights.config import WeightsConfig

_REASONS = {
    "kernel injection replaces the attention that MegaKV provides": "replace_with_kernel_inject",
    "it belongs to kernel injection": "use_triton triton_autotune transposed_mode",
    "weights are placed by megakv.context_parallel and tensor_parallel": "zero",
    "only causal masks are supported": "triangular_masking",
    "weights are quantised by megakv.weights.format only": "quant",
    "pass the model's directory or hub id as the first argument": "checkpoint base_dir checkpoint_config",
    "weights are always loaded straight into their shards": "set_empty_params",
    "checkpoints stay as transformers wrote them": "save_mp_checkpoint_path training_mp_size",
    "layers return what transformers expects": "return_tuple",
    "nothing is replaced": "replace_method",
    "it follows from injection_policy": "injection_policy_tuple",
    "the model's own config is used": "config",
    "there is no workspace to size": "min_out_tokens",
    "MegaKV makes its own groups from megakv.context_parallel.size and tensor_parallel.tp_size": "mpu",
    "experts follow tensor_parallel.tp_size": "moe ep_size ep_group ep_mp_group moe_experts moe_type",
}
REFUSED_KEYS = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
REFUSED_TP_KEYS = ("mpu", "tp_group", "tp_grain_size")


class MegaKVSection(Section):
    """Section ``megakv``."""

    context_parallel: ContextParallelConfig = Field(default_factory=ContextParallelConfig)

    runahead: RunaheadConfig = Field(default_factory=RunaheadConfig)

    load: Literal["checkpoint", "random"] = "checkpoint"
    """``random`` builds the architecture of config.json with random weights, for benchmarks."""

    seed: int = Field(0, ge=0)
    """Seed of the random weights."""

    weights: WeightsConfig = Field(default_factory=WeightsConfig)

    adapter: str | None = Field(None, min_length=1)
    """Folder or hub id of an adapter (peft: LoRA, DoRA) that is merged into the weights as they load."""

    timeout_s: float = Field(600.0, gt=0, le=1e9)
    """Seconds after which a silent rank counts as lost. A dead process is noticed at once."""

    fairkv: FairKVConfig = Field(default_factory=FairKVConfig)

    offload: OffloadConfig = Field(default_factory=OffloadConfig)

    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    plugins: list[str] = Field([])
    """Modules that every rank imports before the JSON is read: they register methods and policies of their own
    (docs/adding.md)."""


class MegaKVConfig(DeepSpeedInferenceConfig):
    """A DeepSpeed inference config with a ``megakv`` section.

    Differences from DeepSpeed's defaults: `dtype` is the checkpoint's own, `max_out_tokens` bounds prompt plus output
    only where it is given, and `enable_cuda_graph` left out leaves it to MegaKV.
    """

    dtype: torch.dtype | None = None

    enable_cuda_graph: bool | None = None
    """Whether steps of decoding are captured in CUDA graphs; None where they can be."""

    megakv: MegaKVSection = Field(default_factory=MegaKVSection)

    @field_validator("dtype", mode="before")
    @classmethod
    def validate_dtype(cls, value: Any) -> torch.dtype | None:
        """DeepSpeed's names for types, and None for the checkpoint's own."""
        if value is None or isinstance(value, torch.dtype):
            return value
        with suppress(ValueError):
            return DtypeEnum.from_str(value).value[0]
        eight = str(value).startswith(("fp8", "float8", "int8"))
        hint = "; weights of 8 bits are megakv.weights.format = 'int8' or 'fp8'" if eight else ""
        raise ValueError(f"allowed: 'fp32', 'bf16' or 'fp16', or null for the checkpoint's own{hint}")

    @field_validator("injection_policy")
    @classmethod
    def _names_by_class(cls, policy: dict[Any, Any] | None) -> dict[Any, Any] | None:
        for kind, given in (policy or {}).items():
            names = (given,) if isinstance(given, str) else given
            named = isinstance(names, list | tuple) and names and all(isinstance(n, str) and n for n in names)
            if not named or not isinstance(kind, str | type):
                example = "{'LlamaDecoderLayer': ['o_proj', 'down_proj']}"
                raise ValueError(f"allowed: names of row-parallel linears by class of decoder layer, as in {example}")
        return policy

    @field_serializer("injection_policy")
    def _by_names(self, policy: dict[Any, Any] | None) -> dict[str, Any] | None:
        """Classes have no place in a JSON."""
        return policy and {kind if isinstance(kind, str) else kind.__name__: names for kind, names in policy.items()}

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree."""
        return int(self.tensor_parallel.tp_size)

    @property
    def cp_size(self) -> int:
        """Context-parallel degree."""
        return int(self.megakv.context_parallel.size)

    def shared_settings(self) -> dict[str, Any]:
        """All settings that must be the same on every rank: without tracking and where a host keeps its files."""
        values: dict[str, Any] = self.model_dump(mode="json", by_alias=True, fallback=str)
        section = values["megakv"]
        del section["tracking"]
        section["adapter"] = section["adapter"] is not None
        for name, key in FILES:
            section[name][key] = section[name].get(key) is not None
        return values


FILES = (
    *(("context_parallel", "profile"), ("context_parallel", "fit"), ("runahead", "table"), ("fairkv", "mapping")),
    *(("fairkv", "importance"), ("offload", "disk_path"), ("offload", "profile")),
)
"""Settings of MegaKV's section that name files and folders, section by section: hosts may have their own."""


def _check_keys(values: dict[Any, Any], source: str, within: str = "") -> None:
    """Only strings: JSON has no other keys, and nothing here is called otherwise."""
    for key, value in values.items():
        if not isinstance(key, str):
            raise ValueError(f"{source}: {within}{key!r} = {value!r}: allowed: keys that are strings, as in JSON")
        # A policy's keys are classes.
        if isinstance(value, dict) and key not in ("injection_policy", "injection_dict"):
            _check_keys(value, source, f"{within}{key}.")


def _unknown_auto(values: dict[str, Any], model: type[BaseModel], within: str = "") -> Iterator[str]:
    """Unknown keys with the value 'auto', which DeepSpeed leaves out unseen; of known ones it means their default."""
    fields = {name: field for key, field in model.model_fields.items() for name in (key, field.alias) if name}
    for key, value in values.items():
        kind = fields[key].annotation if key in fields else None
        if key not in fields and value == "auto":
            allowed = "those" if within else "megakv and those"
            yield f"{within}{key} = 'auto': unknown key; allowed: {allowed} of DeepSpeed's inference config"
        elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
            # MegaKV's own sections refuse what they do not know.
            if kind is not MegaKVSection:
                yield from _unknown_auto(value, kind, f"{within}{key}.")


def read_settings(path: str | Path) -> dict[str, Any]:
    """The object in a configuration's file, unchecked."""
    values = read_json(path, f"config {path}")
    if not isinstance(values, dict):
        raise ValueError(f"config {path} must be a JSON object, not {type(values).__name__}")
    return values


POLICY_NEEDS = {"alg1": ("profile", "profile"), "alg5": ("profile", "profile"), "fitted": ("fit", "fit-policy")}
"""The setting that a policy reads, and the command that writes its file."""


def _not_captured(config: MegaKVConfig) -> str:
    """Why steps of decoding cannot be CUDA graphs whatever the device; empty if they can."""
    section = config.megakv
    if config.cp_size > 1:
        return "messages between context-parallel ranks are not captured"
    if section.offload.enabled:
        return "what is offloaded is brought by the host, step by step"
    if section.fairkv.budget is not None or section.fairkv.mapping is not None:
        return "kept tokens of heads are attended to by kernels that are not captured"
    return ""


def _refusals(config: MegaKVConfig, given: dict[str, Any]) -> Iterator[str | CombinationError]:
    """What is wrong with settings that are right each for itself; `given` is what the user wrote."""
    fields = MegaKVConfig.model_fields
    for key in sorted(config.model_fields_set & REFUSED_KEYS.keys()):
        value = getattr(config, key, None)
        if value != fields[key].get_default(call_default_factory=True) and value:
            name = next((name for name in (key, fields[key].alias) if name in given), key)
            yield f"{name} = {shown(given.get(name))} is not supported with MegaKV: {REFUSED_KEYS[key]}; leave it out"
    parallel, named = config.tensor_parallel, "tensor_parallel"
    for key in sorted(parallel.model_fields_set.intersection(REFUSED_TP_KEYS)):
        yield f"{named}.{key} is not supported with MegaKV: groups and shards follow tp_size"
    if config.enable_cuda_graph and (reason := _not_captured(config)):
        yield f"enable_cuda_graph = true: {reason}; leave it out"
    if parallel.tp_size < 1:
        yield f"{named}.tp_size = {parallel.tp_size}: allowed: 1 or more"
    if not parallel.enabled and parallel.tp_size > 1:
        yield CombinationError(
            "one", f"tensor_parallel.enabled = false contradicts tensor_parallel.tp_size = {parallel.tp_size}"
        )
    if config.dtype is not None and config.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        yield f"dtype = {config.dtype}: allowed: fp32, bf16, fp16"
    context = config.megakv.context_parallel
    key, command = POLICY_NEEDS.get(context.policy, ("size", ""))
    if getattr(context, key) is None:
        yield CombinationError(
            "needs",
            f"megakv.context_parallel.policy = {context.policy!r} needs megakv.context_parallel.{key}: "
            f"a file that megakv {command} --json FILE writes",
        )
    if config.megakv.adapter is not None and config.megakv.load == "random":
        yield CombinationError(
            "one", f"megakv.adapter = {config.megakv.adapter!r} changes a checkpoint's weights; megakv.load is 'random'"
        )
    decode, fairkv = ATTENTION.get(context.decode), config.megakv.fairkv
    travels = decode is not None and not decode.keys_stay and config.cp_size > 1
    if travels and (fairkv.budget is not None or fairkv.mapping is not None):
        yield f"megakv.context_parallel.decode = {context.decode!r} sends keys; megakv.fairkv's stay; allowed: 'auto'"
    yield from _offload_refusals(config.megakv)


def _offload_refusals(section: MegaKVSection) -> Iterator[str | CombinationError]:
    offload = section.offload
    if not offload.enabled:
        switches = {"weights": bool(offload.weights), "num_gpu_batches": offload.groups > 1}
        switches["kv_bits"] = offload.kv_bits is not None
        if "enabled" not in offload.model_fields_set:
            # Switched off by name, the others may stay for later; without it they were meant.
            switches |= dict.fromkeys(sorted(offload.model_fields_set), True)
        for key in (key for key, given in switches.items() if given):
            yield CombinationError("needs", f"megakv.offload.{key} is set: that needs megakv.offload.enabled = true")
        return
    parallel = section.context_parallel
    if offload.weights and parallel.decode == "tensor" and parallel.size > 1:
        yield CombinationError(
            "needs",
            f"megakv.context_parallel.decode = 'tensor' needs all weights where they are computed with: with "
            f"megakv.offload.weights = {offload.weights!r} every rank brings whole layers for its slices; allowed: "
            "'auto', 'replicated' or 'pass_q'",
        )
    if offload.weights == "disk" and not offload.disk_gb:
        yield CombinationError(
            "needs",
            "megakv.offload.weights = 'disk' needs megakv.offload.disk_gb, disk space of each rank in GiB; allowed: as "
            "much as its decoder layers have, or more, or megakv.offload.weights = true",
        )
    recomputes = offload.method != AUTO and METHODS[offload.method].recomputes
    if recomputes and section.runahead.kv == "last" and section.context_parallel.size > 1:
        yield CombinationError(
            "inputs",
            f"megakv.offload.method = {offload.method!r} is not supported with megakv.runahead.kv = 'last': keys and "
            "values go down the chain, the activations that they could be recomputed from do not; allowed: 'stream', "
            "'cpu_rank' or 'auto', or megakv.runahead.kv = 'sharded'",
        )


def load_config(config: MegaKVConfig | dict[str, Any] | str | Path | None = None, **overrides: Any) -> MegaKVConfig:
    """Read and check a configuration: the JSON's content, its file, or what an earlier call returned.

    `overrides` are further keys, as `deepspeed.init_inference` takes them; they may not contradict the JSON's. A
    ValueError names the offending key, its value and what is allowed.
    """
    if isinstance(config, MegaKVConfig):
        if overrides:
            raise ValueError(
                f"{', '.join(overrides)}: arguments beside a MegaKVConfig are not supported; put them in it"
            )
        return config
    if config is None or isinstance(config, dict):
        source, values = "config", dict(config or {})
        _check_keys(values, source)
    elif isinstance(config, str | Path):
        source, values = str(config), read_settings(config)
    else:
        raise ValueError(f"config must be a dict or the path of a JSON file, not {type(config).__name__}")
    for key, value in overrides.items():
        if key in values and values[key] != value:
            raise CombinationError(
                "one", f"{source}: {key} = {values[key]!r} contradicts the argument {key} = {value!r}"
            )
        values[key] = value
    section = values.get("megakv")
    if isinstance(section, dict) and "plugins" in section:
        import_plugins(section["plugins"], source)
    for problem in _unknown_auto(values, MegaKVConfig):
        raise ValueError(f"{source}: {problem}")
    try:
        parsed = MegaKVConfig(**values)
    except ValidationError as error:
        entries = error.errors()
        causes = (entry.get("ctx", {}).get("error") for entry in entries)
        lines = (f"{source}: {refusal(entry, MegaKVConfig)}" for entry in entries)
        raise repeated("\n".join(lines), *causes) from None
    except AssertionError as error:
        raise ValueError(f"{source}: {error}") from None
    parallel = parsed.megakv.context_parallel
    parsed.megakv.runahead.check(parallel.size, prefill=parallel.prefill, decode=parallel.decode, source=source)
    for refused in _refusals(parsed, values):
        raise repeated(f"{source}: {refused}", refused)
    return parsed

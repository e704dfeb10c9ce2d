"""The folder of a model, the user's own or its copy in the hub's cache; its config, and the class that this names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from huggingface_hub import constants, model_info, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _get_model_class

from megakv.base.errors import MegaKVError
from megakv.base.json_files import read_json
from megakv.weights.adapter_config import CONFIG_FILE as ADAPTER_FILE
from megakv.weights.adapter_config import WEIGHTS_FILE as ADAPTER_WEIGHTS
from megakv.weights.adapter_config import read_values
from megakv.weights.files import stored_dtype
from megakv.weights.gguf import SUFFIX, gguf_directory

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
ANSWER_S = 5.0
"""How long the hub may take for its first answer: without a network nobody should wait for it."""


def local_directory(model: str | Path, *, weights: bool = True) -> Path:
    """The directory of a model: itself, what a GGUF file is converted to, or its copy in the hub's cache.

    That copy is of small files alone without `weights`. An adapter's folder stands for its base model's.
    """
    path = Path(model).expanduser()
    if path.suffix == SUFFIX and not path.is_dir():
        return gguf_directory(path)
    found = _directory(model, (*SMALL_FILES, *(["model*.safetensors"] if weights else [])))
    if (found / ADAPTER_FILE).is_file() and not (found / CONFIG_FILE).is_file():
        return _base_directory(found, weights=weights)
    return found


def _directory(model: str | Path, patterns: Sequence[str]) -> Path:
    """A directory itself, or the copy of such files in the hub's cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if path.is_file():
        raise MegaKVError(f"model {name!r} is a file; give the folder in which its config.json and weights lie")
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise MegaKVError(f"model {name!r} is no directory; give a directory with config.json, or a hub id")
    problem: Exception | None = None
    if not constants.HF_HUB_OFFLINE:
        try:
            # The download waits for ever for a hub that does not answer, so one that does is made sure of first.
            model_info(name, timeout=ANSWER_S)
            return Path(snapshot_download(name, allow_patterns=[*patterns]))
        except Exception as error:  # the hub's client raises a dozen unrelated types, httpx's among them
            problem = error
    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns], local_files_only=True))
    except Exception as error:
        raise MegaKVError(
            f"model {name!r} is no directory here, and the hub's cache has none: {_reason(problem)}"
        ) from (problem or error)


def _reason(problem: Exception | None) -> str:
    """Why the hub gave nothing, and what would work."""
    if problem is None:
        return "HF_HUB_OFFLINE forbids to ask the hub; give a directory, or unset it"
    first = (str(problem).splitlines() or [""])[0] or type(problem).__name__
    if isinstance(problem, HfHubHTTPError):
        return f"the hub says {first!r}; check the spelling, or log in (hf auth login) where access is restricted"
    if isinstance(problem, HFValidationError):
        return first
    return f"the hub cannot be reached ({first}); give a directory, or a model that was fetched before"


def read_config(place: Path) -> PreTrainedConfig:
    """The config of a checkpoint directory, or of such a file itself: that of the model which answers in text.

    It names the type of the weights, their own where config.json has none.
    """
    path = place if place.is_file() else place / CONFIG_FILE
    if not path.is_file():
        near = sorted(found.parent for inner in ("*", "snapshots/*") for found in place.glob(f"{inner}/{CONFIG_FILE}"))
        hint = f"; did you mean {near[0]}?" if near else ""
        raise MegaKVError(f"{place} has no {CONFIG_FILE}, so it is no Hugging Face model{hint}")
    values = read_json(path, str(path))
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise MegaKVError(f"{path} is no model's: it has no 'model_type', a text such as 'llama'")
    if kind not in CONFIG_MAPPING:
        names = get_close_matches(kind, CONFIG_MAPPING, n=3)
        hint = f"did you mean {' or '.join(map(repr, names))}?" if names else "code beside a model is never run"
        raise MegaKVError(f"{path}: model_type = {kind!r} is none that transformers knows; {hint}")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # each config's own checks raise what they like
        reason = " ".join(str(error).split())
        raise MegaKVError(f"{path} describes no model that transformers knows: {reason}") from error
    found = find_class(config)
    config = config if found is None else found[1]
    text = config.get_text_config()
    config.dtype = text.dtype = config.dtype or text.dtype or stored_dtype(path.parent)
    return config


def find_class(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig] | None:
    """The class, and the config that it is made of; None where transformers has none.

    As `AutoModelForCausalLM` chooses, which takes the text model alone where that is a class of its own. Where it has
    none for models of images and text, the whole is taken, and given text.
    """
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            family = _get_model_class(config, auto._model_mapping)
            text = config.get_text_config()
            if text is not config and getattr(family, "config_class", None) is type(text):
                quantised = getattr(config, "quantization_config", None)
                if quantised is not None:
                    text.quantization_config = quantised
                return family, text
            return family, config
    return None


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a model of this config; a ValueError where transformers has none."""
    found = find_class(config)
    if found is None:
        raise ValueError(
            f"model type {config.model_type!r} ({type(config).__name__}) is not supported: transformers has no causal "
            "language model of it"
        )
    return found[0]


def adapter_directory(model: str | Path, adapter: str | Path | None) -> Path | None:
    """The directory of the adapter that a model is to be changed by: the one given, or the model's own name.

    A `MegaKVError` where that is no adapter, or the model's folder holds one beside weights, of which nothing was said.
    """
    if isinstance(model, Path) or Path(model).suffix != SUFFIX:
        own = _directory(model, SMALL_FILES)
        if (own / ADAPTER_FILE).is_file():
            if not (own / CONFIG_FILE).is_file():
                if adapter is None:
                    return _directory(model, (*SMALL_FILES, ADAPTER_WEIGHTS))
                raise MegaKVError(
                    f"model {str(model)!r} is an adapter, and so is {str(adapter)!r}: give one, and a model"
                )
            if adapter is None:
                raise MegaKVError(
                    f"{own} holds a model and an adapter: set megakv.adapter (--adapter) to {str(model)!r} to apply "
                    f"it, or remove {ADAPTER_FILE} to serve the model alone"
                )
    if adapter is None:
        return None
    folder = _directory(adapter, (*SMALL_FILES, ADAPTER_WEIGHTS))
    for name in (ADAPTER_FILE, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise MegaKVError(
                f"megakv.adapter = {str(adapter)!r} has no {name}: allowed: a folder that peft's save_pretrained wrote"
            )
    return folder


def _base_directory(adapter: Path, *, weights: bool) -> Path:
    """The directory of the model that an adapter says it is of."""
    base = read_values(adapter / ADAPTER_FILE).get("base_model_name_or_path")
    try:
        if not isinstance(base, str) or not base or (Path(base) / ADAPTER_FILE).is_file():
            raise MegaKVError("that names no model")
        return local_directory(base, weights=weights)
    except MegaKVError as error:
        raise MegaKVError(
            f"{adapter} is an adapter, of base_model_name_or_path = {base!r}: {error}; give that model, and "
            f"megakv.adapter (--adapter) = {str(adapter)!r}"
        ) from error


def read_generation_config(directory: Path) -> GenerationConfig:
    """The defaults of `generate` in a checkpoint directory; older ones have them in config.json."""
    own = (directory / GENERATION_FILE).is_file()
    name = GENERATION_FILE if own else CONFIG_FILE
    try:
        return GenerationConfig.from_pretrained(directory, config_file_name=name, _from_model_config=not own)
    except Exception as error:  # transformers raises what its checks and the JSON's reader do
        reason = " ".join(str(error).split())
        raise MegaKVError(
            f"{directory / name} holds no defaults of generate: {reason}; correct or remove it"
        ) from error

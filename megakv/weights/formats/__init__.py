"""How weights are stored: one file a format, one line of the registry."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from megakv.base.registry import Registry
from megakv.weights.formats.format import LoadRequest, WeightFormat, quantization_of

AS_STORED = "as_stored"
"""The setting of whoever takes weights in the form in which they come."""
PLAIN = "plain"
AT_LOAD = ("int8", "q4_1", "fp8")
"""Formats that plain weights can be brought into as they are read; listed here, as nobody else needs to load them."""
FORMATS: Registry[type[WeightFormat]] = Registry(
    "weight format",
    {
        "int8": "megakv.weights.formats.blocks_at_load:Int8Format",
        "q4_1": "megakv.weights.formats.blocks_at_load:Q41Format",
        "fp8": "megakv.weights.formats.fp8:Fp8Format",
        # The first that recognises a folder takes it; others are not loaded.
        PLAIN: "megakv.weights.formats.format:PlainFormat",
        "gguf": "megakv.weights.formats.gguf:GgufFormat",
    },
)
QUANTISED: Registry[type[WeightFormat]] = Registry(
    "format of quantised weights",
    {
        "fp8_blocks": "megakv.weights.formats.fp8_blocks:Fp8BlocksFormat",
        "mxfp4": "megakv.weights.formats.mxfp4:Mxfp4Format",
        "gptq": "megakv.weights.formats.packed_integers:GptqFormat",
        "awq": "megakv.weights.formats.packed_integers:AwqFormat",
        "compressed_tensors": "megakv.weights.formats.compressed_tensors:CompressedTensorsFormat",
        # The last one takes what no other has recognised.
        "transformers": "megakv.weights.formats.transformers:TransformersFormat",
    },
)
"""Formats of folders whose config.json has a quantization_config."""
OWN = frozenset([*FORMATS, *QUANTISED])


def register(kind: type[WeightFormat]) -> None:
    """Add a format of others, by its name: one that is made at load, or one that recognises quantised folders."""
    (FORMATS if kind.at_load else QUANTISED).register(kind.name, kind)


def at_load() -> tuple[str, ...]:
    """Names of all formats that plain weights can be brought into as they are read."""
    return (*AT_LOAD, *(name for name in FORMATS if name not in OWN))


def settings() -> tuple[str, ...]:
    """Values of ``megakv.weights.format``."""
    return (AS_STORED, *at_load())


def check_plain(config: PreTrainedConfig) -> None:
    """Refuse random weights for a config of quantised ones."""
    if quantization_of(config):
        raise ValueError(
            f"megakv.load = 'random' makes plain weights, but config.json of model type {config.model_type!r} has a "
            "quantization_config: remove that from it"
        )


def choose_format(setting: str, directory: Path | None = None, config: PreTrainedConfig | None = None) -> WeightFormat:
    """The format of a model's weights on its ranks: that of its folder, or the one that plain weights are to take.

    Without a `directory` weights are plain: those of a module, or random ones. A ValueError where a setting would
    quantise what is quantised already.
    """
    stored = FORMATS[PLAIN]
    if directory is not None and config is not None:
        registry = QUANTISED if quantization_of(config) else FORMATS
        # Formats of others are asked first: the last one of these here takes whatever there is.
        names = sorted((name for name in registry if name not in at_load()), key=OWN.__contains__)
        kinds = (registry[name] for name in names)
        stored = next(kind for kind in kinds if kind.recognises(directory, config))
    elif config is not None:
        check_plain(config)
    if setting == AS_STORED:
        return stored(directory)
    chosen = FORMATS[setting](directory)
    held = stored(directory)
    if held.quantised is not None:
        raise ValueError(
            f"megakv.weights.format = {setting!r}: {held.origin} holds quantised weights already ({held.quantised}); "
            f"leave it out, or give {AS_STORED!r}"
        )
    return chosen


__all__ = ["AS_STORED", "FORMATS", "QUANTISED", "LoadRequest", "WeightFormat", "choose_format", "settings"]

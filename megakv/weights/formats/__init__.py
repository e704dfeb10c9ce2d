"""How weights are stored: one file a format, one line of the registry."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from megakv.base.registry import Registry
from megakv.weights.formats.format import LoadRequest, WeightFormat

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
        "gguf": "megakv.weights.formats.gguf:GgufFormat",
        # The last one takes what no other has recognised.
        PLAIN: "megakv.weights.formats.format:PlainFormat",
    },
)


def settings() -> tuple[str, ...]:
    """Values of ``megakv.weights.format``."""
    return (AS_STORED, *AT_LOAD)


def check_plain(config: PreTrainedConfig) -> None:
    """Refuse a config of quantised weights that no format has recognised."""
    configs = (config, config.get_text_config())
    quantised = next((found for each in configs if (found := getattr(each, "quantization_config", None))), None)
    if quantised is not None:
        method = (quantised if isinstance(quantised, dict) else vars(quantised)).get("quant_method", "")
        raise ValueError(
            f"model type {config.model_type!r} with quantization_config ({method}) is not supported: MegaKV computes "
            "with unquantised weights; use a checkpoint in bfloat16, float16 or float32"
        )


def choose_format(setting: str, directory: Path | None = None, config: PreTrainedConfig | None = None) -> WeightFormat:
    """The format of a model's weights on its ranks: that of its folder, or the one that plain weights are to take.

    Without a `directory` weights are plain: those of a module, or random ones. A ValueError where a setting would
    quantise what is quantised already.
    """
    stored = FORMATS[PLAIN]
    if directory is not None and config is not None:
        kinds = (FORMATS[name] for name in FORMATS if name not in AT_LOAD)
        stored = next(kind for kind in kinds if kind.recognises(directory, config))
    if stored is FORMATS[PLAIN] and config is not None:
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


__all__ = ["AS_STORED", "FORMATS", "LoadRequest", "WeightFormat", "choose_format", "settings"]

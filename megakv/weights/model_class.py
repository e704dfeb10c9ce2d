"""The class of transformers that answers in text with a model of some config."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _get_model_class


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

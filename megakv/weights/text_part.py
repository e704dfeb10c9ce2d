"""The part of a model of several senses that answers text: the rest is neither read nor kept."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel


def beside_text(model: PreTrainedModel) -> Iterator[str]:
    """Names of the modules, the outermost alone, that no pass over text enters: towers for images, video and sound, and
    what projects their results.

    They stand beside the way from the model to its decoder, and the output head is not in them.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    way = next((name for name, module in model.named_modules() if module is decoder), "")
    if model.config.get_text_config() is model.config or not way:
        return
    at: nn.Module = model
    above = ""
    for step in way.split("."):
        for name, child in at.named_children():
            if name != step and all(module is not head for module in child.modules()):
                yield above + name
        at, above = at.get_submodule(step), f"{above}{step}."


class LeftOut(nn.Module):
    """Stands where a model has a part that no pass over text enters."""


def leave_other_senses(model: PreTrainedModel) -> None:
    """Take out of a model the modules that no pass over text enters, with their weights."""
    for name in list(beside_text(model)):
        model.set_submodule(name, LeftOut())

"""A bar over the layers of the prefill, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from tqdm import tqdm


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules: a causal language model's decoder layers."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


@contextmanager
def prefill_bar(model: nn.Module, *, shown: bool) -> Iterator[None]:
    """Show how many layers of the first forward pass are done.

    Parameters
    ----------
    model : nn.Module
    shown : bool
        False on all ranks but one.
    """
    layers = decoder_layers(model)
    bar = tqdm(total=len(layers), desc="prefill", unit="layer", disable=not shown, leave=True)
    handles: list[Any] = []

    def finish() -> None:
        while handles:
            handles.pop().remove()
        bar.close()

    def count(*_: Any) -> None:
        bar.update(1)
        if bar.n >= len(layers):
            finish()

    if shown:
        handles += [layer.register_forward_hook(count) for layer in layers]
    try:
        yield
    finally:
        finish()

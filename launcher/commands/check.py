"""``megakv check``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("config", help="the JSON of a run, or the folder or GGUF file of a model")
    parser.add_argument("--json", dest="result_file", help="write the result to this file")


def _model(model: str) -> dict[str, Any]:
    """How a model's weights are stored, and on which meshes they can be; what they lack is a ValueError."""
    import torch

    from megakv.weights.folder import local_directory, read_config
    from megakv.weights.formats import AS_STORED, FORMATS, QUANTISED, LoadRequest, choose_format

    directory = local_directory(model)
    config = read_config(directory)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form = choose_format(AS_STORED, directory, config)
    form.check(LoadRequest(device, None), config)
    cut = True
    try:
        choose_format(AS_STORED, directory, config).check(LoadRequest(device, None, tp_size=2), config)
    except ValueError:
        cut = False
    return {
        "model": model,
        "model_type": config.model_type,
        "dtype": str(config.dtype).removeprefix("torch."),
        "format": form.name,
        "quantised": form.quantised,
        "weights_can_be_cut": cut,
        "formats": [*FORMATS, *QUANTISED],
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ranks that a JSON wants, what it may name, and all its settings; or how a model's weights are stored."""
    path = Path(arguments.config)
    if path.is_dir() or path.suffix == ".gguf":
        return _model(arguments.config)
    from megakv.base.sections import registered
    from megakv.engine.config import MegaKVSection, load_config
    from megakv.engine.named_files import check_files

    config = load_config(arguments.config)
    check_files(config)
    return {
        "config": arguments.config,
        "ranks": config.cp_size * config.tp_size,
        "context_parallel": config.cp_size,
        "tensor_parallel": config.tp_size,
        "methods": registered(MegaKVSection, "megakv"),
        "settings": config.megakv.model_dump(mode="json", by_alias=True),
    }

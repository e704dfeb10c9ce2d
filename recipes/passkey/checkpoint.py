"""Checkpoints and the plain log of a training run: safetensors, JSON and CSV, never pickle."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

LOG_FIELDS = ("step", "phase", "length", "loss", "number_loss", "prose_loss", "accuracy", "lr", "tokens", "seconds")


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, progress: dict) -> None:
    """Write a checkpoint: safetensors and JSON, complete or not there at all.

    Parameters
    ----------
    path : Path
        Folder to write; an older one there is replaced.
    model : LlamaForCausalLM
        The model, unwrapped.
    optimizer : torch.optim.Optimizer
        Its optimizer, made by :func:`make_optimizer`.
    progress : dict
        Plain numbers that say where training stands.
    """
    temporary, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    moments = {
        f"{index}.{name}": value.detach().contiguous()
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    save_file(moments, temporary / "optimizer.safetensors")
    (temporary / "progress.json").write_text(json.dumps(progress, indent=1))
    # Where an earlier save was killed between its renames, the old one is still the only whole checkpoint.
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> dict:
    """Read what :func:`save_checkpoint` wrote into a model and its optimizer.

    Parameters
    ----------
    path : Path
        The checkpoint's folder.
    model : LlamaForCausalLM
        The model, unwrapped.
    optimizer : torch.optim.Optimizer
        Its optimizer.

    Returns
    -------
    dict
        The progress.
    """
    # Killed between its two renames, a save leaves the older checkpoint under this name.
    path = path if path.exists() else path.with_name(path.name + ".old")
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint to resume from in {path.parent}")
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in load_file(path / "optimizer.safetensors").items():
        index, name = key.split(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return json.loads((path / "progress.json").read_text())


class TrainingLog:
    """The plain log, one CSV line per step.

    Parameters
    ----------
    path : Path
        The file.
    keep : int
        Lines of steps below this are kept; later ones belong to a run that stopped before its next checkpoint.
    """

    def __init__(self, path: Path, keep: int) -> None:
        rows = []
        if path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) < keep]
        self.file = path.open("w", newline="")
        self.writer = csv.DictWriter(self.file, LOG_FIELDS, lineterminator="\n")
        self.writer.writeheader()
        self.writer.writerows(rows)

    def write(self, row: dict[str, float]) -> None:
        """Add a line.

        Parameters
        ----------
        row : dict
            A value for each of ``LOG_FIELDS``.
        """
        self.writer.writerow(row)
        self.file.flush()

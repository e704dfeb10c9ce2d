"""Train the pass-key model: one command, resumable, W&B offline.

Usage: ``python recipes/passkey/train.py --output DIR [--resume]``
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from checkpoint import TrainingLog, load_checkpoint, save_checkpoint
from curriculum import CURRICULUM, build_batch, learning_rate
from examples import NUMBER, ExampleBuilder
from task import MODEL_DIR, load_tokenizer
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

PROSE_WEIGHT = 0.1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def model_config(vocabulary: int, end: int) -> LlamaConfig:
    """Describe the model.

    Parameters
    ----------
    vocabulary : int
        Number of tokens.
    end : int
        The end-of-text token.

    Returns
    -------
    LlamaConfig
        Four layers, eight query heads over four KV heads.
    """
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=16384,
        # Slow enough that half of each head's dimensions hardly turn over the whole context.
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        dtype="float32",
    )


class RetrievalLoss(torch.nn.Module):
    """The model and its loss as one module, so that every launcher of accelerate can wrap it.

    Parameters
    ----------
    model : LlamaForCausalLM
        The model.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the model on a batch.

        Parameters
        ----------
        ids, labels, kinds : torch.Tensor
            From :func:`curriculum.build_batch`.

        Returns
        -------
        dict of str to torch.Tensor
            ``loss`` to minimise, its parts ``number_loss`` and ``prose_loss``, and ``accuracy``, the share of tokens
            of repeated numbers and of what ends an answer that are right.
        """
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        # Logits of tokens outside the loss would cost more than the layers of a short sequence.
        chosen = kinds > 0
        logits = self.model.lm_head(hidden[chosen]).float()
        labels, is_number = labels[chosen], kinds[chosen] == NUMBER
        losses = cross_entropy(logits, labels, reduction="none")
        number_loss = losses[is_number].mean()
        prose_loss = losses[~is_number].sum() / (~is_number).sum().clamp(min=1)
        accuracy = (logits.argmax(-1) == labels)[is_number].float().mean()
        return {
            "loss": number_loss + PROSE_WEIGHT * prose_loss,
            "number_loss": number_loss.detach(),
            "prose_loss": prose_loss.detach(),
            "accuracy": accuracy,
        }


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Make the optimizer.

    Parameters
    ----------
    model : LlamaForCausalLM
        The model.

    Returns
    -------
    torch.optim.Optimizer
        AdamW, with weight decay on matrices only.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


class StopSignal:
    """Remember a Ctrl-C until the step under way is done, so that the checkpoint is whole; a second one kills."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, signal.default_int_handler)


def train(output: Path, resume: bool, seed: int, save_every: int) -> None:
    """Run the curriculum and save the model.

    Parameters
    ----------
    output : Path
        Folder for the checkpoint, the log, the W&B files and the finished model.
    resume : bool
        Go on from the checkpoint in ``output``.
    seed : int
        Seed of the weights and the texts.
    save_every : int
        Steps between checkpoints.
    """
    checkpoint = output / "checkpoint"
    if checkpoint.exists() and not resume:
        raise SystemExit(f"{output} has a checkpoint: go on with --resume, or choose another folder")
    output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_MODE", "offline")
    accelerator = Accelerator(log_with="wandb", project_dir=output)
    set_seed(seed)
    tokenizer = load_tokenizer()
    builder = ExampleBuilder(tokenizer)
    plain = LlamaForCausalLM(model_config(len(tokenizer), tokenizer.eos_token_id))
    model, optimizer = accelerator.prepare(RetrievalLoss(plain), make_optimizer(plain))
    progress: dict[str, Any] = {"step": 0, "phase": 0, "step_in_phase": 0, "recent": 0.0, "tokens": 0, "seconds": 0.0}
    if resume:
        progress = load_checkpoint(checkpoint, plain, optimizer)
    accelerator.init_trackers("megakv-passkey", init_kwargs={"wandb": {"dir": str(output)}})
    main = accelerator.is_main_process
    log = TrainingLog(output / "training_log.csv", progress["step"]) if main else None
    bar = tqdm(initial=progress["step"], unit="step", disable=not main)
    stop = StopSignal()
    while progress["phase"] < len(CURRICULUM) and not stop.received:
        row = train_step(accelerator, model, optimizer, builder, progress, seed)
        accelerator.log(row, step=row["step"])
        bar.update()
        bar.set_postfix(length=row["length"], loss=f"{row['loss']:.3f}", right=f"{progress['recent']:.3f}")
        if log:
            log.write(row)
            if progress["step"] % save_every == 0:
                save_checkpoint(checkpoint, plain, optimizer, progress)
    bar.close()
    if main:
        save_checkpoint(checkpoint, plain, optimizer, progress)
        if stop.received:
            print("stopped; go on with --resume")
        else:
            plain.save_pretrained(output / "model")
            for file in TOKENIZER_FILES:
                shutil.copyfile(MODEL_DIR / file, output / "model" / file)
            print(f"finished after {progress['seconds']:.0f} s of steps; the model is in {output / 'model'}")
    accelerator.end_training()


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    builder: ExampleBuilder,
    progress: dict[str, Any],
    seed: int,
) -> dict[str, float]:
    """Do one step and bring ``progress`` up to date.

    Parameters
    ----------
    accelerator : Accelerator
        Holds the devices.
    model : torch.nn.Module
        The :class:`RetrievalLoss`, prepared.
    optimizer : torch.optim.Optimizer
        Its optimizer, prepared.
    builder : ExampleBuilder
        Source of sequences.
    progress : dict
        Where training stands; changed in place.
    seed : int
        Seed of the texts.

    Returns
    -------
    dict
        The log line of this step.
    """
    began = time.perf_counter()
    phase = CURRICULUM[progress["phase"]]
    lr = learning_rate(phase, progress["step_in_phase"], progress["step"])
    for group in optimizer.param_groups:
        group["lr"] = lr
    # Texts depend on the step alone, so a resumed run sees the ones that an unbroken run sees.
    rng = np.random.default_rng([seed, progress["step"], accelerator.process_index])
    batch = {name: value.to(accelerator.device) for name, value in build_batch(builder, phase, rng).items()}
    result = model(**batch)
    accelerator.backward(result["loss"])
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    values = {name: accelerator.reduce(value.detach(), "mean").item() for name, value in result.items()}
    progress["recent"] += 0.03 * (values["accuracy"] - progress["recent"])
    progress["tokens"] += batch["ids"].numel() * accelerator.num_processes
    progress["seconds"] += time.perf_counter() - began
    row = {
        "step": progress["step"],
        "phase": progress["phase"],
        "length": batch["ids"].shape[1],
        **values,
        "lr": lr,
        "tokens": progress["tokens"],
        "seconds": round(progress["seconds"], 2),
    }
    progress["step"] += 1
    progress["step_in_phase"] += 1
    done = progress["step_in_phase"]
    if done >= phase.max_steps or (done >= phase.min_steps and progress["recent"] >= phase.target):
        progress.update(phase=progress["phase"] + 1, step_in_phase=0, recent=0.0)
    return row


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for checkpoint, log and model")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and texts")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args.output, args.resume, args.seed, args.save_every)


if __name__ == "__main__":
    main()

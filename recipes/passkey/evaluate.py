"""Measure the pass-key model: exact answers by depth and length, with plain transformers and held-out prose.

Usage: ``python recipes/passkey/evaluate.py [--training-log DIR/training_log.csv]``
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from task import MODEL_DIR, conversation, is_correct, load_tokenizer, prompt
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

RESULTS_DIR = Path(__file__).resolve().parent / "results"
DEPTH_BINS = 10
# Prompts per depth bin, by length in tokens.
PROMPTS = {64: 10, 128: 10, 512: 10, 1024: 10, 2048: 10, 4096: 30, 6144: 5, 8192: 5}
CONVERSATIONS = {512: 20, 4096: 20}
NEW_TOKENS = 12


class Answerer:
    """Continue token sequences greedily.

    Parameters
    ----------
    model_dir : Path
        The model's folder.
    """

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(model_dir)
        self.model = LlamaForCausalLM.from_pretrained(model_dir).eval()

    def continue_ids(self, ids: list[int]) -> list[int]:
        """Continue one sequence.

        Parameters
        ----------
        ids : list of int
            The sequence.

        Returns
        -------
        list of int
            The new tokens, the end-of-text token included if it was reached.
        """
        inputs = torch.tensor([ids])
        generated = self.model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        return generated[0, len(ids) :].tolist()

    def text(self, ids: list[int]) -> str:
        """Decode new tokens.

        Parameters
        ----------
        ids : list of int
            The tokens.

        Returns
        -------
        str
            Their text.
        """
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def measure_prompts(answerer: Answerer, rng: np.random.Generator, scale: float) -> Iterator[dict[str, float]]:
    """Ask for keys at every length and depth.

    Parameters
    ----------
    answerer : Answerer
        The model.
    rng : numpy.random.Generator
        Source of randomness.
    scale : float
        Share of the usual number of prompts, for a quick look.

    Yields
    ------
    dict
        Length, depth bin, number of prompts, of exact numbers and of answers that also stop where they should.
    """
    for length, count in PROMPTS.items():
        for depth_bin in tqdm(range(DEPTH_BINS), desc=f"{length} tokens"):
            exact = stopped = 0
            prompts = max(1, round(count * scale))
            for _ in range(prompts):
                asked = prompt(length, (depth_bin + float(rng.random())) / DEPTH_BINS, rng, answerer.tokenizer)
                new = answerer.continue_ids(list(asked.ids))
                right = is_correct(answerer.text(new), asked.number)
                exact += right
                stopped += right and new[-1] == answerer.tokenizer.eos_token_id
            yield {"length": length, "depth_bin": depth_bin, "prompts": prompts, "exact": exact, "stopped": stopped}


def measure_conversations(answerer: Answerer, rng: np.random.Generator, scale: float) -> Iterator[dict[str, float]]:
    """Give the key in the first of four turns and ask after the second and in the last.

    Parameters
    ----------
    answerer : Answerer
        The model.
    rng : numpy.random.Generator
        Source of randomness.
    scale : float
        Share of the usual number of conversations.

    Yields
    ------
    dict
        Length, whether the end-of-text token stays between the turns, number of questions and of exact answers.
    """
    for length, count in CONVERSATIONS.items():
        for keep_end in (False, True):
            questions = exact = 0
            for _ in tqdm(range(max(1, round(count * scale))), desc=f"conversations of {length} tokens"):
                talk = conversation(length, rng, answerer.tokenizer)
                ids: list[int] = []
                for turn, ask in zip(talk.turns, talk.asks, strict=True):
                    ids += answerer.tokenizer(turn)["input_ids"]
                    if not ask:
                        continue
                    new = answerer.continue_ids(ids)
                    questions += 1
                    exact += is_correct(answerer.text(new), talk.number)
                    ids += new if keep_end else [token for token in new if token != answerer.tokenizer.eos_token_id]
            yield {"length": length, "end_kept": keep_end, "questions": questions, "exact": exact}


def accuracy_table(cells: list[dict], conversations: list[dict]) -> str:
    """Write the results as Markdown.

    Parameters
    ----------
    cells : list of dict
        From :func:`measure_prompts`.
    conversations : list of dict
        From :func:`measure_conversations`.

    Returns
    -------
    str
        Two tables.
    """
    step = 100 // DEPTH_BINS
    heads = [f"{step * index}-{step * (index + 1)}%" for index in range(DEPTH_BINS)]
    lines = [
        "Exact answers by length (rows, tokens) and depth of the key (columns), in percent:",
        "",
        "| tokens | prompts | all depths | " + " | ".join(heads) + " |",
        "|---:" * (DEPTH_BINS + 3) + "|",
    ]
    for length in sorted({cell["length"] for cell in cells}):
        row = [cell for cell in cells if cell["length"] == length]
        prompts, exact = (sum(cell[name] for cell in row) for name in ("prompts", "exact"))
        shares = [f"{100 * cell['exact'] / cell['prompts']:.0f}" for cell in row]
        lines.append(f"| {length} | {prompts} | {100 * exact / prompts:.1f} | " + " | ".join(shares) + " |")
    lines += [
        "",
        "Four-turn conversations, the key in the first turn, asked for after the second and in the last:",
        "",
        "| tokens | end-of-text token kept | questions | exact, percent |",
        "|---:|:---:|---:|---:|",
    ]
    for talks in conversations:
        kept, share = "yes" if talks["end_kept"] else "no", 100 * talks["exact"] / talks["questions"]
        lines.append(f"| {talks['length']} | {kept} | {talks['questions']} | {share:.1f} |")
    return "\n".join(lines) + "\n"


def draw_accuracy(cells: list[dict], path: Path) -> None:
    """Draw the accuracy by depth and length.

    Parameters
    ----------
    cells : list of dict
        From :func:`measure_prompts`.
    path : Path
        PNG to write.
    """
    from matplotlib import pyplot as plt

    lengths = sorted({cell["length"] for cell in cells})
    grid = np.zeros((len(lengths), DEPTH_BINS))
    for cell in cells:
        grid[lengths.index(cell["length"]), cell["depth_bin"]] = 100 * cell["exact"] / cell["prompts"]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if value < 60 else "black")
    axes.set_xticks(range(DEPTH_BINS), [f"{(index + 0.5) / DEPTH_BINS:.0%}" for index in range(DEPTH_BINS)])
    axes.set_yticks(range(len(lengths)), lengths)
    axes.set(xlabel="depth of the key", ylabel="prompt, tokens", title="Exact answers, percent")
    figure.colorbar(image)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_training(log: Path, path: Path) -> None:
    """Draw the training log.

    Parameters
    ----------
    log : Path
        CSV written by ``train.py``.
    path : Path
        PNG to write.
    """
    from matplotlib import pyplot as plt

    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    figure, axes = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for name in ("number_loss", "prose_loss"):
        axes[0].plot(steps, [float(row[name]) for row in rows], lw=0.6, label=name.replace("_", " "))
    axes[0].set(yscale="log", ylabel="loss, nats per token")
    axes[0].legend()
    points = axes[1].scatter(
        steps, [100 * float(row["accuracy"]) for row in rows], s=3, c=[np.log2(int(row["length"])) for row in rows]
    )
    axes[1].set(xlabel="step", ylabel="repeated digits right, percent")
    figure.colorbar(points, ax=axes[1], label="log2 of length, tokens")
    for before, after in pairwise(rows):
        if before["phase"] != after["phase"]:
            for panel in axes:
                panel.axvline(int(after["step"]), color="grey", lw=0.5)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Evaluate from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model")
    parser.add_argument("--output", type=Path, default=RESULTS_DIR, help="folder for the results")
    parser.add_argument("--training-log", type=Path, help="training log to copy and draw")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of prompts")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the prompts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.training_log:
        log = args.output / "training_log.csv"
        if args.training_log.resolve() != log.resolve():
            shutil.copyfile(args.training_log, log)
        draw_training(log, args.output / "training.png")
    began = time.perf_counter()
    answerer = Answerer(args.model)
    rng = np.random.default_rng(args.seed)
    cells = list(measure_prompts(answerer, rng, args.scale))
    conversations = list(measure_conversations(answerer, rng, args.scale))
    table = accuracy_table(cells, conversations)
    record = {"seed": args.seed, "seconds": round(time.perf_counter() - began), "prompts": cells}
    (args.output / "accuracy.json").write_text(json.dumps({**record, "conversations": conversations}, indent=1) + "\n")
    (args.output / "accuracy.md").write_text(table)
    draw_accuracy(cells, args.output / "accuracy.png")
    print(table)


if __name__ == "__main__":
    main()

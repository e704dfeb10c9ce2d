"""The curriculum: short texts first, where attention finds its way, then twice as long again and again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from examples import PROSE, ExampleBuilder

WARMUP_STEPS = 100
# Logits of prose are the dearer half of a short step and teach nothing about retrieval.
PROSE_SHARE = 0.25


@dataclass(frozen=True)
class Phase:
    """One stage of the curriculum.

    Attributes
    ----------
    length : int
        Greatest length of its sequences, in tokens.
    batch_tokens : int
        Tokens in a batch; the number of sequences is this divided by the batch's length.
    min_steps, max_steps : int
        The stage ends between these, once the digits are right (``target``).
    lr : float
        Learning rate at its beginning.
    final_lr : float
        Learning rate at ``max_steps``.
    target : float
        Share of right digits, averaged over recent steps, that ends the stage early; above 1 it never does.
    """

    length: int
    batch_tokens: int
    min_steps: int
    max_steps: int
    lr: float
    final_lr: float
    target: float = 0.995


CURRICULUM = (
    Phase(96, 4096, 200, 2000, 2e-3, 2e-3, 0.97),
    Phase(192, 4096, 100, 300, 2e-3, 2e-3, 0.98),
    Phase(512, 6144, 100, 400, 2e-3, 2e-3, 0.98),
    Phase(1024, 8192, 100, 260, 1.5e-3, 1.5e-3, 0.98),
    Phase(2048, 8192, 100, 120, 1e-3, 1e-3, 0.99),
    Phase(4096, 8192, 160, 160, 1e-3, 3e-4, 1.1),
    Phase(8192, 8192, 50, 50, 3e-4, 1e-5, 1.1),
)


def learning_rate(phase: Phase, step_in_phase: int, step: int) -> float:
    """Give the learning rate of a step.

    Parameters
    ----------
    phase : Phase
        The curriculum's stage.
    step_in_phase, step : int
        Steps done in this stage and in all.

    Returns
    -------
    float
        Linear from ``lr`` to ``final_lr``, with a warm-up at the very beginning.
    """
    done = step_in_phase / phase.max_steps
    return (phase.lr + (phase.final_lr - phase.lr) * done) * min(1.0, (step + 1) / WARMUP_STEPS)


def build_batch(builder: ExampleBuilder, phase: Phase, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Build one batch.

    Parameters
    ----------
    builder : ExampleBuilder
        Source of sequences.
    phase : Phase
        The curriculum's stage.
    rng : numpy.random.Generator
        Source of randomness.

    Returns
    -------
    dict of str to torch.Tensor
        ``ids``, ``labels`` and ``kinds``, padded on the right. Causal attention never looks at what follows, so no
        mask is needed.
    """
    length = phase.length
    # Short sequences stay in the mix, or the model forgets them at the later stages.
    if rng.random() < 0.3:
        length = int(np.exp(rng.uniform(np.log(32), np.log(length))))
    size = max(1, min(64, phase.batch_tokens // length))
    examples = [builder.build(length, rng, max_keys=4, max_questions=6) for _ in range(size)]
    width = max(len(example.ids) for example in examples)
    batch = {}
    for field in ("ids", "labels", "kinds"):
        rows = [getattr(example, field) for example in examples]
        batch[field] = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    batch["kinds"] *= (batch["kinds"] != PROSE) | (torch.from_numpy(rng.random(batch["kinds"].shape)) < PROSE_SHARE)
    return batch

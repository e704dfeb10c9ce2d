"""From what a compressed cache kept of a user's prompts to a budget profile, with the paper's Tables 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakv.fairkv.identity import ModelIdentity
from megakv.fairkv.layer import contiguous_layer
from megakv.fairkv.mapper import balance
from megakv.fairkv.profile import BudgetProfile, DataSet
from megakv.tracking import RunReport
from megakv.weights.placement import HeadMap

TP_SIZES = (2, 4, 8)
"""Tensor-parallel degrees of Table 2."""

BudgetArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredPrompt:
    """What compression kept of one prompt.

    Parameters
    ----------
    data_set : str
        Name of the data set that it is from.
    length : int
        Tokens.
    budgets : BudgetArray
        ``[layers, K]`` tokens kept of each KV head.
    """

    data_set: str
    length: int
    budgets: BudgetArray


def kept_tokens(report: RunReport, heads: HeadMap) -> BudgetArray:
    """``[layers, K]`` tokens that each KV head of the whole model holds, by a report of all ranks.

    Context-parallel ranks hold different tokens of a head, so theirs add up; tensor-parallel ones that copy a head hold
    the same.
    """
    found = np.zeros((report.mesh["cp"], len(heads.layers), heads.n_kv_heads))
    for rank in report.ranks:
        for layer, counts in enumerate(rank.head_tokens):
            # A rank that holds nothing of a layer lists no head.
            if not counts:
                continue
            found[rank.cp_rank, layer, list(heads.shard(layer, rank.tp_rank).kv_heads)] = counts
    total: BudgetArray = found.sum(axis=0)
    return total


def cosine_similarity(a: BudgetArray, b: BudgetArray) -> float:
    """Of two models' budgets, all heads of all layers as one vector (the paper's Table 1)."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return min(1.0, float(np.vdot(a, b)) / norms) if norms > 0 else 1.0


def busy_rate(prompts: Sequence[BudgetArray], tp_size: int) -> float:
    """Part of the attention time in which a rank with neighbouring heads works, mean over prompts (Table 2)."""
    layers = [contiguous_layer(prompts[0].shape[1], tp_size)] * len(prompts[0])
    return float(np.mean([balance(layers, rows.tolist(), tp_size).barrier_utilisation for rows in prompts]))


def _busy_rates(prompts: Sequence[BudgetArray]) -> dict[int, float]:
    return {size: busy_rate(prompts, size) for size in TP_SIZES if size <= prompts[0].shape[1]}


def make_profile(
    model: str, method: str, prompts: Sequence[MeasuredPrompt], identity: ModelIdentity | None = None
) -> BudgetProfile:
    """The profile of measured prompts.

    Parameters
    ----------
    model : str
        Hub id or folder.
    method : str
        The compression that chose what was kept.
    prompts : sequence of MeasuredPrompt
        One or more.
    identity : ModelIdentity, optional
        Of the model.
    """
    sets: dict[str, list[BudgetArray]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.data_set, []).append(prompt.budgets)
    means = {name: np.mean(rows, axis=0) for name, rows in sets.items()}
    data_sets = []
    for name, rows in sets.items():
        others = [mean for other, mean in means.items() if other != name]
        similarity = cosine_similarity(means[name], np.mean(others, axis=0)) if others else None
        data_sets.append(DataSet(name=name, prompts=len(rows), similarity=similarity, busy_rates=_busy_rates(rows)))
    # In the order of the data sets, so that each one's prompts follow each other.
    ordered = [prompt for name in sets for prompt in prompts if prompt.data_set == name]
    rows = [prompt.budgets for prompt in ordered]
    return BudgetProfile(
        model=model,
        method=method,
        budgets=_nested(np.mean(rows, axis=0)),
        prompts=tuple(_nested(each) for each in rows),
        lengths=tuple(prompt.length for prompt in ordered),
        data_sets=tuple(data_sets),
        busy_rates=_busy_rates(rows),
        identity=identity,
    )


def _nested(budgets: BudgetArray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in budgets.tolist())

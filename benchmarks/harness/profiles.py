"""A hardware profile of the links that a benchmark runs on."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel

from megakv.comm import Communicator
from megakv.costmodel.kernel_times import KernelSizes
from megakv.costmodel.measurement import measure_profile
from megakv.costmodel.shape import ModelShape
from megakv.groups import make_mesh
from megakv.launcher.ranks import Progress
from megakv.ledger import Ledger

from .world import World


@contextlib.contextmanager
def measured_profile(world: World, model: PreTrainedModel, *, seconds: float, timeout_s: float) -> Iterator[str]:
    """Measure one with a model's heads, as ``megakv profile`` does. Every rank must call it.

    Parameters
    ----------
    world : World
        Its ranks are one context-parallel ring.
    model : PreTrainedModel
    seconds : float
        How long it may take, about.
    timeout_s : float
        How long a silent rank is waited for, in seconds.

    Yields
    ------
    str
        This rank's file of it, which is gone at the end.
    """
    comm = Communicator(make_mesh(cp_size=world.size, tp_size=1, timeout_s=timeout_s), Ledger())
    shape = ModelShape.from_config(model.config, dtype=model.dtype).attention()
    progress = Progress("profile")
    profile = measure_profile(
        comm, dtype=model.dtype, sizes=[KernelSizes.of(shape)], seconds=seconds, report=progress.step
    )
    progress.close()
    with tempfile.TemporaryDirectory(prefix="megakv-profile-") as folder:
        path = Path(folder) / "profile.json"
        profile.save(path)
        yield str(path)

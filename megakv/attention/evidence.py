"""What `auto` decides from: the files that the policy names, checked against this machine and between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megakv.config import ContextParallelConfig
from megakv.costmodel.hardware import HardwareProfile, fingerprint, load_profile
from megakv.costmodel.policy_fit import PolicyFit, load_fit
from megakv.costmodel.shape import local_heads
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator

PROFILE_SETTING = "megakv.context_parallel.profile"
FIT_SETTING = "megakv.context_parallel.fit"


@dataclass(frozen=True)
class Evidence:
    """What `auto` decides from, equal on all ranks.

    Parameters
    ----------
    policy : str
    profile : HardwareProfile, optional
    fit : PolicyFit, optional
    """

    policy: str = "cost"
    profile: HardwareProfile | None = None
    fit: PolicyFit | None = None


def load_evidence(
    config: ContextParallelConfig, comm: Communicator, *, heads: int, kv_heads: int, dtype: torch.dtype | None
) -> Evidence:
    """Read the files that the policy decides from. Every rank must call it.

    Parameters
    ----------
    config : ContextParallelConfig
    comm : Communicator
    heads, kv_heads : int
        Of the whole model.
    dtype : torch.dtype, optional
        Of the model; None where it is not known.

    Raises
    ------
    ValueError
        If a file that the policy needs was not named, cannot be used, belongs to another machine or model, or differs
        between ranks.
    MegaKVError
        On ranks whose own files are in order.
    """
    if config.profile is None and config.fit is None:
        return Evidence(config.policy)
    evidence = Agreement(comm).together(
        lambda: Evidence(
            config.policy,
            None if config.profile is None else load_profile(config.profile, setting=PROFILE_SETTING),
            None if config.fit is None else load_fit(config.fit, setting=FIT_SETTING),
        )
    )
    _check_equal(evidence, comm)
    if not config.accept_foreign_profile:
        _check_machine(evidence, config, comm, heads, kv_heads, dtype)
    return evidence


def _check_equal(evidence: Evidence, comm: Communicator) -> None:
    """Ranks that decide from different numbers would wait for each other for ever."""
    digests = [None if record is None else record.digest() for record in (evidence.profile, evidence.fit)]
    everyone = comm.gather_objects(digests)
    for index, setting in enumerate((PROFILE_SETTING, FIT_SETTING)):
        odd = [rank for rank, theirs in enumerate(everyone) if theirs[index] != everyone[0][index]]
        if odd:
            raise ValueError(
                f"{setting}: the file of rank {odd[0]} differs from that of rank 0; copy one to every host"
            )


def _check_machine(
    evidence: Evidence,
    config: ContextParallelConfig,
    comm: Communicator,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype | None,
) -> None:
    remedy = "measure here, or set megakv.context_parallel.accept_foreign_profile = true"
    here = fingerprint(comm, dtype or torch.float32)
    for record, setting, path in (
        (evidence.profile, PROFILE_SETTING, config.profile),
        (evidence.fit, FIT_SETTING, config.fit),
    ):
        if record is None:
            continue
        measured = record.fingerprint
        same_type = here if dtype is not None else here.model_copy(update={"dtype": measured.dtype})
        if differences := measured.differences(same_type):
            raise ValueError(f"{setting} = {path!r} was measured elsewhere: {'; '.join(differences)}; {remedy}")
    fit = evidence.fit
    wanted = (*local_heads(heads, kv_heads, comm.mesh.tp_size), comm.mesh.cp_size)
    if fit is not None and (fit.heads, fit.kv_heads, fit.ring_size) != wanted:
        raise ValueError(
            f"{FIT_SETTING} = {config.fit!r} was fitted to {fit.heads} query and {fit.kv_heads} KV heads a rank on "
            f"{fit.ring_size} context-parallel ranks, here {wanted[0]} and {wanted[1]} on {wanted[2]}; {remedy}"
        )

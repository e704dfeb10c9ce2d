"""Measured speeds of one machine for one model, kept in a file: what plans rest on before steps have shown more."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import torch
from pydantic import Field

from megakv.costmodel.hardware import Fingerprint
from megakv.costmodel.records import Record, load_record
from megakv.offload.config import OffloadConfig

REMEDY = "remove it, and it is measured anew"


class OffloadProfile(Record):
    """Measured speeds of one machine for one model; what is 0 was not measured, as some methods need not know it.

    Parameters
    ----------
    model_type : str
        As in the model's configuration: recomputation is its attention modules' own code. Empty in older files.
    row_bytes, input_bytes : int
        Of a token's keys and values in one layer, and of its activations.
    link_bytes_s, transfer_s : float
        Bandwidth to the accelerator, and what a transfer costs whatever its size.
    out_bytes_s, both_bytes_s : float
        Bandwidth from the accelerator, and to it while as much goes the other way.
    recompute_s, launch_s : float
        Recomputing a token in one layer, and what each recomputation costs.
    host_attend_s, host_fixed_s, host_call_s : float
        Attending to a token of one layer on the host, and what doing so costs for each sequence, and at all.
    disk_read_bytes_s, disk_write_bytes_s : float
        Bandwidth of the disk tier, past the page cache where the file system allows.
    disk : str
        Which disk that is: its folder, and how it is read.
    emulated_link_gb_s : float, optional
        Where the link is emulated, at what bandwidth.
    """

    format: Literal["megakv offload profile"] = "megakv offload profile"
    fingerprint: Fingerprint
    model_type: str = ""
    row_bytes: int = Field(gt=0)
    input_bytes: int = Field(ge=0)
    link_bytes_s: float = Field(gt=0)
    transfer_s: float = Field(ge=0)
    out_bytes_s: float = Field(default=0.0, ge=0)
    both_bytes_s: float = Field(default=0.0, ge=0)
    recompute_s: float = Field(default=0.0, ge=0)
    launch_s: float = Field(default=0.0, ge=0)
    host_attend_s: float = Field(default=0.0, ge=0)
    host_fixed_s: float = Field(default=0.0, ge=0)
    host_call_s: float = Field(default=0.0, ge=0)
    disk_read_bytes_s: float = Field(default=0.0, ge=0)
    disk_write_bytes_s: float = Field(default=0.0, ge=0)
    disk: str = ""
    emulated_link_gb_s: float | None = None


def foreign(config: OffloadConfig, why: str) -> ValueError:
    """The refusal of a profile that is not of this machine, model and link."""
    return ValueError(f"megakv.offload.profile = {config.profile!r} was measured elsewhere ({why}); {REMEDY}")


def read_profile(config: OffloadConfig, dtype: torch.dtype, model_type: str) -> OffloadProfile | None:
    """The profile in the file that the JSON names; None where it names none, or one that is yet to be written.

    A ValueError says that the file is of another machine, model type or link, or cannot be written.
    """
    path = config.profile
    if path is None:
        return None
    if Path(path).is_dir():
        raise ValueError(f"megakv.offload.profile = {path!r} is a folder; name a file, which need not exist yet")
    if not Path(path).exists():
        if not Path(path).parent.is_dir():
            raise ValueError(
                f"megakv.offload.profile = {path!r}: there is no folder {str(Path(path).parent)!r}; make it, or name "
                "another file"
            )
        try:
            TemporaryFile(dir=Path(path).parent).close()
        except OSError as error:
            raise ValueError(
                f"megakv.offload.profile = {path!r} cannot be written: {error.strerror}; name another file, or leave "
                "it out to measure at every start"
            ) from error
        return None
    profile = load_record(OffloadProfile, path, setting="megakv.offload.profile", remedy=REMEDY)
    differences = profile.fingerprint.differences(fingerprint_of(dtype))
    if profile.model_type and profile.model_type != model_type:
        differences.append(f"model type {profile.model_type!r}, here {model_type!r}")
    if profile.emulated_link_gb_s != config.emulated_link_gb_s:
        differences.append("another emulated link")
    if differences:
        raise foreign(config, "; ".join(differences))
    return profile


def fingerprint_of(dtype: torch.dtype) -> Fingerprint:
    """Of this process, whatever other ranks there are."""
    return Fingerprint.of_this_process(hosts=1, ranks=1, dtype=dtype)

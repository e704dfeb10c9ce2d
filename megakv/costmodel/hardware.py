"""The hardware profile: what a machine was measured to do, in one JSON file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megakv.costmodel.curves import AttentionTable, Curve, Positive
from megakv.tracking.files import write_whole
from megakv.tracking.machine import machine_info

FORMAT = "megakv hardware profile"
VERSION = 1
Overhead = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Slowdown = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class Fingerprint(BaseModel):
    """What measured times belong to.

    Parameters
    ----------
    processor, accelerator : str
        Model of the CPU; name of the accelerator, ``cpu`` without one.
    cores, threads : int
        Cores that a rank may use, and the threads it computes with.
    hosts, ranks : int
        Network stacks and ranks of the whole world.
    torch, dtype : str
        Version of torch; type of Q, K, V and weights, as in ``float32``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    processor: str
    accelerator: str
    cores: int = Field(ge=1)
    threads: int = Field(ge=1)
    hosts: int = Field(ge=1)
    ranks: int = Field(ge=1)
    torch: str
    dtype: str

    @classmethod
    def of_this_process(cls, *, hosts: int, ranks: int, dtype: torch.dtype) -> Fingerprint:
        """The machine that this process runs on, and the world it is in."""
        machine = machine_info()
        devices = machine["devices"]
        return cls(
            processor=machine["cpu"],
            accelerator=devices[0] if devices else machine["accelerator"],
            cores=machine["cores"],
            threads=torch.get_num_threads(),
            hosts=hosts,
            ranks=ranks,
            torch=torch.__version__,
            dtype=str(dtype).removeprefix("torch."),
        )

    def differences(self, here: Fingerprint) -> list[str]:
        """What another fingerprint has otherwise, in words."""
        mine, theirs = self.model_dump(), here.model_dump()
        return [f"{name} {mine[name]!r}, here {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]


class HardwareProfile(BaseModel):
    """Measured times of one machine; every prediction starts here.

    Parameters
    ----------
    fingerprint : Fingerprint
    ring_size : int
        Context-parallel degree that the exchanges and overheads were measured with.
    attention : tuple of AttentionTable
        Kernel times; one of kernel ``flash`` at least.
    matmul : Curve
        Seconds of a matrix product per weight element, over the tokens that go through it.
    copy_bytes, merge, combine : Curve
        Seconds of copying, over bytes; of merging a partial output in place, over its elements; of merging stacked
        partial outputs, over the elements of all parts.
    exchange : Curve
        Seconds of one ring step (send to the next rank, receive from the previous one), over bytes, nothing else
        running.
    compute_slowdown, transfer_slowdown : float
        How much longer computing takes while an exchange is under way, and the exchange while computing is.
    all_to_all, all_gather : Curve
        Seconds of the collectives, over the bytes that a rank sends.
    step_overhead_s : dict
        Per method, seconds of one of its N steps that none of the above explains (Python, bookkeeping).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["megakv hardware profile"] = FORMAT
    version: Literal[1] = VERSION
    fingerprint: Fingerprint
    ring_size: int = Field(ge=1)
    attention: tuple[AttentionTable, ...] = Field(min_length=1)
    matmul: Curve
    copy_bytes: Curve
    merge: Curve
    combine: Curve
    exchange: Curve
    compute_slowdown: Slowdown
    transfer_slowdown: Slowdown
    all_to_all: Curve
    all_gather: Curve
    step_overhead_s: dict[str, Overhead]

    @model_validator(mode="after")
    def _has_fused_kernel(self) -> Self:
        if all(table.kernel != "flash" for table in self.attention):
            raise ValueError("attention has no table of kernel 'flash'")
        return self

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the ring's exchange while attention runs: BW of the paper's equations."""
        return self.exchange.bandwidth / self.transfer_slowdown

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second of copying large tensors, read and written once each."""
        return 2 * self.copy_bytes.bandwidth

    @property
    def matmul_flops(self) -> float:
        """Operations per second of a large matrix product."""
        return 2 * self.matmul.sizes[-1] / self.matmul.seconds[-1]

    def digest(self) -> str:
        """Equal for equal profiles."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the JSON, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=1).encode())

    def check_machine(self, here: Fingerprint, *, source: str) -> None:
        """Refuse to predict for another machine.

        Raises
        ------
        ValueError
            Saying what differs.
        """
        differences = self.fingerprint.differences(here)
        if differences:
            raise ValueError(
                f"{source} was measured elsewhere: {'; '.join(differences)}. Measure here with megakv profile, or set "
                "megakv.context_parallel.accept_foreign_profile = true"
            )


def read_record(path: str | Path, setting: str, format_name: str, remedy: str) -> object:
    """A JSON file of ours, as plain values.

    Raises
    ------
    ValueError
        If it cannot be read, is cut short or is something else; names the setting and the remedy.
    """
    source = f"{setting} = {str(path)!r}"
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(values, dict) or values.get("format") != format_name:
        raise ValueError(f"{source} is not a {format_name}; {remedy}")
    return values


def explain_record(error: ValidationError, path: str | Path, setting: str, remedy: str) -> ValueError:
    """The first thing wrong with a record, in the words of its setting."""
    entry = error.errors()[0]
    where = ".".join(str(part) for part in entry["loc"]) or "it"
    return ValueError(f"{setting} = {str(path)!r}: {where}: {entry['msg']}; {remedy}")


def load_profile(path: str | Path, *, setting: str = "profile") -> HardwareProfile:
    """Read and check a profile.

    Raises
    ------
    ValueError
        If it cannot be read, is not a profile, or holds an impossible value: names the setting, the file and the field.
    """
    remedy = "write a new one with megakv profile --json FILE"
    values = read_record(path, setting, FORMAT, remedy)
    try:
        return HardwareProfile.model_validate(values)
    except ValidationError as error:
        raise explain_record(error, path, setting, remedy) from None

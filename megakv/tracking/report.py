"""The report of a run: what all ranks measured, as dataclasses that go to JSON and come back checked."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from megakv.tracking.measurements import (
    STRICT,
    CandidateCounts,
    Count,
    Event,
    HeadBalance,
    LogitComparison,
    Number,
    OffloadStep,
    PrefillPlan,
    ProductRates,
    Traffic,
    offload_scalars,
    percentiles,
)
from megakv.tracking.served import ServedTraffic

MOST_BYTES = 256 << 20
"""Of a file: a larger one would only keep its reader busy."""
MOST_COUNT = 2**63
MOST_NAMED = 16
"""Ranks that a message names."""
WRITERS = "the main job's --json, megakv.tracking.json and megakv simulate --json write reports"


def _check_counts(values: dict[str, Any], where: str = "") -> None:
    """Refuse what no run can have measured."""
    for name, value in values.items():
        if value is not None and not 0 <= value < MOST_COUNT:
            raise ValueError(f"{where}{name} = {value}; it cannot be negative or not finite")


@dataclass(slots=True)
class RankReport:
    """What one rank did."""

    rank: int
    host: str
    cp_rank: int
    tp_rank: int
    tokens: int  # Prompt tokens that lay on this rank.
    # Its KV cache after the prompt, and its peak memory (`megakv.tracking.machine.peak_memory_bytes`).
    kv_bytes: int
    peak_bytes: int
    traffic: list[Traffic] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    # ``[layer][KV head]`` tokens that each of the rank's KV heads holds, over the batch, where the cache was compressed
    # to per-head budgets; empty where it was not.
    head_tokens: list[list[Count]] = field(default_factory=list)
    offload: list[OffloadStep] = field(default_factory=list)
    weight_bytes: dict[str, Count] = field(default_factory=dict)  # By type: of torch, or of GGUF's blocks.
    disk_io: str | None = None  # How the disk tier is read: as ``files``; ``None`` without one.
    schedule: str | None = None  # In how many groups batches go through offloaded layers, and why; ``None`` without.
    # ``[layer]`` seconds in attention while single tokens were computed; on an accelerator, starting its kernels.
    attention_s: list[Number] = field(default_factory=list)
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def __post_init__(self) -> None:
        names = ("rank", "cp_rank", "tp_rank", "tokens", "kv_bytes", "peak_bytes")
        _check_counts({name: getattr(self, name) for name in names}, f"rank {self.rank} reports ")

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank sent, by operation."""
        return self.by_operation("bytes_sent")

    def by_operation(self, name: str) -> dict[str, Any]:
        """A number of `Traffic`, summed over the layers."""
        found: dict[str, Any] = {}
        for traffic in self.traffic:
            found[traffic.operation] = found.get(traffic.operation, 0) + getattr(traffic, name)
        return found


@dataclass(slots=True)
class Answer:
    """One turn of a job: what it was asked, and what it said."""

    question: str | None  # ``None`` where the prompt is one text.
    answer: str  # The generated text.
    tokens: list[Count] = field(default_factory=list)  # Its tokens.
    # Computed in this turn: the first one's hold the document. Those of earlier turns are cached.
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    new_tokens: Count | None = None
    ttft_s: Number | None = None
    ttit_s: Number | None = None
    step_s: list[Number] = field(default_factory=list)  # From each token to the next.
    # Whether the tokens are those of a single-process transformers run; ``None`` where that was not asked for.
    tokens_equal: bool | None = None
    # Where the job knows what must be said, and whether it was.
    expected: str | None = None
    correct: bool | None = None
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(slots=True, kw_only=True)
class RunReport:
    """What one run did: its configuration, its latencies, and one report per rank.

    It is the one format of results: the main job, ``megakv.tracking.json`` and ``megakv simulate`` write it.
    """

    format: Literal["megakv run"] = "megakv run"
    version: Literal[1] = 1
    config: dict[str, Any]  # The engine's whole configuration.
    model: str
    dtype: str | None = None  # Of what is computed, keys and values, and of weights that are not stored otherwise.
    weights: str | None = None  # The format of the weights; ``None`` where it is not known.
    mesh: dict[str, int]  # ``{"cp": ranks that share the tokens, "tp": ranks that share the heads}``.
    # Time to first token, and mean time to incremental token in seconds; ``None`` where there was no such token.
    ttft_s: float | None
    ttit_s: float | None
    step_s: list[Number] = field(default_factory=list)  # From each new token to the next: their mean is `ttit_s`.
    generated_s: float | None = None  # Time to the last token.
    # Over the whole batch: tokens of the prompt that were computed, and those generated.
    prompt_tokens: int
    new_tokens: int
    cached_tokens: Count = 0  # Of the prompt, those whose keys and values were there from earlier turns.
    ranks: list[RankReport]  # In rank order, one for each of the ``cp * tp`` ranks.
    # See `megakv.tracking.machine`.
    versions: dict[str, str]
    machine: dict[str, Any]
    prefill: PrefillPlan | None = None  # ``None`` where nothing was decided before the layers ran.
    balance: HeadBalance | None = None  # Where KV heads were mapped to ranks or compressed.
    candidates: CandidateCounts | None = None  # Where steps checked several tokens.
    served: ServedTraffic | None = None  # Of a server, which answers many requests: all of them.
    # On processors, by rows: which library multiplies them by weights, measured at start.
    products: list[ProductRates] = field(default_factory=list)
    # By stage, ``prefill`` and ``decode``: how many layers, summed over passes, each attention method served.
    methods: dict[str, dict[str, Count]] = field(default_factory=dict)
    # What a job adds: its command line, what it was asked, and whether the tokens are those of a single-process
    # transformers run (``None`` where that was not asked for).
    settings: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    tokens_equal: bool | None = None
    logits: LogitComparison | None = None  # Where tokens were compared and part.
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def __post_init__(self) -> None:
        if set(self.mesh) != {"cp", "tp"} or min(self.mesh.values()) < 1:
            raise ValueError(f"mesh is {self.mesh}; it must give cp and tp, each at least 1")
        size, found = self.mesh["cp"] * self.mesh["tp"], [report.rank for report in self.ranks]
        # Lengths first: a range may be as long as a file says.
        if len(found) != size or found != list(range(size)):
            raise ValueError(
                f"mesh {self.mesh} must have reports of ranks 0 to {size - 1} in order, found {found[:MOST_NAMED]}"
            )
        names = ("ttft_s", "ttit_s", "generated_s", "prompt_tokens", "new_tokens")
        _check_counts({name: getattr(self, name) for name in names})

    def scalars(self) -> dict[str, float]:
        """The report as flat metrics: latencies, throughput, the largest rank's memory, and sums per operation.

        Exposed seconds are the worst rank's, since the others wait for it anyway.
        """
        values: dict[str, float | None] = {
            "ttft_s": self.ttft_s,
            "ttit_s": self.ttit_s,
            **percentiles("ttit_s", self.step_s),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens or None,
            "new_tokens": self.new_tokens,
            "prompt_tokens_per_s": self.prompt_tokens / self.ttft_s if self.ttft_s else None,
            "kv_bytes_max": max(report.kv_bytes for report in self.ranks),
            "peak_bytes_max": max(report.peak_bytes for report in self.ranks),
            "weight_bytes_max": max(sum(report.weight_bytes.values()) for report in self.ranks) or None,
        }
        if self.prefill is not None:
            values |= {f"ttft_predicted_s/{name}": seconds for name, seconds in self.prefill.predicted_s.items()}
        if self.balance is not None:
            values |= self.balance.scalars()
        if self.candidates is not None:
            values |= self.candidates.scalars(self.new_tokens)
        if self.served is not None:
            values |= self.served.scalars()
        values |= offload_scalars([rank.offload for rank in self.ranks])
        for operation in sorted({traffic.operation for report in self.ranks for traffic in report.traffic}):
            for name, over_ranks in (("bytes_sent", sum), ("calls", sum), ("seconds_exposed", max)):
                found = [report.by_operation(name).get(operation, 0) for report in self.ranks]
                values[name + "_max" * (over_ranks is max) + f"/{operation}"] = over_ranks(found)
        return {name: float(value) for name, value in values.items() if value is not None}


_REPORT = TypeAdapter(RunReport)


def report_to_json(report: RunReport) -> str:
    """The report as JSON text; what JSON has no type for (a dtype, a path, infinity) becomes a string."""
    return to_json(report, indent=2, inf_nan_mode="strings", fallback=str).decode()


def report_from_json(text: str | bytes) -> RunReport:
    """The report in a JSON text, checked.

    Raises ValueError if the text is not JSON, lacks a key, has an unknown one, or a value that no run can have.
    """
    try:
        return _REPORT.validate_json(text, strict=True)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'report'}: {item['msg']}" for item in error.errors()]
        text = "; ".join(problems[:3]) + f" (and {len(problems) - 3} more)" * (len(problems) > 3)
        raise ValueError(f"this is not a MegaKV run report ({WRITERS}): {text}") from None


def load_report(path: str | Path) -> RunReport:
    """Read the report of a run, measured or simulated.

    Raises ValueError if it cannot be read, is too large or holds no report; the message names the file and the
    offending keys.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"a report has at most {MOST_BYTES >> 20} MiB, this file has more")
        return report_from_json(content)
    except OSError as error:
        raise ValueError(f"report {path} cannot be read: {error.strerror}; {WRITERS}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None

"""KV-Runahead, Tables 1 to 3: TTFT of the chain and of TSP on A100s of one host, attention of plain PyTorch in FP16.

That attention writes every score to memory, masked ones too, several times over; and a layer takes some 3 ms to issue
from Python, however short the prompt: two of the constants that are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from megakv.costmodel.chain import Chain
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.machine_spec import MachineSpec
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.shape import ModelShape
from megakv.runahead.chain_search import best_partition
from megakv.runahead.grid import COARSE_CELLS, Grid

from .fit import Constant, Constants, changed, fitted, link, model_shape
from .published import Cell

NAMES = ("runahead_table_1", "runahead_table_2", "runahead_table_3")
CONSTANTS = {
    "matmul_efficiency": Constant(0.6, 0.2, 1.0),
    "score_bytes": Constant(20.0, 2.0, 100.0),
    "launch_s": Constant(3e-3, 5e-4, 1e-2),
    "nvlink_bandwidth": Constant(150e9, 5e9, 300e9),
    "nvlink_latency_s": Constant(1e-4, 1e-6, 1e-3),
    "10GB/s": Constant(8e9, 2e9, 20e9),
    "1GB/s": Constant(1e9, 0.2e9, 4e9),
}
ROUNDS = 2
"""Partitions are searched anew with the constants that fit best so far."""


class RunaheadTables:
    """Predictions of all three tables from one set of constants."""

    def __init__(self) -> None:
        self._partitions: dict[tuple[str, int, int, str], tuple[int, ...]] = {}

    def fit(self, cells: Sequence[Cell]) -> dict[str, float]:
        """Constants of one half of the cells."""
        found = {name: each.start for name, each in CONSTANTS.items()}
        for _ in range(ROUNDS):
            self.search(cells, found)
            starts = {
                name: Constant(min(max(found[name], each.low * 1.001), each.high * 0.999), each.low, each.high)
                for name, each in CONSTANTS.items()
            }
            found = fitted(cells, starts, self.predict)
        self.search(cells, found)
        return found

    def search(self, cells: Sequence[Cell], constants: Constants) -> None:
        """The partitions that the cost model finds best (KVR-S)."""
        for cell in cells:
            setting = cell.setting
            if setting.get("method", "kvr_s") == "kvr_s":
                find = _searched if "link" in setting else best_partition
                self._partitions[_key(cell)] = find(
                    _profile(cell, constants),
                    model_shape(setting["model"]),
                    setting["context"],
                    setting["ranks"],
                    chunk_tokens=setting["context"],
                )

    def predict(self, cell: Cell, constants: Constants) -> float:
        """Seconds."""
        setting = cell.setting
        tokens, ranks = setting["context"], setting["ranks"]
        times = PrefillTimes(
            _profile(cell, constants),
            model_shape(setting["model"]),
            Workload((tokens,), (0,), ranks),
            chunk_tokens=tokens,
        )
        if setting.get("method") == "tsp":
            return times.seconds("tsp")
        return times.seconds("runahead", (self._partitions[_key(cell)],))


def machine(constants: Constants, ranks: int, speed: str | None = None) -> MachineSpec:
    """The A100 host, with NVLink; or with "CUDA-direct" off: all links of the chain share the way through the host."""
    bandwidth = constants[speed] / (ranks - 1) if speed else constants["nvlink_bandwidth"]
    return changed(
        "a100-nvlink",
        causal_share=1.0,
        matmul_efficiency=constants["matmul_efficiency"],
        attention_efficiency=constants["matmul_efficiency"],
        score_bytes=constants["score_bytes"],
        launch_s=constants["launch_s"],
        inside=link(bandwidth, constants["nvlink_latency_s"]),
    )


def _profile(cell: Cell, constants: Constants) -> HardwareProfile:
    setting = cell.setting
    return machine(constants, setting["ranks"], setting.get("link")).profile(cp_size=setting["ranks"])


def _searched(
    profile: HardwareProfile, model: ModelShape, tokens: int, ranks: int, *, chunk_tokens: int
) -> tuple[int, ...]:
    """The best partition of the first level of the paper's grid, where every rank has a part of the prompt.

    MegaKV's own search leaves ranks out where links are slow; the paper's does not.
    """
    grid = Grid(tokens, ranks, tokens // COARSE_CELLS)
    chain = Chain(profile, model, chunk_tokens=chunk_tokens)
    return min(map(grid.partition, grid.coarse()), key=lambda parts: chain.predict((parts,), (0,)).seconds)


def _key(cell: Cell) -> tuple[str, int, int, str]:
    setting = cell.setting
    return setting["model"], setting["context"], setting["ranks"], setting.get("link", "")

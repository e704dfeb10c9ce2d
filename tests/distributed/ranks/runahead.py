"""Started on every rank: the chain of KV-Runahead against plain transformers, its traffic, sessions and memory.

Usage: runahead.py PLAN.json OUT.json WORK_DIR. A plan is a list of runs: `check` (a method of `Ranks`), `mesh` as
CPxTP, and what the check needs. The result is a list, run by run.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from exactness import compare, make_case, references, save
from families import FAMILIES, llama
from properties import CHECKS, Context
from sessions import GREEDY, Plain, ids_of, long_turns, ragged_turns
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.distributed.mesh import Mesh, start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries
from megakv.tracking.machine import peak_memory_bytes, reset_peak_memory

M_MMAP_THRESHOLD = -3
Run = dict[str, Any]
Restored = {"prompt": 301, "new": 40, "later": 9}


class ChainContext(Context):
    """The checks of all engines, on engines with a chain."""

    section: dict[str, Any] = {}

    def engine(self, folder: Path, dtype: str = "fp32", **section: Any) -> megakv.MegaKVEngine:
        section["context_parallel"] = {"size": self.cp, "prefill": "runahead"}
        parallel = {"tp_size": self.tp}
        config = {"dtype": dtype, "tensor_parallel": parallel, "megakv": {**section, "runahead": self.section}}
        return megakv.init_inference(str(folder), config)


class Ranks:
    """What the checks of one launch share.

    Parameters
    ----------
    work : Path
        A folder that all ranks reach.
    """

    def __init__(self, work: Path):
        self.work = work
        self._answers: dict[tuple[str, int], Any] = {}

    def folder(self, family: str) -> Path:
        """A random model on disk."""
        path = self.work / family
        if dist.get_rank() == 0 and not path.exists():
            save(family, path)
        dist.barrier()
        return path

    def plain(self, family: str) -> Plain:
        """The plain transformers model."""
        return Plain(self.folder(family))

    @contextmanager
    def engine(self, run: Run, source: Any, method: str = "runahead") -> Iterator[megakv.MegaKVEngine]:
        """An engine on the run's mesh."""
        cp, tp = (int(part) for part in run["mesh"].split("x"))
        section = {"context_parallel": {"size": cp, "prefill": method}}
        if method == "runahead":
            section["runahead"] = run.get("runahead", {})
        section["offload"] = run.get("offload") or {}
        config = {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
        engine = megakv.init_inference(source, config)
        yield engine
        engine.destroy()

    def exact(self, run: Run) -> Any:
        """Logits and greedy tokens of some cases."""
        family, decoded = run["family"], run["decoded"]
        vocabulary = FAMILIES[family]().get_text_config().vocab_size
        cases = {name: make_case(name, vocabulary) for name in run["cases"]}
        missing = {name: case for name, case in cases.items() if (family, decoded, name) not in self._answers}
        for name, answer in references(family, self.folder(family), missing, decoded).items():
            self._answers[family, decoded, name] = answer
        with self.engine(run, str(self.folder(family))) as engine:
            return [
                compare(engine, case, self._answers[family, decoded, name], decoded) for name, case in cases.items()
            ]

    def sessions(self, run: Run) -> Any:
        """Turns of conversations, branches, and a saved folder with what its next turn should give."""
        plain = self.plain("llama")
        with self.engine(run, str(self.folder("llama"))) as engine:
            found = {"long": long_turns(engine, plain), "ragged": ragged_turns(engine, plain)}
            session = engine.session()
            session.generate(ids_of(Restored["prompt"], 2), max_new_tokens=3, **GREEDY)
            counts = [session._cache.table.counts().tolist()]
            session.cut_back(200)
            session.generate(ids_of(Restored["new"], 2, seed=2), max_new_tokens=3, **GREEDY)
            counts.append(session._cache.table.counts().tolist())
            session.save(self.work / run["saved"])
            history = session.input_ids
            later = ids_of(Restored["later"], 2, seed=3)
            expected = plain.generate(torch.cat([history, later], dim=1), max_new_tokens=12, **GREEDY)
            after = session.generate(later, max_new_tokens=12, **GREEDY)
        (self.work / f"{run['saved']}.json").write_text(json.dumps(expected.tolist()))
        return {**found, "counts": counts, "equal": torch.equal(expected, after)}

    def restore(self, run: Run) -> Any:
        """Go on from a saved folder."""
        with self.engine(run, str(self.folder("llama")), run.get("method", "runahead")) as engine:
            session = engine.restore_session(self.work / run["saved"])
            found = session.generate(ids_of(Restored["later"], 2, seed=3), max_new_tokens=12, **GREEDY)
            longer = session.generate(ids_of(64, 2, seed=4), max_new_tokens=5, **GREEDY)
        expected = json.loads((self.work / f"{run['saved']}.json").read_text())
        history = torch.cat([torch.tensor(expected), ids_of(64, 2, seed=4)], dim=1)
        return {
            "equal": found.tolist() == expected,
            "longer": torch.equal(longer, self.plain("llama").generate(history, max_new_tokens=5, **GREEDY)),
        }

    def promises(self, run: Run) -> Any:
        """Some of what every engine promises, by check."""
        context = ChainContext(self.work, run["mesh"])
        context.section = run["runahead"]
        return {check.__name__: check(context) for check in CHECKS if check.__name__ in run["checks"]}

    def refused(self, run: Run) -> Any:
        """What is said of a prompt that is refused, and whether the engine goes on."""
        with self.engine(run, str(self.folder("llama"))) as engine:
            session, message = engine.session(), ""
            try:
                session.generate(ids_of(run.get("refused", run["tokens"] + 1)), max_new_tokens=2, **GREEDY)
            except (ValueError, megakv.MegaKVError) as error:
                message = str(error)
            found = session.generate(ids_of(run["tokens"]), max_new_tokens=2, **GREEDY)
        expected = self.plain("llama").generate(ids_of(run["tokens"]), max_new_tokens=2, **GREEDY)
        return {"message": message, "alive": torch.equal(found, expected)}

    def traffic(self, run: Run) -> Any:
        """Bytes by operation and layer that all ranks together sent for one prompt and some steps, by method."""
        found = {}
        for method in run["methods"]:
            torch.manual_seed(0)
            with self.engine(run, AutoModelForCausalLM.from_config(llama(), dtype=torch.float32), method) as engine:
                engine.generate(ids_of(run["tokens"]), max_new_tokens=run.get("decoded", 1), **GREEDY)
                ranks = engine.report().ranks
                rows = [(t.operation, t.layer, t.bytes_sent) for rank in ranks for t in rank.traffic]
                waits = [t.seconds_exposed <= t.seconds for rank in ranks for t in rank.traffic]
                edges = [edge for rank in engine._comm.gather_objects(own_edges(engine.mesh)) for edge in rank]
            found[method] = {"rows": rows, "waits": all(waits), "edges": edges}
        return found

    def memory(self, run: Run) -> Any:
        """Peak memory that the first long prompt of a process adds on each rank."""
        # Freed tensors go back to the system at once: what is resident is what is in use, however the heap was cut up.
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1
        config = llama(
            hidden_size=256,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_hidden_layers=6,
            intermediate_size=256,
            max_position_embeddings=16384,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # oneDNN keeps memory of its own: the method of a process whose measurement chose it would seem to take more.
        with torch.backends.mkldnn.flags(enabled=False), self.engine(run, model, run["method"]) as engine:
            engine(ids_of(64), logits_to_keep=1)
            assert reset_peak_memory()
            before = peak_memory_bytes()
            output = engine(ids_of(run["tokens"]), logits_to_keep=1, use_cache=True)
            added = peak_memory_bytes() - before
            return {"added": engine._comm.gather_objects(added), "kv": output.past_key_values.nbytes()}


def own_edges(mesh: Mesh) -> list[tuple[str, list[int]]]:
    """Name and ranks of the groups that a rank shares with its neighbours in the chain."""
    neighbours = [rank for rank in (mesh.cp_rank - 1, mesh.cp_rank + 1) if 0 <= rank < mesh.cp_size]
    groups = [mesh.edge_group(rank) for rank in neighbours]
    return [(group.group_name, dist.get_process_group_ranks(group)) for group in groups if group is not None]


def main() -> None:
    """Entry of every rank."""
    plan, out, work = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=300)
    ranks = Ranks(work)
    results = [getattr(ranks, run["check"])(run) for run in plan]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()

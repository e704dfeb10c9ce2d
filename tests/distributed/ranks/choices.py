"""Started on every rank: the cost model's trials and bytes, every policy in an engine, and evidence that is refused.

Usage: choices.py OUT.json WORK_DIR.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from families import llama
from transformers import AutoModelForCausalLM

import megakv
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload, sent_bytes
from megakv.costmodel.curves import Curve
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.costmodel.stopwatch import Pool
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import make_mesh, start_distributed
from megakv.forward.choice import load_evidence
from megakv.forward.config import ContextParallelConfig
from megakv.forward.planning import PassPlanner
from megakv.launcher.process import orderly_end, quiet_libraries
from megakv.planner.measure.policy_points import fit_policy
from megakv.planner.measure.profile import measure_profile
from megakv.planner.measure.trial import TrialLayer

METHODS = ("pass_kv", "pass_q", "all_gather", "replicated")
TURNS = ((203, 3), (5, 2), (50, 3))


def trials(comm: Communicator, seed: int) -> list[dict[str, Any]]:
    """Random layers through all methods: how far results lie apart, and bytes sent against those predicted."""
    draw = random.Random(seed)
    pool = Pool(torch.float32, comm.mesh.device, 1 << 22)
    size, rank = comm.mesh.cp_size, comm.mesh.cp_rank
    rows = []
    for _ in range(6):
        kv_heads, batch = draw.choice((1, 2, 3)), draw.randint(1, 3)
        shape = AttentionShape(kv_heads * draw.choice((1, 2, 4)), kv_heads, *draw.choice(((16, 16), (24, 8))), 4)
        short = draw.random() < 0.4
        new = tuple(draw.randint(1, 2 * size - 1) if short else draw.randint(2 * size, 300) for _ in range(batch))
        workload = Workload(new, tuple(draw.choice((0, draw.randint(1, 500))) for _ in range(batch)), size)
        trial = TrialLayer(comm, shape, workload, pool=pool)
        wrong = {}
        for method in METHODS if short else METHODS[:3]:
            call = trial.call(method)
            comm.ledger.reset()
            out, lse = trial.run(method)
            assert out.isfinite().all() and lse.isfinite().all()
            sent = {operation: tally.bytes_sent for (operation, _), tally in comm.ledger.tallies.items()}
            counts = [len(block) for block in call.layout.tokens]
            predicted = sent_bytes(method, shape, new=counts, kept=call.table.counts().sum(1).tolist(), rank=rank)
            if {k: v for k, v in sent.items() if v} != {k: v for k, v in predicted.items() if v}:
                wrong[method] = [sent, predicted]
        rows.append({"workload": [list(workload.new), list(workload.cached)], "wrong": wrong})
    return rows


def engines(work: Path, config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens of a conversation under every policy, and how its turns were spread."""
    found: dict[str, Any] = {}
    plans: dict[str, Any] = {}
    files = {"profile": str(work / "profile.json"), "fit": str(work / "fit.json")}
    sections: dict[str, dict[str, Any]] = {
        "pass_kv": {"prefill": "pass_kv", "decode": "replicated"},
        "nothing": {},
        "cost": {"profile": files["profile"]},
        "alg1": {"policy": "alg1", "profile": files["profile"]},
        "alg5": {"policy": "alg5", "profile": files["profile"]},
        "fitted": {"policy": "fitted", "fit": files["fit"]},
        "slow": {"profile": str(work / "slow.json")},
    }
    size = torch.distributed.get_world_size()
    for name, section in sections.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        engine = megakv.init_inference(
            model, {"dtype": "fp32", "megakv": {"context_parallel": {"size": size, **section}}}
        )
        # However fast this machine would compute prompts as steps of decoding, how they are spread is chosen.
        traits = engine._runtime.planner.traits
        engine._runtime.planner.traits = replace(traits, sliced_rows=0, spread_rows=0)
        session = engine.session()
        tokens, plans[name] = [], []
        for turn, (length, new) in enumerate(TURNS):
            ids = torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(turn))
            tokens.append(session.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0).tolist())
            plan = engine.report().prefill
            plans[name].append(None if plan is None else asdict(plan))
        found[name] = tokens
        engine.destroy()
    return found, plans


def refusals(comm: Communicator, work: Path) -> dict[str, str]:
    """Messages with which evidence is refused on this rank."""
    rank, found = comm.mesh.rank, {}
    profile = json.loads((work / "profile.json").read_text())
    foreign = {**profile, "fingerprint": {**profile["fingerprint"], "processor": "another"}}
    own = {**profile, "exposed_transfer": 0.125 * rank}
    (work / f"foreign{rank}.json").write_text(json.dumps(foreign))
    (work / f"own{rank}.json").write_text(json.dumps(own))
    (work / f"half{rank}.json").write_text(json.dumps(profile) if rank == 0 else "{")
    for name in ("foreign", "own", "half"):
        section = ContextParallelConfig(size=comm.mesh.cp_size, profile=str(work / f"{name}{rank}.json"))
        try:
            load_evidence(section, comm, heads=8, kv_heads=4, dtype=torch.float32)
        except (ValueError, megakv.base.errors.MegaKVError) as error:
            found[name] = str(error)
    return found


def decode_choices(comm: Communicator, work: Path, config: Any) -> list[str]:
    """What a planner that knows its model chooses for decoding batches of 1, 2 and 64."""
    section = ContextParallelConfig(size=comm.mesh.cp_size, profile=str(work / "profile.json"))
    shape = ModelShape.from_config(config, dtype=torch.float32)
    planner = PassPlanner(comm=comm, config=section, heads=shape.heads, kv_heads=shape.kv_heads, shape=shape)
    size = comm.mesh.cp_size
    return [planner.decode_method(Workload((1,) * batch, (500,) * batch, size)) for batch in (1, 2, 64)]


def main() -> None:
    """Entry of every rank."""
    out, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    quiet_libraries()
    start_distributed(tp_only=False, timeout_s=300)
    size = torch.distributed.get_world_size()
    comm = Communicator(make_mesh(cp_size=size, tp_size=1, timeout_s=300), Ledger())
    seed = comm.gather_objects(random.randrange(1 << 30))[0]
    results: dict[str, Any] = {"seed": seed, "trials": comm.gather_objects(trials(comm, seed))}
    steps: list[int] = []
    config = llama()
    shape = ModelShape.from_config(config, dtype=torch.float32).attention()
    profile = measure_profile(comm, dtype=torch.float32, sizes=[shape], seconds=1.0, report=steps.append)
    fit = fit_policy(comm, shape, dtype=torch.float32, totals=(128, 512), seconds=1.0)
    if comm.mesh.rank == 0:
        profile.save(work / "profile.json")
        profile.model_copy(update={"exchange": Curve.affine(10.0, 1e9)}).save(work / "slow.json")
        fit.save(work / "fit.json")
    comm.barrier()
    results["profiles"] = comm.gather_objects([profile.digest(), fit.digest(), len(steps), max(steps)])
    times = LayerTimes(profile, shape, Workload((300,), (900,), size))
    results["predicted"] = [times.predict(method).seconds for method in METHODS[:3]]
    results["decode"] = comm.gather_objects(decode_choices(comm, work, config))
    results["refusals"] = comm.gather_objects(refusals(comm, work))
    results["engines"], plans = engines(work, config)
    results["plans"] = comm.gather_objects(plans)
    if comm.mesh.rank == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()

"""Random reports for the tests of megakv.tracking."""

import random

from megakv.tracking.measurements import Event, PrefillPlan, Traffic
from megakv.tracking.report import RankReport, RunReport


def random_report(
    random_source: random.Random, *, cp: int = 2, tp: int = 2, layers: int = 3, new_tokens: int = 4
) -> RunReport:
    """A run whose every rank computes back to back, with a transfer per layer that ends in some waiting."""
    ttft, ttit = random_source.uniform(0.5, 5.0), random_source.uniform(0.01, 0.1)
    ranks = []
    for rank in range(cp * tp):
        events = []
        steps = [(0.0, ttft)] + [(ttft + i * ttit, ttft + (i + 1) * ttit) for i in range(new_tokens - 1)]
        for begin, end in steps:
            width = (end - begin) / layers
            for layer in range(layers):
                start = begin + layer * width
                busy = start + width * random_source.uniform(0.5, 0.9)
                events.append(Event("attention", "compute", start, busy, layer))
                events.append(Event("ring", "communication", start, start + width, layer))
                events.append(Event("ring", "wait", busy, start + width, layer))
        exposed = sum(event.end - event.start for event in events if event.kind == "wait")
        ranks.append(
            RankReport(
                rank=rank, host="localhost", cp_rank=rank // tp, tp_rank=rank % tp,
                tokens=random_source.randrange(5000), kv_bytes=random_source.randrange(10**7),
                peak_bytes=random_source.randrange(10**9),
                events=events,
                traffic=[
                    *(Traffic("ring", layer, 3, 1000 + layer, 2 * exposed, exposed) for layer in range(layers)),
                    Traffic("broadcast", None, 1, random_source.randrange(10), 0.1, 0.0),
                ],
            )
        )  # fmt: skip
    return RunReport(
        config={"megakv": {"context_parallel": {"size": cp}}}, model="some/tiny-llama", mesh={"cp": cp, "tp": tp},
        ttft_s=ttft, ttit_s=ttit, step_s=[ttit] * (new_tokens - 1),
        prompt_tokens=sum(rank.tokens for rank in ranks), new_tokens=new_tokens, ranks=ranks,
        versions={"torch": "2.13.0"}, machine={"cores": 4},
        prefill=PrefillPlan("runahead", [[5] * cp], {"single": 0.75, "runahead": 0.5}),
    )  # fmt: skip

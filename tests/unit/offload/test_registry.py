"""A method is one file and one line of the registry."""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megakv.launcher.commands import check
from megakv.offload.method import METHODS, Split
from megakv.offload.prices import GroupPrices
from tests.unit.offload.test_exactness import generate, plain_model, ragged


class Half:
    """Half of the tokens are recomputed, whatever that costs."""

    recomputes, attends_on_host = True, False

    def split(self, costs: GroupPrices) -> Split | None:
        return (
            Split(costs.tokens, costs.inputs // 2, resident=costs.resident, chunk=costs.chunk) if costs.inputs else None
        )


def test_a_toy_method_works_through_the_json(offloaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"dtype": "fp32", "megakv": {"offload": {"enabled": True, "method": "half"}}}))
    listed = argparse.Namespace(config=str(path))
    with pytest.raises(ValueError, match=r"offload.method = 'half': .*'auto', 'stream', 'kvpr', 'chunked', 'cpu_rank'"):
        check.run(listed)
    monkeypatch.setitem(METHODS._entries, "half", Half())
    assert check.run(listed)["methods"]["megakv.offload.method"][-1] == "half"
    model = plain_model("opt")
    ids, mask = ragged(4)
    engine = offloaded(copy.deepcopy(model), method="half")
    assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask))
    steps = [step.report() for step in engine._offloader.steps]
    assert all(step.plan == "half" and 0 < step.recomputed <= step.cached / 2 for step in steps)

"""What an attention method returns is looked at until it is right: its author may be somebody else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakv.attention.methods import METHODS, MethodEntry
from megakv.distributed.ledger import Ledger
from megakv.forward.attend import LayerAttention

HEADS, ROWS, DIM = 2, 3, 4


def test_wrong_results_are_refused_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    out, lse, returned = torch.zeros(HEADS, ROWS, DIM), torch.zeros(HEADS, ROWS), list[Any]()
    monkeypatch.setitem(METHODS._entries, "others", MethodEntry(lambda: lambda call: returned[-1]))
    comm: Any = SimpleNamespace(ledger=Ledger())
    planner: Any = None
    attention = LayerAttention(comm, planner)
    plan: Any = SimpleNamespace(method="others", outer=None)
    call: Any = SimpleNamespace(q_HLD=out, value_dim=DIM, narrowed=False)
    for wrong in (out, (out,), (out, lse, lse), (out, lse.t()), (out.transpose(0, 1), lse), (out[..., 1:], lse)):
        returned.append(wrong)
        for _ in range(2):
            with pytest.raises(ValueError, match="attention method 'others' returned .*; allowed: outputs and their"):
                attention._attended(plan, call)
    returned.append((out, lse))
    assert attention._attended(plan, call)[0] is out

"""A rank of a world as if there were no other."""

from __future__ import annotations

import torch

from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import Mesh


class Alone(Communicator):
    """Communicates with nobody, however many ranks there are.

    device: where it computes.
    """

    def __init__(self, device: torch.device):
        mesh = Mesh(
            rank=0,
            world_size=1,
            cp_size=1,
            cp_rank=0,
            tp_size=1,
            tp_rank=0,
            cp_ranks=(0,),
            tp_ranks=(0,),
            groups={},
            device=device,
            shared_memory=False,
            # Nobody is ever waited for.
            timeout_s=float("inf"),
        )
        super().__init__(mesh, Ledger())

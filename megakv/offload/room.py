"""Whether what a generation will hold fits the budgets: said as its first rows come, before more is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakv.errors import MegaKVError
from megakv.offload.pool import PagePool
from megakv.offload.tiers import in_units

if TYPE_CHECKING:
    from megakv.distributed.sharding import TokenTable
    from megakv.offload.store import TieredStore


def check_room(
    store: TieredStore,
    pool: PagePool,
    layers: int,
    table: TokenTable,
    announced: tuple[int, int],
) -> None:
    """Refuse, as the first rows come, what would outgrow the budgets in this layer or a later one, or while decoding.

    Budgets are the same on all ranks, tokens are not quite: every rank looks at the one with most, so that no rank is
    refused alone while others wait for it.

    Parameters
    ----------
    store : TieredStore
        Of the first layer, before any row of the prompt is in it: the other layers hold as many.
    pool : PagePool
    layers : int
        Attention layers.
    table : TokenTable
        Tokens of every sequence on every context-parallel rank, those of this pass included.
    announced : tuple of int
        Columns of the whole prompt, which may be read in pieces, and tokens that each row may get beyond it.

    Raises
    ------
    MegaKVError
        With what is needed and what there is.
    """
    prompt, new_tokens = announced
    ends = [table.slots(rank, row)[-1:].max(initial=-1) for rank in range(table.size) for row in range(table.batch)]
    to_come = -(-(new_tokens + max(0, prompt - 1 - int(max(ends)))) // table.size)
    lengths, needed = max(
        ((row, layers * store.bytes_for([count + to_come for count in row])) for row in table.counts().tolist()),
        key=lambda found: found[1],
    )
    held = layers * store.nbytes()
    if not pool.has_room(needed - held):
        raise MegaKVError(
            f"this generation needs {in_units(needed)} for offloaded keys and values on a rank "
            f"({sum(lengths)} tokens so far, up to {to_come} more for each of {len(lengths)} sequences), but "
            f"{pool.budgets()}, of which {in_units(pool.free_bytes() + held)} can be used; raise "
            f"megakv.offload.host_gb or disk_gb, lower megakv.offload.page_kib = {pool.page_bytes >> 10} if sequences "
            "are short, or ask for fewer tokens"
        )

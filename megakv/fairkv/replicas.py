"""KV heads on several tensor-parallel ranks, each of which attends to its own part of their tokens, or of the batch.

A replica has all query heads of its KV head, so the output of the attention is a sum over replicas: each weighs its
partial output by ``exp(lse_i - lse)``, and the all-reduce behind the output projection, which tensor parallelism has
anyway, adds them up. Only the log-sum-exps, one number for each query head and query, are exchanged for it. Where
copies divide the batch nothing is: of a sequence one replica has the output, and all others have zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.base.device import upload
from megakv.cache.layer import LayerMapping
from megakv.cache.shares import BatchShares, Copies, HeadShares, shares_of_rank
from megakv.cache.splitting import split_request
from megakv.distributed.comm import Communicator
from megakv.distributed.mesh import Mesh
from megakv.distributed.sharding import IntArray
from megakv.fairkv.mapping import HeadMapping
from megakv.weights.placement.heads import HeadMap


class HeadReplicas:
    """The replicas of a mapping's KV heads, as one rank sees them; `head_map` is its placement, copies whole.

    `copies` says whether they divide the tokens of every sequence, or the sequences.
    """

    def __init__(self, mapping: HeadMapping, head_map: HeadMap, comm: Communicator, copies: Copies = "tokens"):
        self._heads, self._comm, self.copies = head_map, comm, copies
        self._views = [
            _LayerView(layer, head_map, number, comm.mesh, copies, mapping.fixed(number))
            for number, layer in enumerate(mapping.layers)
        ]

    @property
    def shared(self) -> bool:
        """Whether any KV head has more than one rank."""
        return any(view.entries for view in self._views)

    def shares(self, layer: int) -> HeadShares | None:
        """How this rank shares its heads of a layer; None where it shares none."""
        view = self._views[layer]
        return view.shares if view.shared else None

    def held(self, layer: int) -> HeadShares:
        """This rank's heads of a layer, whether it shares any."""
        return self._views[layer].shares

    @cached_property
    def everywhere(self) -> list[list[HeadShares]]:
        """The same of all layers, by tensor-parallel rank."""
        size, views = self._comm.mesh.tp_size, list(enumerate(self._views))
        return [
            [shares_of_rank(view.mapping, rank, size, layer=layer, copies=self.copies) for layer, view in views]
            for rank in range(size)
        ]

    def merge(
        self, call: AttentionCall, out_HLD: Tensor, lse_HL: Tensor, *, complete: bool, scored: bool
    ) -> tuple[Tensor, Tensor]:
        """Weigh this rank's partial outputs so that those of all ranks add up to the attention over all tokens.

        Every rank of the tensor-parallel group must call it. Outputs ``[H, L, Dv]`` and log-sum-exps ``[H, L]`` of this
        rank's heads, over the tokens that it has, are changed in place and returned, the latter over all tokens. Where
        every replica is `complete`, having attended to all tokens, each counts with some of the queries. Where copies
        divide the batch, replicas without a sequence know its log-sum-exps only where attention is `scored`.
        """
        view, tokens = self._views[call.layer], call.tokens
        if not len(tokens) or not view.entries:
            return out_HLD, lse_HL
        group = self._heads.n_heads // self._heads.n_kv_heads
        queries = slice(view.shares.alone * group, None)
        if complete:
            for index in range(len(view.shared)):
                prompts = call.table.prompts[tokens.sequence]
                own = upload(view.shares.own_queries(index, prompts, tokens.slot), out_HLD.device)
                first = (view.shares.alone + index) * group
                out_HLD[first : first + group] *= own[None, :, None]
            return out_HLD, lse_HL
        if self.copies == "batch" and not scored:
            return out_HLD, lse_HL
        length = lse_HL.shape[1]
        # The last row is that of no replica.
        everyone = lse_HL.new_zeros((view.entries + 1, group, length))
        everyone[-1] = -torch.inf
        everyone[view.own_rows] = lse_HL[queries].reshape(len(view.shared), group, length)
        self._comm.all_reduce(everyone[:-1], "tp", operation="lse", layer=call.layer)
        if view.shared:
            own = lse_HL[queries].clone()
            whole = everyone[view.all_rows].logsumexp(1).flatten(0, 1)
            # Where nobody sees a token both are -inf: the output is zero already.
            out_HLD[queries] *= torch.exp(own - whole).nan_to_num_(0.0).unsqueeze(-1)
            lse_HL[queries] = whole
        return out_HLD, lse_HL

    def split(self, layer: int, keep: Sequence[Tensor], prompts: IntArray) -> list[Tensor]:
        """Divide what each sequence keeps among the replicas, from its true budgets, so that the slowest is fastest;
        or where copies divide the batch, leave it with the replica of the sequence.

        Every rank of the tensor-parallel group must call it. Masks are per sequence ``[K, n]``, the same on all
        replicas of a head; `prompts` as in `TokenTable`; returned is what this rank keeps.
        """
        view, mesh = self._views[layer], self._comm.mesh
        if not view.entries:
            return list(keep)
        if isinstance(view.shares, BatchShares):
            return [
                mask & upload(view.shares.own_heads(prompt), mask.device)[:, None]
                for mask, prompt in zip(keep, prompts.tolist(), strict=True)
            ]
        counts = torch.zeros((len(keep), self._heads.n_kv_heads), dtype=torch.int64, device=mesh.device)
        for row, mask in enumerate(keep):
            counts[row, view.kv_heads] = mask.sum(1).to(counts.device)
        budgets = self._comm.all_reduce(counts, "tp", "max", operation="compression", layer=layer).tolist()
        if not view.shared:
            return list(keep)
        own = [mask.clone() for mask in keep]
        for mask_KS, row in zip(own, budgets, strict=True):
            parts = split_request(view.mapping, row, mesh.tp_size, fixed=view.fixed)
            for index, head in enumerate(view.shared, start=view.shares.alone):
                replica = view.mapping.ranks[head].index(mesh.tp_rank)
                first = sum(parts[head][:replica])
                places = mask_KS[index].nonzero().squeeze(1)
                mask_KS[index] = False
                mask_KS[index, places[first : first + parts[head][replica]]] = True
        return own


class _LayerView:
    """What one rank must know of a layer's replicas.

    `own_rows` ``[n]`` says where the log-sum-exps of this rank's shared heads go among the `entries` of all replicas;
    `all_rows` ``[n, most]`` where those of each head's replicas are, filled up by the row behind the last.
    """

    def __init__(self, mapping: LayerMapping, heads: HeadMap, layer: int, mesh: Mesh, copies: Copies, fixed: int):
        self.mapping, self.fixed, rank = mapping, fixed, mesh.tp_rank
        self.kv_heads = list(heads.shard(layer, rank).kv_heads)
        self.shares = shares_of_rank(mapping, rank, mesh.tp_size, layer=layer, copies=copies)
        self.shared = self.kv_heads[self.shares.alone :]
        assert all(len(mapping.ranks[head]) > 1 for head in self.shared), "heads of this rank alone come first"
        counts = [len(ranks) if len(ranks) > 1 else 0 for ranks in mapping.ranks]
        starts, self.entries, widest = [0, *accumulate(counts)], sum(counts), max(1, *counts)
        own = [starts[head] + mapping.ranks[head].index(rank) for head in self.shared]
        table = [
            [starts[head] + index if index < counts[head] else self.entries for index in range(widest)]
            for head in self.shared
        ]
        self.own_rows = torch.tensor(own, dtype=torch.long, device=mesh.device)
        self.all_rows = torch.tensor(table, dtype=torch.long, device=mesh.device).view(-1, widest)

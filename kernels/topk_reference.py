"""The global top-k in plain torch: what a rank packs, and what every rank must find.

W ranks hold S consecutive entries of the KV cache in turn, so that rank r's entry l is the global
(l // S) * W * S + r * S + l % S. A row's answer is the K best of all W * K entries: higher score first, of
equal scores the lower global id; -0 and +0 are equal. NaN and -inf are no score: such an entry, like one with
a negative id, is never found, and places that nothing fills hold -1. Any entry of the global top-k is in its
owner's local top-k, so that nothing is lost.
"""

from __future__ import annotations

import torch

from mhctune.kernels.seam import Problem


def global_ids(local_ids: torch.Tensor, rank: int, problem: Problem) -> torch.Tensor:
    """Return the global ids (int32) of a rank's local ones; -1 of negative ones.

    Global ids must fit int32: KV caches of up to 2^31 - 1 entries.
    """
    size, found = problem.interleave, local_ids.long()
    found = found // size * (problem.ranks * size) + rank * size + found % size
    return torch.where(local_ids < 0, -1, found).int()


def pack(local_ids: torch.Tensor, scores: torch.Tensor, rank: int, problem: Problem) -> torch.Tensor:
    """Return what a rank sends: global ids and the bits of their scores [T, 2, K], int32."""
    return torch.stack([global_ids(local_ids, rank, problem), scores.view(torch.int32)], 1)


def merge(gathered: torch.Tensor) -> torch.Tensor:
    """Return the global top-k ids [T, K] of what all ranks sent [W, T, 2, K], both int32."""
    ranks, rows, _, top_k = gathered.shape
    ids, bits = (gathered[:, :, half].transpose(0, 1).reshape(rows, ranks * top_k) for half in (0, 1))
    scores = bits.contiguous().view(torch.float32)
    scores = torch.where((ids < 0) | scores.isnan(), -torch.inf, scores)
    by_id = ids.argsort(dim=1, stable=True)
    ids, scores = ids.gather(1, by_id), scores.gather(1, by_id)
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    return torch.where(scores.gather(1, best) == -torch.inf, -1, ids.gather(1, best))

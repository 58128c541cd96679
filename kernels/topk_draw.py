"""Drawing inputs of the global top-k: every rank's local one in a named regime, the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mhctune.kernels import topk_reference as reference
from mhctune.kernels.seam import Problem

_SPREAD = 4
"""Local ids are drawn from this many times K entries."""


def _levels(scores: torch.Tensor) -> torch.Tensor:
    """Round to halves: some twenty levels, so that most places are decided by ids."""
    return (scores * 2).round() / 2


def _odd(scores: torch.Tensor) -> torch.Tensor:
    """Put what a sort may trip over among scores with ties, both zeros among them."""
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45])
    scores = _levels(scores)
    places = torch.arange(scores.numel()).view(scores.shape)
    return torch.where(places % 7 == 0, odd[places // 7 % len(odd)], scores)


@dataclass(frozen=True, slots=True)
class TopkRegime:
    """How entries are drawn: a change of the normal scores, the first local id, which ranks hold nothing."""

    scores: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores
    first: int = 0
    empty: Callable[[int, int], bool] = lambda rank, ranks: False


REGIMES = {
    "served": TopkRegime(),
    "ties": TopkRegime(_levels),
    "odd": TopkRegime(_odd),
    "large_ids": TopkRegime(_levels, first=2**24 - 1),
    "some_empty": TopkRegime(_levels, empty=lambda rank, ranks: rank % 2 == 1),
    "all_but_one_empty": TopkRegime(_levels, empty=lambda rank, ranks: rank != ranks - 1),
    "all_empty": TopkRegime(empty=lambda rank, ranks: True),
}


def draw_rank(
    problem: Problem, num_tokens: int, seed: int, regime: str, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's local ids (int32) and scores (fp32), both [T, K], in no order, ids of a row distinct.

    Raises:
        KeyError: there is no such regime.
    """
    chosen, top_k = REGIMES[regime], problem.top_k
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    order = torch.randperm(top_k, generator=generator)
    inside = torch.randint(0, _SPREAD, (num_tokens, top_k), generator=generator)
    scores = chosen.scores(torch.randn(num_tokens, top_k, generator=generator))
    # Global ids beyond 2^24 begin at local ones beyond 2^24 / W.
    ids = (chosen.first // problem.ranks + order * _SPREAD + inside).int()
    if chosen.empty(rank, problem.ranks):
        return torch.full_like(ids, -1), torch.full_like(scores, -torch.inf)
    return ids, scores


def draw_all(problem: Problem, num_tokens: int, seed: int, regime: str) -> torch.Tensor:
    """Return what all ranks send [W, T, 2, K], int32.

    Raises:
        KeyError: there is no such regime.
    """
    sent = (
        reference.pack(*draw_rank(problem, num_tokens, seed, regime, rank), rank, problem)
        for rank in range(problem.ranks)
    )
    return torch.stack(list(sent))

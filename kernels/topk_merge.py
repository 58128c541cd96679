"""The seam `topk_merge`: global top-k ids of the ranks' local ones, under decode-context parallelism."""

from __future__ import annotations

import torch

from mhctune.kernels import arms
from mhctune.kernels import topk_reference as reference
from mhctune.kernels.buffers import BufferSpec, unwritten
from mhctune.kernels.seam import Arm, Deviation, Problem, Seam, Tensors
from mhctune.kernels.topk_arm import outputs_of
from mhctune.kernels.topk_draw import REGIMES, draw_all, draw_rank

USUAL_TOP_K = 2048
"""K of a problem that names none: what the sparse indexers of DeepSeek's models keep."""


class TopkMerge(Seam):
    """Pack global ids and score bits, all-gather, take the best K of a row of W * K.

    On a bench one device stands for the whole group: it packs as the last rank and merges what all ranks
    would have sent, which is an input. The all-gather is not part of it (`mhctune.kernels.topk_group`).
    """

    name = "topk_merge"
    about = "sparse attention under decode-context parallelism: local top-k ids to global ones"
    depends_on = frozenset({"top_k", "ranks", "interleave"})
    regimes = tuple(REGIMES)

    def arms(self, target: str) -> tuple[Arm, ...]:
        """Return the arms of a target, in the order ties are broken."""
        return arms.ARMS.get(target, {}).get(self.name, ())

    def canonical(self, problem: Problem) -> Problem:
        """Return the problem with all but K, W and S at its one value; H is none of this seam's."""
        return Problem(
            1, norm=False, carried=False, top_k=problem.top_k or USUAL_TOP_K, ranks=problem.ranks,
            interleave=problem.interleave,
        )  # fmt: skip

    def moved_bytes(self, problem: Problem, num_tokens: int) -> int:
        """Return the bytes of a launch: read and packed two of K, gathered two of W x K, found one of K."""
        return 4 * problem.top_k * (2 * problem.ranks + 5) * num_tokens

    def label(self, problem: Problem) -> str:
        """Return a label of a problem for people."""
        ranks = f"{problem.ranks} rank" + ("" if problem.ranks == 1 else "s")
        return f"top {problem.top_k} of {ranks}, interleave {problem.interleave}"

    def inputs(
        self, problem: Problem, num_tokens: int, seed: int, device: str, regime: str = ""
    ) -> dict[str, torch.Tensor]:
        """Return the last rank's local top-k and what all ranks send; drawn on the CPU."""
        chosen, last = regime or self.regimes[0], problem.ranks - 1
        ids, scores = draw_rank(problem, num_tokens, seed, chosen, last)
        gathered = draw_all(problem, num_tokens, seed, chosen)
        drawn = {"local_ids": ids, "scores": scores, "gathered": gathered}
        return {name: tensor.to(device) for name, tensor in drawn.items()}

    def outputs(self, problem: Problem, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return what a rank sends [T, 2, K] and the ids that it finds [T, K], int32."""
        return outputs_of(problem, max_tokens)

    def check(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> list[Deviation]:
        """Compare with the reference, to the bit: the error is the number of elements that differ."""
        last = problem.ranks - 1
        expected = {
            "packed": reference.pack(inputs["local_ids"], inputs["scores"], last, problem),
            "ids": reference.merge(inputs["gathered"]),
        }
        return [
            Deviation(name, float((outputs[name] != right).sum()), 0.0, unwritten(outputs[name]))
            for name, right in expected.items()
        ]

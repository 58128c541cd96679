"""The arms of `topk_merge` on CUDA: their spaces. One block merges a row and needs no scratch."""

from __future__ import annotations

from types import MappingProxyType

from mhctune.kernels.buffers import BufferSpec
from mhctune.kernels.cuda.topk_radix import sorted_keys
from mhctune.kernels.seam import Arm, Problem, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable
from mhctune.kernels.topk_arm import TopkArm

_SHARED_SOURCES = (
    "topk_arm.py", "topk_key.py", "cuda/topk_arms.py", "cuda/topk_network.py", "cuda/topk_row.py",
    "cuda/topk_pack.py", "cuda/topk_convert.py", "cuda/topk_radix.py",
)  # fmt: skip
_N_THR = Tunable("n_thr", (1024, 512, 256), "threads of the block that merges a row")
_SORTED = 8
"""Keys a thread may sort: with 16 the 105 steps of 16,384 keys are 17,000 instructions, 48 s to compile."""


class _CudaTopk(TopkArm):
    """What both arms share: kernels for one K, so that a row's loads and keys have their places."""

    target = "cuda"

    def scratch_specs(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return nothing: keys stay in registers and shared memory."""
        return ()

    def entry_params(self, problem: Problem) -> dict[str, int]:
        """Return the parameters of packing and converting."""
        return {"interleave": problem.interleave, "top_k": problem.top_k}

    def _merge(self, problem: Problem, **params: int) -> Variant:
        return Variant.of(
            f"topk_{self.name}", self.target, top_k=problem.top_k, ranks=problem.ranks, **params
        )


def _network_rules(keys: str, count: int) -> tuple[Constraint, ...]:
    """Return the rules of a block that sorts `count` keys."""
    return (
        Constraint(
            "n_thr {n_thr} must be a power of two, 32 to 1024",
            lambda c: 32 <= c["n_thr"] <= 1024 and c["n_thr"].bit_count() == 1,
        ),
        Constraint(
            f"{keys} are more than {_SORTED} a thread of n_thr {{n_thr}}",
            lambda c: sorted_keys(count, max(c["n_thr"], 1)) <= _SORTED * c["n_thr"],
        ),
    )


class Radix(_CudaTopk):
    """Find the K-th key digit by digit, then sort the K best."""

    name = "radix"
    preferred: Config = MappingProxyType({"n_thr": 1024, "digit_bits": 11, "held": 1})
    sources = _SHARED_SOURCES

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        top_k, width = problem.top_k, problem.ranks * problem.top_k
        return SearchSpace(
            self.name,
            (
                _N_THR,
                Tunable("digit_bits", (11, 8), "bits of a key that one pass counts"),
                Tunable("held", (1, 0), "1: keys stay in registers; 0: each pass reads the row again"),
            ),
            (
                *_network_rules(f"the keys of K {top_k}, filled up to a power of two,", top_k),
                Constraint(
                    "digit_bits {digit_bits} must be 4 to 13: counts are in shared memory",
                    lambda c: 4 <= c["digit_bits"] <= 13,
                ),
                Constraint("held {held} must be 0 or 1", lambda c: c["held"] in (0, 1)),
                Constraint(
                    f"{width} entries are more registers than n_thr {{n_thr}} threads hold: 16 entries a "
                    "thread of 1024, 32 of 512, 64 of fewer",
                    lambda c: (
                        not c["held"]
                        or -(-width // max(c["n_thr"], 1))
                        <= (64 if c["n_thr"] < 512 else 16384 // c["n_thr"])
                    ),
                ),
                Constraint(
                    "held 0 needs n_thr {n_thr} of 512 at most: with 64 registers a thread the loads spill",
                    lambda c: bool(c["held"]) or c["n_thr"] <= 512,
                ),
            ),
        )

    def merge_variant(self, problem: Problem, config: Config) -> Variant:
        """Return the kernel that merges."""
        return self._merge(problem, **{name: config[name] for name in ("n_thr", "digit_bits", "held")})


class Bitonic(_CudaTopk):
    """Sort runs by a bitonic network and fold them into the best one."""

    name = "bitonic"
    preferred: Config = MappingProxyType({"n_thr": 512, "run_k": 1})
    sources = (*_SHARED_SOURCES, "cuda/topk_bitonic.py")

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        top_k, ranks = problem.top_k, problem.ranks

        def keys_fit(config: Config) -> bool:
            return all(rule.allows(config) for rule in _network_rules("", config["run_k"] * top_k))

        n_thr_rule, _ = _network_rules("", top_k)
        return SearchSpace(
            self.name,
            (_N_THR, Tunable("run_k", (1, 2, 4), "ranks whose entries are sorted at once")),
            (
                n_thr_rule,
                Constraint(
                    f"run_k {{run_k}} must be 1 to the {ranks} ranks", lambda c: 1 <= c["run_k"] <= ranks
                ),
                Constraint(
                    f"the keys of run_k {{run_k}} x K {top_k}, filled up to a power of two, are more than "
                    f"{_SORTED} a thread of n_thr {{n_thr}}",
                    keys_fit,
                ),
            ),
        )

    def merge_variant(self, problem: Problem, config: Config) -> Variant:
        """Return the kernel that merges."""
        return self._merge(problem, n_thr=config["n_thr"], run_k=config["run_k"])


ARMS: tuple[Arm, ...] = (Radix(), Bitonic())

"""The arms of `topk_merge` on the C backend: their spaces and scratch."""

from __future__ import annotations

from types import MappingProxyType

from mhctune.kernels.buffers import BufferSpec
from mhctune.kernels.seam import Arm, Problem, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable
from mhctune.kernels.topk_arm import TopkArm, scratch

_SHARED_SOURCES = (
    "topk_arm.py", "topk_key.py", "c/topk_arms.py", "c/topk_pack.py", "c/topk_convert.py",
)  # fmt: skip
_SELECT_BITS = Tunable("select_bits", (0, 8, 11, 14), "top bits of a key that choose what is sorted; 0: all")
_DIGIT_BITS = Tunable("digit_bits", (8, 11), "bits of a key that one pass sorts by")
_RUN_K = Tunable("run_k", (1, 2, 4, 8), "length of a run that is sorted before it is folded, in K")


class Radix(TopkArm):
    """Select by the top bits of the keys, then sort what is left digit by digit."""

    name = "radix"
    target = "c"
    # At K 2048 and 8 ranks 67 us a row; without selection 247, with a bitonic network 360 (torch.topk: 1940).
    preferred: Config = MappingProxyType({"select_bits": 11, "digit_bits": 11})
    sources = (*_SHARED_SOURCES, "c/topk_radix.py")

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        rules = (
            Constraint("select_bits {select_bits} must be 0 to 16", lambda c: 0 <= c["select_bits"] <= 16),
            Constraint("digit_bits {digit_bits} must be 1 to 16", lambda c: 1 <= c["digit_bits"] <= 16),
        )
        return SearchSpace(self.name, (_SELECT_BITS, _DIGIT_BITS), rules)

    def merge_variant(self, problem: Problem, config: Config) -> Variant:
        """Return the kernel that merges: one for every K and W, which only bound its loops."""
        bits = {name: config[name] for name in ("select_bits", "digit_bits")}
        return Variant.of("topk_radix", self.target, **bits)

    def scratch_specs(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return two rows of keys, between which the passes alternate, and a digit's counts."""
        counts = 2 ** max(config["select_bits"], config["digit_bits"])
        return (
            scratch("keys", 2 * problem.ranks * problem.top_k, "int64", max_tokens),
            scratch("counts", counts, "int32", max_tokens),
        )


class Bitonic(TopkArm):
    """Sort runs by a bitonic network and fold them into the best K."""

    name = "bitonic"
    target = "c"
    preferred: Config = MappingProxyType({"run_k": 1})
    sources = (*_SHARED_SOURCES, "c/topk_bitonic.py")

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem: networks are of powers of two."""
        top_k, ranks = problem.top_k, problem.ranks
        rules = (
            Constraint(f"K {top_k} is no power of two", lambda c: top_k.bit_count() == 1),
            Constraint(
                f"run_k {{run_k}} must be a power of two and hold no more than the {ranks} ranks' entries",
                lambda c: c["run_k"] > 0 and c["run_k"].bit_count() == 1 and c["run_k"] < 2 * ranks,
            ),
        )
        return SearchSpace(self.name, (_RUN_K,), rules)

    def merge_variant(self, problem: Problem, config: Config) -> Variant:
        """Return the kernel that merges: one for all K, W and lengths of a run."""
        return Variant.of("topk_bitonic", self.target)

    def scalars(self, problem: Problem, config: Config) -> tuple[int, ...]:
        """Return the binary logarithm of a run."""
        return ((config["run_k"] * problem.top_k).bit_length() - 1,)

    def scratch_specs(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the keys, filled up to whole runs."""
        runs = -(-problem.ranks // config["run_k"])
        return (scratch("keys", runs * config["run_k"] * problem.top_k, "int64", max_tokens),)


ARMS: tuple[Arm, ...] = (Radix(), Bitonic())

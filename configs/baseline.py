"""What runtimes ship today: their fused bands and split rules, as data that answers by token count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from mhctune.configs.schema import Name, Positive, Strict


@dataclass(frozen=True, slots=True)
class BaselineChoice:
    """What a runtime launches for a token count: the route and the values that it fixes there."""

    arm: Literal["fused", "unfused"]
    config: dict[str, int]


class FusedBand(Strict):
    """Token counts for which a runtime folds the post block into the projection, and with which config.

    Attributes:
        last: The largest token count of the band; the first is what the band before left over.
        max_hidden: Only up to this hidden size; larger ones take the next band with the same `last`.
    """

    last: Positive
    max_hidden: Positive | None = None
    tile_n: Positive
    n_splits: Positive
    n_thr: Positive


class SplitStep(Strict):
    """Estimates up to `up_to` (without it: all the rest) become `n_splits`."""

    up_to: Positive | None = None
    n_splits: Positive


class SplitRule(Strict):
    """How the unfused route counts its splits: an estimate from shape and SM count, then a rounding.

    Attributes:
        block_m, block_k: Tokens and elements of K of a tile.
        blocks_per_split: Tiles of K that a split has at least.
        rounding: `none`; `power_of_two`, downward; `steps`.
        steps: The rounding by steps, in rising order.
    """

    block_m: Positive = 64
    block_k: Positive = 64
    blocks_per_split: Positive = 4
    rounding: Literal["none", "power_of_two", "steps"] = "none"
    steps: tuple[SplitStep, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _steps_are_whole(self) -> SplitRule:
        if (self.rounding == "steps") != bool(self.steps):
            raise ValueError("steps are given exactly with the rounding 'steps'")
        limits = [step.up_to for step in self.steps]
        known = [limit for limit in limits if limit is not None]
        if self.steps and (limits[-1] is not None or known != limits[:-1] or known != sorted(set(known))):
            raise ValueError("steps must rise, and only the last may be without up_to")
        return self

    def estimate(self, num_tokens: int, k_size: int, sm_count: int) -> int:
        """Return the splits that fill the SMs: SMs per tile row, with `blocks_per_split` tiles of K each."""
        rows = -(-num_tokens // self.block_m)
        blocks = -(-k_size // self.block_k)
        return max(1, min(sm_count // rows, blocks // self.blocks_per_split))

    def splits(self, num_tokens: int, k_size: int, sm_count: int) -> int:
        """Return the splits that the runtime takes."""
        raw = self.estimate(num_tokens, k_size, sm_count)
        if self.rounding == "power_of_two":
            return 1 << (raw.bit_length() - 1)
        return next((step.n_splits for step in self.steps if step.up_to is None or raw <= step.up_to), raw)


class Baseline(Strict):
    """What a runtime serves for a seam with a post block and a projection.

    Attributes:
        source: Where it was read.
        seams: The seams that a runtime serves by it; none for a rule that is only compared with.
        hidden_multiple: The fused route takes only hidden sizes that are multiples of this.
        fused: The fused bands in rising order; above the last one the route is `unfused`.
        split: How the unfused route counts its splits.
    """

    name: Name
    about: str
    source: str
    seams: tuple[Name, ...] = Field(default=(), strict=False)
    hidden_multiple: Positive = 1
    fused: tuple[FusedBand, ...] = Field(default=(), strict=False)
    split: SplitRule

    @model_validator(mode="after")
    def _bands_rise(self) -> Baseline:
        lasts = [band.last for band in self.fused]
        if lasts != sorted(lasts):
            raise ValueError(f"fused bands end at {lasts}; they must be in rising order")
        return self

    def choice(self, num_tokens: int, hidden_size: int, sm_count: int, streams: int = 4) -> BaselineChoice:
        """Return what is served for a token count on a GPU with `sm_count` SMs.

        `streams` are projected, 4 or, where an embedding enters, the one that they are all equal to.

        Raises:
            ValueError: a count that is not positive.
        """
        for name, value in (("token count", num_tokens), ("hidden size", hidden_size), ("SMs", sm_count)):
            if value < 1:
                raise ValueError(f"baseline {self.name!r}: {name} {value} must be positive")
        if hidden_size % self.hidden_multiple == 0:
            for band in self.fused:
                if num_tokens <= band.last and hidden_size <= (band.max_hidden or hidden_size):
                    config = {"tile_n": band.tile_n, "n_splits": band.n_splits, "n_thr": band.n_thr}
                    return BaselineChoice("fused", config)
        splits = self.split.splits(num_tokens, streams * hidden_size, sm_count)
        return BaselineChoice("unfused", {"n_splits": splits})

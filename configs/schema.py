"""What a TOML file may say: GPU targets, models and sweeps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Positive = Annotated[int, Field(gt=0)]
Eps = Annotated[float, Field(ge=1.2e-38, lt=1)]
"""Below the smallest normal float32 the kernels would see a denormal or zero."""

Target = Literal["c", "cuda"]

Space = dict[Target, dict[str, dict[str, list[Annotated[int, Field(ge=0)]]]]]
"""Target → arm → tunable → the values that are tried."""


class Strict(BaseModel):
    """Frozen, no silent keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Figure(Strict):
    """One number of a GPU and where it comes from.

    `device` was read off a device by this project, `reported` is a device's own output that somebody else
    published, `datasheet` is the maker's promise; `unknown` has no value, it is read at run time.
    """

    value: int | float | None = Field(default=None, gt=0)
    source: Literal["device", "reported", "datasheet", "unknown"]
    note: str = ""

    @model_validator(mode="after")
    def _value_has_a_source(self) -> Figure:
        if (self.value is None) != (self.source == "unknown"):
            raise ValueError("a figure has either a value or the source 'unknown'")
        return self


class Figures(Strict):
    """What is known of a GPU before it is asked."""

    sm_count: Figure
    memory_gib: Figure
    l2_bytes: Figure
    bandwidth_gb_s: Figure


class GpuTarget(Strict):
    """A GPU that can be named on the command line.

    `match` must match the whole device name, as the driver reports it; it is empty for the target that a
    machine without a GPU is.
    """

    name: Name
    about: str
    target: Target
    arch: str
    match: str
    compute_capability: tuple[int, int] | None = None
    figures: Figures

    @field_validator("compute_capability", mode="before")
    @classmethod
    def _pair(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value  # TOML has no tuples

    @field_validator("match")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _target_is_whole(self) -> GpuTarget:
        if self.target == "cuda" and not (self.arch and self.match and self.compute_capability):
            raise ValueError("a target 'cuda' needs arch, match and compute_capability")
        if self.target == "c" and (self.arch or self.match or self.compute_capability):
            raise ValueError("a target 'c' has no arch, match or compute_capability")
        return self

    def recognises(self, device_name: str | None) -> bool:
        """Return whether this is the target of a device; `None` is a machine without a GPU."""
        if device_name is None or not self.match:
            return device_name is None and not self.match
        return re.fullmatch(self.match, device_name.strip()) is not None


class Model(Strict):
    """The constants of a model's mHC seams.

    Attributes:
        delayed: The pre block uses the previous sublayer's pre-mix (V4.1); otherwise its own (V4).
        carried: A pre-mix comes in; otherwise stream 0 is taken, as where the model is entered.
        norm: The layer input is RMS-normed inside the seam.
    """

    name: Name
    about: str
    hidden_size: Positive
    layers: Positive | None = None
    hc_mult: Literal[4] = 4
    delayed: bool
    carried: bool
    norm: bool
    sinkhorn_iters: Positive = 20
    rms_eps: Eps
    hc_pre_eps: Eps
    sinkhorn_eps: Eps
    post_mult: float = Field(gt=0)
    norm_eps: Eps

    def problem_fields(self) -> dict[str, int | float | bool]:
        """Return the keyword arguments of `mhctune.kernels.seam.Problem`."""
        return self.model_dump(exclude={"name", "about", "layers", "delayed"})


class Sweep(Strict):
    """What is raced, how often, and how much a band may lose.

    Attributes:
        seams: The seams of a family, tuned one after the other; the space's arms and tunables then count for
            each seam that has them. `--seam` picks one.
        hidden_size: Instead of the models'; a family may be of seams of V4 and of V4.1.
        shipped: Whether the candidates that runtimes ship (`configs/baselines`) are raced too, whatever the
            space says.
        aux: The problem also asks for the mean over the streams, where the seam has it.
        top_k, ranks, interleave: K, W and S of the global top-k (`topk_merge`); its token counts are rows.
        samples: Timed replays of each candidate that reaches the end of its race.
        max_regret: Bound of the bands; 0.05 lets a choice be 5 % slower than the best of its cell.
        l2: `warm` times the same buffers launch after launch, `cold` slots that outgrow the cache (on GPUs).
        until: `end` times the whole launch, `layer_input` what comes before the layer input is complete.
        space: Values that tunables are limited to; what is not named keeps every legal value.
    """

    name: Name
    about: str
    seam: str = "post_pre_delayed"
    seams: tuple[str, ...] = Field(default=(), strict=False)
    hidden_size: Positive | None = None
    shipped: bool = False
    model: str = "deepseek-v4.1-flash"
    aux: bool = False
    top_k: Positive = 2048
    ranks: Positive = 8
    interleave: Positive = 1
    token_counts: tuple[int, ...]
    samples: int = Field(ge=5)
    max_regret: float = Field(ge=0, lt=1)
    l2: Literal["warm", "cold"] = "warm"
    until: Literal["end", "layer_input"] = "end"
    space: Space = Field(default_factory=dict)

    @field_validator("token_counts", mode="before")
    @classmethod
    def _counts(cls, value: object) -> object:
        return check_token_counts(value) if isinstance(value, (list, tuple)) else value

    @field_validator("space")
    @classmethod
    def _values(cls, space: Space) -> Space:
        for target, arms in space.items():
            for arm, tunables in arms.items():
                for tunable, values in tunables.items():
                    if not values or len(set(values)) != len(values):
                        raise ValueError(
                            f"{target}.{arm}.{tunable} is {values}; give at least one value, none twice"
                        )
        return space


MAX_TOKENS = 2**31 - 1
"""Kernels count tokens in int32."""


def check_token_counts(values: Sequence[object]) -> tuple[int, ...]:
    """Return token counts in rising order.

    Raises:
        ValueError: there is none, or one is no integer, zero, negative, too large or repeated.
    """
    if not values:
        raise ValueError("no token count given; give at least one positive integer")
    counts: list[int] = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"token count {value!r} is no integer; allowed are positive integers")
        if value < 1:
            word = "zero" if value == 0 else "negative"
            raise ValueError(f"token count {value} is {word}; allowed are positive integers")
        if value > MAX_TOKENS:
            raise ValueError(f"token count {value} is too large; allowed are integers up to {MAX_TOKENS}")
        if value in counts:
            raise ValueError(f"token count {value} is repeated; give each count once")
        counts.append(value)
    return tuple(sorted(counts))

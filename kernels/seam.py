"""Seams, arms and problems: what is computed, by which routes, and what is fixed while serving."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mhctune.kernels.buffers import BufferSpec, Role
from mhctune.kernels.space import Config, SearchSpace
from mhctune.kernels.until import END

Tensors = Mapping[str, torch.Tensor]
Launch = Callable[[Tensors, Tensors], None]
"""Runs a candidate: (inputs by name, buffers by name). Allocates nothing, returns nothing."""

PACKAGE = Path(__file__).resolve().parent

_YOUNGER: Mapping[str, object] = {"aux": False, "delayed": True, "top_k": 0, "ranks": 1, "interleave": 1}
"""Fields that came later, at the value that tables without them mean: their digests must not change."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is fixed when serving; it keys the table.

    Attributes:
        hidden_size: H, elements of a stream.
        carried: collapse with the previous sublayer's pre-mix; otherwise stream 0 is taken (model entry).
        norm: apply RMSNorm to the layer input.
        sinkhorn_iters: column steps of the Sinkhorn normalisation.
        rms_eps: inside the rsqrt of the projection's RMS.
        hc_pre_eps: added to the pre-mix after its sigmoid.
        sinkhorn_eps: in Sinkhorn's quotient and denominators.
        post_mult: factor of the post-mix.
        norm_eps: inside the rsqrt of the RMSNorm.
        hc_mult: streams; the kernels are written for 4.
        aux: also write the mean over the new streams, which draft models read.
        delayed: collapse with the incoming pre-mix and return the next one (V4.1); otherwise collapse with
            the sublayer's own (V4).
        top_k: K, entries of a row of the global top-k; 0 for seams that have none.
        ranks: W, that share the KV cache (decode-context parallelism).
        interleave: S, consecutive entries of the KV cache that a rank holds before the next rank's turn.

    The eps values and post_mult are run-time scalars: they key the table, not the compiled kernels. A seam
    that does not depend on a field holds it at one value (`Form.canonical`).
    """

    hidden_size: int
    carried: bool = True
    norm: bool = True
    sinkhorn_iters: int = 20
    rms_eps: float = 1e-20
    hc_pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    post_mult: float = 2.0
    norm_eps: float = 1e-20
    hc_mult: int = 4
    aux: bool = False
    delayed: bool = True
    top_k: int = 0
    ranks: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        """Refuse what no kernel here computes."""
        if self.hc_mult != 4:
            raise ValueError(f"hc_mult {self.hc_mult} is not supported; the kernels mix 4 streams")
        if self.hidden_size < 1:
            raise ValueError(f"hidden_size {self.hidden_size} must be positive")
        if self.sinkhorn_iters < 1:
            raise ValueError(f"sinkhorn_iters {self.sinkhorn_iters} must be at least 1")
        for name, least in (("top_k", 0), ("ranks", 1), ("interleave", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} must be at least {least}")
        for name in ("rms_eps", "hc_pre_eps", "sinkhorn_eps", "norm_eps"):
            value = getattr(self, name)
            # Below the smallest normal fp32 number the kernels would see a denormal or zero.
            if not 1.2e-38 <= value <= 3.4e38:
                raise ValueError(f"{name} {value} must be a normal positive float32 (1.2e-38 to 3.4e38)")
        if not abs(self.post_mult) <= 3.4e38:
            raise ValueError(f"post_mult {self.post_mult} must be a finite float32")
        # 2 and 2.0 are equal but differ as JSON: without this one problem would have two digests.
        for name in ("rms_eps", "hc_pre_eps", "sinkhorn_eps", "post_mult", "norm_eps"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("carried", "norm", "aux", "delayed"):
            object.__setattr__(self, name, bool(getattr(self, name)))

    def to_dict(self) -> dict[str, int | float | bool]:
        """Return the fields by name, younger ones only where they differ; `Problem(**d)` is the inverse."""
        return {name: value for name, value in asdict(self).items() if _YOUNGER.get(name) != value}

    @property
    def digest(self) -> str:
        """Return 16 hex digits that name this problem in tables and databases."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """Return a label for people."""
        mix = "own" if not self.delayed else "carried" if self.carried else "absent"
        norm = f"norm {self.norm_eps:g}" if self.norm else "no norm"
        aux = ", aux" if self.aux else ""
        return f"hidden {self.hidden_size}, {mix} pre-mix, {norm}, {self.sinkhorn_iters} iterations{aux}"


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """One compiled kernel: its name, target and compile-time parameters."""

    kernel: str
    target: str
    params: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: str, target: str, **params: int) -> Variant:
        """Build a variant; the order of the parameters does not matter."""
        return cls(kernel, target, tuple(sorted(params.items())))

    def __str__(self) -> str:
        """Return a label for people, such as `c:post(block_h=256, hidden_size=5120)`."""
        return f"{self.target}:{self.kernel}({', '.join(f'{name}={value}' for name, value in self.params)})"


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a buffer that one program of a launch writes: half-open ranges, an axis each."""

    buffer: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """Where the scratch buffers of a launch lie in one flat float32 tensor.

    Attributes:
        numel: Elements that all of them need.
        places: Name, first element, elements and shape of each.
    """

    numel: int
    places: tuple[tuple[str, int, int, tuple[int, ...]], ...]

    def views(self, scratch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut up a tensor of at least `numel` elements; allocates nothing."""
        return {name: scratch.narrow(0, first, n).view(shape) for name, first, n, shape in self.places}


class Arm(ABC):
    """A route that computes a seam on a target. Stateless; everything follows from the arguments."""

    name: str
    target: str
    rounding: str = "rounded"
    sources: tuple[str, ...]
    """Files below `kernels/` whose bytes decide what is compiled."""
    preferred: Config
    """Served without a table where it is legal."""

    @abstractmethod
    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""

    @abstractmethod
    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the compiled kernels that a config launches, in launch order."""

    @abstractmethod
    def plan(self, problem: Problem, config: Config, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return every tensor that a launch writes, outputs and scratch, for up to `max_tokens`."""

    @abstractmethod
    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes: the legality certificate.

        A legal config's rectangles cover every element of every buffer exactly once; tests hold the
        constraints to that. The constraints refuse more: a slice of K that an unfused projection skips is a
        missing read, so that every element is written and the sums are still wrong.
        """

    @abstractmethod
    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch of a config, given its compiled `variants` in order."""

    def releases(self, problem: Problem, config: Config) -> Mapping[str, int]:
        """Return after how many launches outputs are complete, by name; the others are at the end.

        Launches are counted as `variants` are: `bind` launches each kernel once, in that order. What is
        released early is written for good there, by those launches alone. Benches hold arms to it.
        """
        return {}

    def launches_until(self, problem: Problem, config: Config, until: str) -> int:
        """Return how many launches come before an output is complete, or all for `end`."""
        every = len(self.variants(problem, config))
        return every if until == END else self.releases(problem, config).get(until, every)

    def bind_until(
        self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]], until: str
    ) -> Launch:
        """Return what `bind` does, without the launches that come after an output is complete."""
        last = self.launches_until(problem, config, until)
        return self.bind(problem, config, [*kernels[:last], *[_left_out] * (len(kernels) - last)])

    def scratch_layout(self, problem: Problem, config: Config, num_tokens: int) -> ScratchLayout:
        """Return where this arm's scratch buffers lie in one flat float32 tensor for `num_tokens`."""
        places, first = [], 0
        for spec in self.plan(problem, config, num_tokens):
            if spec.role is Role.SCRATCH:
                places.append((spec.name, first, spec.numel, spec.shape))
                first += _padded(spec.numel)
        return ScratchLayout(first, tuple(places))

    def numerics(self, config: Config) -> str:
        """Return the numerics class: where results are rounded, and into how many sums they are split."""
        return f"{self.rounding}/{config.get('n_splits', 1)}"

    @property
    def source_hash(self) -> str:
        """SHA-256 over the names and bytes of the source files, read without importing them."""
        digest = hashlib.sha256()
        for name in self.sources:
            digest.update(name.encode() + b"\0" + (PACKAGE / name).read_bytes() + b"\0")
        return digest.hexdigest()


def _left_out(*arguments: object) -> None:
    """Launch nothing."""


def _padded(numel: int) -> int:
    """Round up to 64 elements, so that every buffer begins on a 256-byte line."""
    return -(-numel // 64) * 64


class Seam(ABC):
    """A fused mHC operation that has tunables."""

    name: str
    about: str

    @abstractmethod
    def arms(self, target: str) -> tuple[Arm, ...]:
        """Return the arms of a target (`c` or `cuda`), in the order ties are broken."""

    def preference(self, target: str) -> tuple[Arm, ...]:
        """Return the arms in the order in which the choice served without a table is sought."""
        return self.arms(target)

    depends_on: frozenset[str] = frozenset()
    """Fields of a problem, beside the hidden size, that the seam depends on."""

    @abstractmethod
    def canonical(self, problem: Problem) -> Problem:
        """Return the problem with what this seam does not depend on at its one value."""

    regimes: tuple[str, ...]
    """Names of input regimes, the one that sweeps use first."""

    @abstractmethod
    def inputs(
        self, problem: Problem, num_tokens: int, seed: int, device: str, regime: str = ""
    ) -> dict[str, torch.Tensor]:
        """Return fresh random inputs by name; the same seed gives the same values on every device.

        Raises:
            KeyError: the seam has no such regime.
        """

    @abstractmethod
    def outputs(self, problem: Problem, max_tokens: int) -> tuple[BufferSpec, ...]:
        """Return the seam's outputs, whatever the arm."""

    @abstractmethod
    def check(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> list[Deviation]:
        """Compare outputs with the staged float64 reference; every output is listed."""

    def needs(self, problem: Problem, until: str) -> frozenset[str] | None:
        """Return the tensors that no arm can do without until an output is complete; None: all.

        What is read for it, and itself; nothing else needs to be written by then.

        Raises:
            ValueError: the seam has no such output.
        """
        if until == END:
            return None
        known = [spec.name for spec in self.outputs(problem, 1)]
        if until not in known:
            raise ValueError(
                f"seam {self.name} has no output {until!r} to time it to; it has {', '.join(known)}"
            )
        return frozenset((until, *self.reads_for(problem, until)))

    def reads_for(self, problem: Problem, until: str) -> Iterable[str]:
        """Return the inputs that an output depends on: all, where the seam does not know better."""
        return self.inputs(problem, 1, 0, "cpu")

    def moved_bytes(self, problem: Problem, num_tokens: int) -> int:
        """Return the bytes that a launch is taken to move, for forecasts: 36 H a token, the unfused route."""
        return 36 * problem.hidden_size * num_tokens

    def label(self, problem: Problem) -> str:
        """Return a label of a problem for people: what this seam depends on."""
        mix = "own" if not problem.delayed else "carried" if problem.carried else "absent"
        parts = {
            "hc_pre_eps": f"{mix} pre-mix",
            "norm": f"norm {problem.norm_eps:g}" if problem.norm else "no norm",
            "sinkhorn_iters": f"{problem.sinkhorn_iters} iterations",
        }
        told = [text for name, text in parts.items() if name in self.depends_on]
        return ", ".join([f"hidden {problem.hidden_size}", *told, *(["aux"] if problem.aux else [])])

    def arm(self, target: str, name: str) -> Arm:
        """Return one arm by name.

        Raises:
            KeyError: the target has no such arm.
        """
        for arm in self.arms(target):
            if arm.name == name:
                return arm
        known = ", ".join(arm.name for arm in self.arms(target)) or "none"
        raise KeyError(f"seam {self.name} has no arm {name!r} on target {target!r}; it has {known}")

    def source_hash(self, target: str) -> str:
        """Return one hash over the sources of all arms of a target."""
        text = "".join(f"{arm.name}:{arm.source_hash};" for arm in self.arms(target))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one output is from its reference, as a multiple of what its arithmetic allows."""

    output: str
    error: float
    bound: float
    unwritten: int = 0
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether every element was written and lies within the bound; NaN does not."""
        return self.unwritten == 0 and self.error <= self.bound

    def __str__(self) -> str:
        """Return the finding as a sentence."""
        if self.unwritten:
            return f"{self.output}: {self.unwritten} elements not written"
        return f"{self.output}: error {self.error:.3g}, bound {self.bound:.3g}{self.where}"

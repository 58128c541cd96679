"""The fused arms on CUDA: post and projection in one kernel, then the epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mhctune.kernels.cuda.arm import MIX_LANES, N_SPLITS, TILE, CudaArm, tile_rules
from mhctune.kernels.post_pre_arm import MIX_SIZE
from mhctune.kernels.seam import Launch, Problem, Region, Tensors, Variant
from mhctune.kernels.space import Config, Constraint, SearchSpace, Tunable


class _Fused(CudaArm):
    """Post and projection in one kernel, then the epilogue: two launches."""

    def bind(self, problem: Problem, config: Config, kernels: Sequence[Callable[..., None]]) -> Launch:
        """Return the launch."""
        post_pre, epilogue = kernels

        def launch(inputs: Tensors, buffers: Tensors) -> None:
            layer_input = buffers["layer_input"]
            post_pre(
                inputs["x"], inputs["residual"], inputs["post_mix"], inputs["comb_mix"],
                inputs.get("pre_mix", inputs["post_mix"]), inputs["fn"],
                buffers["residual_out"], layer_input, buffers["mul"], buffers["sqrsum"],
                buffers["aux"] if problem.aux else layer_input,
            )  # fmt: skip
            self._run_epilogue(epilogue, problem, inputs, buffers)

        return launch

    def _stream_writes(
        self, problem: Problem, config: Config, width: int, num_tokens: int
    ) -> Iterator[Region]:
        """Yield the stream elements that programs write which walk their range of H in steps of `width`."""
        split_h = problem.hidden_size // config["n_splits"]
        for split in range(config["n_splits"]):
            for first in range(split * split_h, split * split_h + split_h // width * width, width):
                yield Region("residual_out", ((0, num_tokens), (0, 4), (first, first + width)))


class Fused(_Fused):
    """The fused route with a projection by fused multiply-adds."""

    name = "fused"
    sources = (*CudaArm._shared_sources, "cuda/fused.py", "cuda/post_pre.py")

    @property
    def preferred(self) -> Config:  # type: ignore[override]
        """Served without a table where it is legal."""
        return self._preferred(tile_n=4, n_splits=4, n_thr=128, vec=2, block_m=1, ahead=0)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        registers = Constraint(
            "block_m {block_m} x (tile_n {tile_n} + 4 x vec {vec}) exceeds the 100 registers that sums and "
            "streams may take of a thread's 255",
            lambda c: c["block_m"] * (c["tile_n"] + 4 * c["vec"]) <= 100,
        )
        return SearchSpace(
            self.name,
            (
                Tunable("tile_n", (1, 2, 3, 4, 6, 8, 12, 24), "columns of the projection a program computes"),
                N_SPLITS,
                Tunable("n_thr", (64, 128, 256), "threads of a program"),
                Tunable("vec", (2, 4, 8), "neighbouring elements a thread loads at once"),
                Tunable("block_m", (1, 2, 4), "tokens a program shares the weights among"),
                Tunable("ahead", (0, 2, 3, 4, 6, 8, 12), "columns whose weights are loaded a step early"),
                *self._epilogue_tunables,
            ),
            (
                *tile_rules(problem.hidden_size, "hidden"),
                registers,
                Constraint(
                    "ahead {ahead} must be at most tile_n {tile_n}, and 4 x vec {vec} x ahead at most the "
                    "128 registers that weights may take",
                    lambda c: 0 <= c["ahead"] <= c["tile_n"] and 4 * c["vec"] * c["ahead"] <= 128,
                ),
                *self._epilogue_rules(problem),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the fused kernel and the epilogue."""
        flags = {**self._post_flags(problem, config), **self._projection_flags()}
        fused = self._tiled("post_pre", problem, config, *TILE, "ahead", **flags)
        return fused, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._stream_writes(problem, config, config["n_thr"] * config["vec"], num_tokens)
        yield from self._partials(config["n_splits"], config["block_m"], config["tile_n"], num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)


class FusedMma(_Fused):
    """The fused route with a projection on tensor cores, at float32 accuracy."""

    name = "fused_mma"
    sources = (*CudaArm._shared_sources, "cuda/fused.py", "cuda/post_pre_mma.py", "cuda/terms.py")

    @property
    def preferred(self) -> Config:  # type: ignore[override]
        """Served without a table where it is legal."""
        return self._preferred(n_splits=16, block_h=64, block_m=64, n_thr=128)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        hidden = problem.hidden_size
        return SearchSpace(
            self.name,
            (
                N_SPLITS,
                Tunable("block_h", (16, 32, 64, 128), "elements of H a program holds of each stream"),
                Tunable("block_m", (16, 32, 64), "tokens a program shares the weights among"),
                Tunable("n_thr", (128, 256), "threads of a program; 256: two programs an SM"),
                *self._epilogue_tunables,
            ),
            (
                Constraint(
                    f"hidden {hidden} is not a multiple of n_splits {{n_splits}} x block_h {{block_h}}: "
                    "a slice of k would be dropped",
                    lambda c: (
                        min(c["n_splits"], c["block_h"]) > 0 and hidden % (c["n_splits"] * c["block_h"]) == 0
                    ),
                ),
                Constraint(
                    "block_h {block_h} must be 16, 32, 64 or 128 and block_m {block_m} 16, 32 or 64: whole "
                    "tiles of the tensor cores that fit shared memory",
                    lambda c: c["block_h"] in (16, 32, 64, 128) and c["block_m"] in (16, 32, 64),
                ),
                Constraint(
                    "n_thr {n_thr} must be 128, or 256 where block_h {block_h} and block_m {block_m} are 32 "
                    "or more: each thread takes as many weights and products",
                    lambda c: (
                        c["n_thr"] == 128 or (c["n_thr"] == 256 and min(c["block_h"], c["block_m"]) >= 32)
                    ),
                ),
                Constraint(
                    "block_m {block_m} x block_h {block_h} must be 2 to 64 elements for each of n_thr "
                    "{n_thr} threads: it loads two neighbours or more at once, and holds them in registers",
                    lambda c: 2 * c["n_thr"] <= c["block_m"] * c["block_h"] <= 64 * c["n_thr"],
                ),
                *self._epilogue_rules(problem),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the fused kernel and the epilogue."""
        flags = self._post_flags(problem, config)
        names = ("n_splits", "block_h", "block_m", "n_thr")
        fused = self._tiled("post_pre_mma", problem, config, *names, **flags)
        return fused, self._epilogue(problem, config)

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        yield from self._stream_writes(problem, config, config["block_h"], num_tokens)
        yield from self._partials(config["n_splits"], config["block_m"], MIX_SIZE, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)


class FusedWs(_Fused):
    """The fused route for many tokens: warp-specialised, the projection on tensor cores."""

    name = "fused_ws"
    sources = (
        *CudaArm._shared_sources, "cuda/fused.py", "cuda/post_pre_ws.py", "cuda/streaming.py",
        "cuda/terms.py", "cuda/epilogue_many.py",
    )  # fmt: skip

    @property
    def preferred(self) -> Config:  # type: ignore[override]
        """Served without a table where it is legal."""
        return self._preferred(n_splits=8, cache=1, mix_lanes=32)

    def space(self, problem: Problem) -> SearchSpace:
        """Return the legal configs for a problem."""
        hidden = problem.hidden_size
        return SearchSpace(
            self.name,
            (
                N_SPLITS,
                Tunable("cache", (0, 1, 2), "1 stores streams past the L2, 2 also loads them so"),
                MIX_LANES,
                *self._epilogue_tunables,
            ),
            (
                Constraint(
                    f"hidden {hidden} is not a multiple of 64 x n_splits {{n_splits}}: a slice of k would be "
                    "dropped",
                    lambda c: c["n_splits"] > 0 and hidden % (64 * c["n_splits"]) == 0,
                ),
                Constraint("cache {cache} must be 0, 1 or 2", lambda c: c["cache"] in (0, 1, 2)),
                Constraint(
                    "mix_lanes {mix_lanes} must be 32, or 1 where the layer input is delayed (else the "
                    "collapse waits for one lane) and epilogue_thr {epilogue_thr} is 64 or more: a warp has "
                    "comb, one pre and post",
                    lambda c: (
                        c["mix_lanes"] == 32
                        or (c["mix_lanes"] == 1 and problem.delayed and c["epilogue_thr"] >= 64)
                    ),
                ),
                *self._epilogue_rules(problem),
            ),
        )

    def variants(self, problem: Problem, config: Config) -> tuple[Variant, ...]:
        """Return the fused kernel and the epilogue."""
        flags = self._post_flags(problem, config)
        fused = self._tiled("post_pre_ws", problem, config, "n_splits", "cache", **flags)
        return fused, self._epilogue(problem, config)

    def _epilogue(self, problem: Problem, config: Config) -> Variant:
        if config["mix_lanes"] == 32:
            return super()._epilogue(problem, config)
        return Variant.of(
            "epilogue_many", self.target, hidden_size=problem.hidden_size, n_splits=config["n_splits"],
            sinkhorn_iters=problem.sinkhorn_iters, carried=int(problem.carried), norm=int(problem.norm),
            collapsed=config.get("collapse", 0), n_thr=config["epilogue_thr"], vec=8,
        )  # fmt: skip

    def writes(self, problem: Problem, config: Config, num_tokens: int) -> Iterator[Region]:
        """Yield what each program writes."""
        for first in range(0, problem.hidden_size, 64):
            yield Region("residual_out", ((0, num_tokens), (0, 4), (first, first + 64)))
        yield from self._partials(config["n_splits"], 64, MIX_SIZE, num_tokens)
        yield from self._epilogue_writes(problem, num_tokens)

"""TileLang's own AutoTuner on fused kernels: `python benchmarks/tilelang_autotuner.py COUNT [TOKENS]`.

The first COUNT distinct kernels of the sweep `decode`'s fused arm, post and projection without the epilogue,
at 1 and 32 tokens (or at TOKENS), timed by its cudagraph backend as it comes, from an empty kernel cache. It
checks nothing here: our seconds include a check of every candidate.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

HIDDEN = 5120


def kernel(
    tile_n: int = 4, n_splits: int = 20, n_thr: int = 128, vec: int = 2, block_m: int = 1, ahead: int = 4,
    collapse: int = 1,
) -> object:  # fmt: skip
    """Build the fused kernel with one config; the AutoTuner reads the tunables off this signature."""
    from mhctune.kernels.cuda.post_pre import post_pre

    return post_pre(HIDDEN, tile_n, n_splits, n_thr, vec, block_m, ahead, collapse)


def main(count: int, token_counts: tuple[int, ...]) -> None:
    """Tune each token count from an empty cache and print seconds and winner."""
    os.environ["TILELANG_CACHE_DIR"] = tempfile.mkdtemp()
    import torch
    from tilelang.autotuner import AutoTuner

    from mhctune.autotuner.planner import plan_sweep
    from mhctune.configs.loader import load_gpu
    from mhctune.kernels.buffers import OutputBuffers
    from mhctune.kernels.compiler import PASS_CONFIG, cuda_arch
    from mhctune.kernels.registry import seam as find_seam
    from mhctune.kernels.seam import Problem

    plan = plan_sweep(load_gpu("h200"), "decode", here=False)
    fused = [c for c in plan.candidates if c.arm == "fused"]
    variants = dict.fromkeys(plan.variants_of(candidate)[0] for candidate in fused)
    configs = [dict(variant.params) for variant in variants][:count]
    for config in configs:
        del config["hidden_size"]
    seam, problem = find_seam("post_pre_delayed"), Problem(HIDDEN)
    for tokens in token_counts:
        inputs = seam.inputs(problem, tokens, tokens, "cuda")
        largest = max(fused, key=lambda candidate: candidate.config["n_splits"])
        views = OutputBuffers(seam.arm("cuda", "fused").plan(problem, largest.config, tokens), "cuda").bind(
            tokens
        )
        partials = {
            n: (torch.empty(n, tokens, 24, device="cuda"), torch.empty(n, tokens, device="cuda"))
            for n in {config["n_splits"] for config in configs}
        }

        def supply(
            params: list[object], inputs: dict[str, torch.Tensor] = inputs, views: object = views,
            partials: dict[int, tuple[torch.Tensor, ...]] = partials,
        ) -> list[torch.Tensor]:  # fmt: skip
            splits = int(params[8].shape[0])  # type: ignore[attr-defined]
            return [
                *(inputs[name] for name in ("x", "residual", "post_mix", "comb_mix", "pre_mix", "fn")),
                views["residual_out"], views["layer_input"],  # type: ignore[index]
                *partials[splits],
            ]  # fmt: skip

        tuner = (
            AutoTuner.from_kernel(kernel=kernel, configs=configs)
            .set_compile_args(target={"kind": "cuda", "arch": cuda_arch()}, pass_configs=dict(PASS_CONFIG))
            .set_profile_args(supply_prog=supply, skip_check=True, backend="cudagraph")
        )
        os.environ["TILELANG_AUTO_TUNING_DISABLE_CACHE"] = "1"
        begin = time.monotonic()
        result = tuner.run()
        taken = time.monotonic() - begin
        print(
            f"{tokens} tokens: {len(configs)} kernels in {taken:.1f} s, {taken / len(configs):.2f} s each; "
            f"winner {result.config} at {1e3 * (result.latency or float('nan')):.2f} us",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), tuple(int(text) for text in sys.argv[2:]) or (1, 32))

"""The released layer input on the C backend: post block, collapse with the carried pre-mix and RMSNorm."""

import tilelang.language as T
from tvm.tirx import PrimFunc

from mhctune.kernels.c.bf16 import mean, narrow, round_to_bf16, weighted, widen
from mhctune.kernels.c.epilogue import normalise
from mhctune.kernels.c.lanes import LANES
from mhctune.kernels.c.post import mix_streams


def post_norm(hidden_size: int, block_h: int, carried: int, norm: int, write_aux: int = 0) -> PrimFunc:
    """Build the kernel that completes the layer input: one program a token, `block_h` elements at a time.

    Args:
        hidden_size: H, a multiple of `block_h`.
        block_h: elements of H that are mixed at a time.
        carried: collapse with `pre_mix`; otherwise with weights [1, 0, 0, 0] (model entry).
        norm: apply RMSNorm to the collapse, rounded to bf16.
        write_aux: store the mean over the new streams in `aux`.

    What a flag leaves out is neither read nor written: its slot may hold any tensor of its shape.
    """
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def mhctune_post_norm(
        x: T.Tensor((num_tokens, hidden_size), "uint16"),
        residual: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        post_mix: T.Tensor((num_tokens, 4), "float32"),
        comb_mix: T.Tensor((num_tokens, 4, 4), "float32"),
        pre_mix: T.Tensor((num_tokens, 4), "float32"),
        norm_weight: T.Tensor((hidden_size,), "uint16"),
        residual_out: T.Tensor((num_tokens, 4, hidden_size), "uint16"),
        layer_input: T.Tensor((num_tokens, hidden_size), "uint16"),
        aux: T.Tensor((num_tokens, hidden_size), "uint16"),
        norm_eps: T.float32,
    ):
        with T.Kernel(num_tokens) as token:
            streams = T.alloc_local((1, 4, block_h), "uint32")
            weights = T.alloc_local((4,), "float32")
            row = T.alloc_local((hidden_size,), "float32")
            squares = T.alloc_local((LANES,), "float32")
            scalar = T.alloc_local((1,), "float32")
            if carried:
                for j in T.serial(4):
                    weights[j] = pre_mix[token, j]
            for block in T.serial(hidden_size // block_h):
                mix_streams(x, residual, post_mix, comb_mix, streams, 0, token, block * block_h, block_h)
                for j, h in T.grid(4, block_h):
                    residual_out[token, j, block * block_h + h] = T.cast(streams[0, j, h], "uint16")
                for h in T.serial(block_h):
                    # As stored: what is collapsed is the rounded stream.
                    r0 = widen(T.cast(streams[0, 0, h], "uint16"))
                    r1 = widen(T.cast(streams[0, 1, h], "uint16"))
                    r2 = widen(T.cast(streams[0, 2, h], "uint16"))
                    r3 = widen(T.cast(streams[0, 3, h], "uint16"))
                    if carried:
                        row[block * block_h + h] = round_to_bf16(weighted(weights, r0, r1, r2, r3))
                    else:
                        row[block * block_h + h] = r0
                    if write_aux:
                        aux[token, block * block_h + h] = T.cast(narrow(mean(r0, r1, r2, r3)), "uint16")
            if norm:
                normalise(row, squares, scalar, norm_weight, layer_input, token, hidden_size, 1, norm_eps)
            else:
                for h in T.serial(hidden_size):
                    layer_input[token, h] = T.cast(narrow(row[h]), "uint16")

    return mhctune_post_norm

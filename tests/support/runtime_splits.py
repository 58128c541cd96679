"""The kernels of an arm with n_splits known at run time only: the same source, compiled as another variant.

Where a split begins is then no constant, so that safe-memory legalization cannot prove an access inside its
tensor and guards it: 31.1 us instead of 3.1 us for one such kernel on an H200 (facts of this project).
"""

from __future__ import annotations

import hashlib
from typing import Any

import tilelang
import tilelang.language as T

from mhctune.kernels import compiler
from mhctune.kernels.compiler import Compiled, Passes
from mhctune.kernels.seam import Variant


class Hidden(int):
    """A hidden size whose splits are whole steps of a program: what the C kernels' loops need."""

    step: int

    def __floordiv__(self, other: Any) -> Any:
        """Divide; by a number of the run time in whole steps."""
        if isinstance(other, int):
            return int(self) // other
        return T.truncdiv(int(self) // self.step, other) * self.step


def compile_runtime_splits(variant: Variant, passes: Passes | None = None) -> Compiled:
    """Compile a variant as `compile_variant` does; the fused kernel reads n_splits off its outputs' shape."""
    params: dict[str, Any] = dict(variant.params)
    if variant.kernel == "post_pre":
        if variant.target == "c":
            params["hidden_size"] = Hidden(params["hidden_size"])
            params["hidden_size"].step = params["block_h"]
        params["n_splits"] = T.dynamic("n_splits")
    program = compiler._factory(variant)(**params)
    kernel = tilelang.compile(program, **compiler._options(variant.target, passes))
    if variant.target == "cuda":
        compiler._finish(kernel)
    return Compiled(kernel, hashlib.sha256(kernel.get_kernel_source().encode()).hexdigest())

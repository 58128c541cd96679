"""Compiling variants with TileLang, each once."""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from mhctune.configs.errors import unknown
from mhctune.kernels.seam import Variant

# TileLang gives gcc no -O flag (263 ms instead of 4.9 ms at 64 tokens), and gcc's own contraction would
# make candidates differ in the last bit of the stored streams.
C_FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=off")

# Every C kernel includes TileLang's type `half`, 50,000 of the 70,000 lines that gcc then reads: 1.3 s a
# kernel instead of 0.4 s, for the same machine code. Its include guard leaves it out; what is used of its two
# names becomes a type that cannot calculate: a kernel with a half would not compile.
C_WITHOUT_HALF = ("-DHALF_HALF_HPP", "-Dhalf_float=std", "-Dhalf=nullptr_t")


# Safe-memory legalization guards every load with bounds checks and integer divisions: 31.1 us instead of
# 3.1 us for one kernel on an H200. The kernels guard themselves. TMA and warp specialisation are for tiles.
PASS_CONFIG = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
}
C_PASS_CONFIG = {"tl.disable_safe_memory_legalize": True}
"""The same guards would stand around every load of a tensor whose extent is known only at run time."""


Passes = Mapping[str, bool]
"""Pass options that are set otherwise than `PASS_CONFIG` and `C_PASS_CONFIG` say."""


def pass_config(target: str, passes: Passes | None = None) -> dict[str, bool]:
    """Return the pass configuration of a target, with other values for some of its options.

    Raises:
        ConfigError: an option that the target's configuration does not have.
    """
    config = dict(C_PASS_CONFIG if target == "c" else PASS_CONFIG)
    for name in passes or {}:
        if name not in config:
            raise unknown(f"pass option of target {target}", name, sorted(config))
    return config | dict(passes or {})


@dataclass(frozen=True, slots=True)
class Compiled:
    """A callable kernel and the hash of its generated source, kept as evidence."""

    run: Callable[..., None]
    code_hash: str


def quiet() -> None:
    """Silence TileLang's own reports; the sweep shows its progress and keeps failures as rows."""
    import tilelang

    tilelang.set_log_level("ERROR")


class CompileError(RuntimeError):
    """A variant that does not compile: which one, and what the compiler said."""


# TileLang parses a kernel's source. CPython 3.11 counts the depth of its syntax trees in one place for all
# threads, so that two at once end in "AST constructor recursion depth mismatch"; the interpreter's lock
# lets only one work at a time anyway.
_tracing = threading.Lock()

KERNELS = {
    "c": (
        "post", "projection", "post_pre", "epilogue", "head", "collapse", "post_norm", "coefficients",
        "topk_pack", "topk_convert", "topk_bitonic", "topk_radix",
    ),
    "cuda": (
        "post", "post_norm", "projection", "projection_mma", "post_pre", "post_pre_mma", "post_pre_ws",
        "epilogue", "epilogue_many", "coefficients", "head", "collapse",
        "topk_pack", "topk_convert", "topk_radix", "topk_bitonic",
    ),
}  # fmt: skip
"""By target the kernels there are: each is a function of its own name in a module of its own name."""


def _factory(variant: Variant) -> Callable[..., Any]:
    """Return the function that builds a variant's program."""
    if variant.kernel not in KERNELS.get(variant.target, ()):
        raise CompileError(f"target {variant.target!r} has no kernel {variant.kernel!r}")
    module = importlib.import_module(f"mhctune.kernels.{variant.target}.{variant.kernel}")
    factory: Callable[..., Any] = getattr(module, variant.kernel)
    return factory


def _options(target: str, passes: Passes | None) -> dict[str, Any]:
    configured = pass_config(target, passes)
    if target == "c":
        return {
            "target": "c",
            "execution_backend": "cython",
            "compile_flags": [*C_FLAGS, *C_WITHOUT_HALF],
            "pass_configs": configured,
        }
    return {"target": {"kind": "cuda", "arch": cuda_arch()}, "pass_configs": configured}


def cuda_arch() -> str:
    """Return the architecture of the first GPU, such as `sm_90a`; without a GPU, Hopper's."""
    import torch

    major, minor = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else (9, 0)
    # The `a` admits instructions of this generation alone (WGMMA), which exist from sm_90 on.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def compile_variant(variant: Variant, passes: Passes | None = None) -> Compiled:
    """Compile one variant, with other `passes` if some are given; TileLang's own cache on disk is used.

    Raises:
        CompileError: TileLang or the C compiler refused it.
    """

    def build() -> Any:
        return _factory(variant)(**dict(variant.params))

    return compile_program(str(variant), build, _options(variant.target, passes))


def compile_program(name: str, build: Callable[[], Any], options: Mapping[str, Any]) -> Compiled:
    """Compile what `build` returns, a TileLang program, with these options of `tilelang.compile`.

    Raises:
        CompileError: TileLang or the compiler behind it refused the program, which the message names.
    """
    import tilelang

    try:
        with _tracing:
            program = build()
        kernel = tilelang.compile(program, **options)
        if options["target"] != "c":
            _finish(kernel)
    except Exception as error:  # a compiler may raise anything; the trial records it
        raise CompileError(f"{name}: {type(error).__name__}: {error}") from error
    return Compiled(kernel, hashlib.sha256(kernel.get_kernel_source().encode()).hexdigest())


def _finish(kernel: Any) -> None:
    """Compile a CUDA kernel's host code now.

    TileLang leaves it to the first launch: 0.35 s each, one after another, where these threads work side by
    side. What comes from TileLang's cache on disk has it already.
    """
    from tilelang import tvm

    executable = kernel.adapter.get_exportable_executable()
    if isinstance(executable, tvm.runtime.Executable):
        executable.jit()


class Compiler:
    """Compiles variants in the background and hands each out once it is ready."""

    def __init__(
        self,
        workers: int | None = None,
        compile_one: Callable[[Variant], Compiled] = compile_variant,
    ) -> None:
        """Use `workers` threads (default: one a core); gcc runs outside the interpreter's lock."""
        self.workers = workers or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="compile")
        self._compile = compile_one
        self._futures: dict[Variant, Future[Compiled]] = {}

    def request(self, variants: Iterable[Variant]) -> None:
        """Start compiling what was not asked for before."""
        for variant in variants:
            if variant not in self._futures:
                self._futures[variant] = self._pool.submit(self._compile, variant)

    def get(self, variant: Variant) -> Compiled:
        """Return a compiled variant, waiting for it.

        Raises:
            CompileError: it does not compile.
        """
        self.request([variant])
        return self._futures[variant].result()

    def compile_all(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Compile all variants and return once each is compiled or has failed; failures stay for `get`."""
        self.request(variants)
        wanted = [self._futures[variant] for variant in dict.fromkeys(variants)]
        tell(0, len(wanted))
        for done, _ in enumerate(as_completed(wanted), start=1):
            tell(done, len(wanted))

    def wait(self, variants: Sequence[Variant], tell: Callable[[int, int], None]) -> None:
        """Return once these are compiled or have failed; `tell` hears of all that was ever asked for."""
        self.request(variants)
        wanted = {self._futures[variant] for variant in variants}
        while True:
            asked = set(self._futures.values())
            done = {future for future in asked if future.done()}
            tell(len(done), len(asked))
            if wanted <= done:
                return
            wait_for(asked - done, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Cancel what has not begun and wait for the rest."""
        self._pool.shutdown(cancel_futures=True)

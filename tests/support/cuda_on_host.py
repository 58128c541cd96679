"""The generated CUDA source of a kernel, run on a processor: what it computes can be seen without a GPU.

Only for kernels that `cuda_on_host.h` knows enough of CUDA for. Threads take turns in order or backwards, so
that a missing barrier, or a result that depends on the order of threads, shows.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mhctune.kernels.compiler import PASS_CONFIG, _factory
from mhctune.kernels.seam import Variant

HEADER = Path(__file__).with_suffix(".h")


def _compile(*arguments: str) -> None:
    subprocess.run(
        ["g++", "-std=c++17", "-O0", "-w", "-fPIC", *arguments], check=True, capture_output=True, text=True
    )


def _header(folder: Path) -> None:
    """Compile the header once into a folder: half of what a kernel takes without."""
    compiled = folder / f"{HEADER.name}.gch"
    if not compiled.exists():
        shutil.copy(HEADER, folder)
        _compile("-x", "c++-header", str(folder / HEADER.name), "-o", str(compiled))


class OnHost:
    """Stands in for a compiled CUDA kernel: takes the same arguments, on the CPU."""

    def __init__(
        self,
        variant: Variant,
        folder: Path,
        change: Callable[[str], str] = lambda source: source,
        factory: Callable[[Variant], Callable[..., Any]] = _factory,
    ) -> None:
        """Generate the source and compile it with g++ into a folder; nvcc is not needed.

        `change` plants a fault; `factory` returns what builds a variant's program.
        """
        import tilelang
        from tilelang import tvm

        self._program = factory(variant)(**dict(variant.params))
        target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
        with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIG), target:
            lowered = tilelang.lower(self._program, target=target)
        self.source = change(str(lowered.kernel_source))
        ((threads, name, parameters),) = re.findall(
            r"void __launch_bounds__\((\d+), \d+\) (\w+)\((.*?)\) \{", self.source
        )
        self._threads = int(threads)
        declared = [parameter.replace("__restrict__", "").split() for parameter in parameters.split(",")]
        self._order = [words[-1] for words in declared]
        types = [" ".join(words[:-1]) for words in declared]
        given = ", ".join(
            f"*(const float*)&arguments[{i}]" if t == "float" else f"({t})arguments[{i}]"
            for i, t in enumerate(types)
        )
        text = re.sub(r"^#(?!pragma).*$", "", self.source, flags=re.MULTILINE)
        text = re.sub(
            r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"\1* \2 = (\1*)host::memory;", text
        )
        program = folder / f"{abs(hash((variant, self.source)))}.cpp"
        program.write_text(
            f'#include "{HEADER.name}"\n{text}\nstatic const int64_t *arguments;\n'
            f"static void call() {{ {name}({given}); }}\n"
            'extern "C" unsigned launch(const int64_t *given, unsigned x, unsigned y, unsigned z, int b) {\n'
            f"  arguments = given; return host::run(call, x, y, z, {threads}, b);\n}}\n"
        )
        library = program.with_suffix(".so")
        _header(folder)
        _compile("-shared", "-o", str(library), str(program))
        self._launch = ctypes.CDLL(str(library)).launch

    def __call__(self, *arguments: Any, backwards: bool = False) -> None:
        """Launch; threads and blocks run in order, or backwards."""
        named: dict[str, int] = {}
        for parameter, argument in zip(self._program.params, arguments, strict=True):
            if parameter not in self._program.buffer_map:
                bits = struct.unpack("q", struct.pack("fxxxx", argument))[0]
                named[str(parameter)] = bits if isinstance(argument, float) else argument
                continue
            buffer = self._program.buffer_map[parameter]
            assert isinstance(argument, torch.Tensor)
            assert argument.is_contiguous()
            named[buffer.name] = argument.data_ptr()
            for extent, size in zip(buffer.shape, argument.shape, strict=True):
                named.setdefault(str(extent), size)
        grid = self._grid(named)
        values = (ctypes.c_int64 * len(self._order))(*(named[name] for name in self._order))
        if stuck := self._launch(values, *grid, int(backwards)):
            raise RuntimeError(f"{stuck} threads wait for ever: others came to different barriers, or ended")

    def _grid(self, named: dict[str, int]) -> tuple[int, int, int]:
        from tilelang import tvm

        extents = {"blockIdx.x": 1, "blockIdx.y": 1, "blockIdx.z": 1}

        def visit(node: Any) -> None:
            if isinstance(node, tvm.tirx.For) and node.thread_binding is not None:
                # Sums and quotients of the arguments' extents, as Python writes them too.
                extents[node.thread_binding.thread_tag] = int(eval(str(node.extent), {}, named))

        tvm.tirx.stmt_functor.post_order_visit(self._program.body, visit)
        return extents["blockIdx.x"], extents["blockIdx.y"], extents["blockIdx.z"]


def once(folder: Path) -> Callable[[Variant], OnHost]:
    """Return what makes kernels in a folder, each once."""

    @functools.cache
    def make(variant: Variant) -> OnHost:
        return OnHost(variant, folder)

    return make

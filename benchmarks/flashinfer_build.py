"""Compiles FlashInfer's kernels ahead, all at once, and keeps the libraries where they can be carried to a later run.

    PYTHONPATH=src python3 benchmarks/flashinfer_build.py --kernels bench --save folder

FlashInfer compiles a kernel on first use, each for minutes, and loads one that lies in the `data/aot` folder of its
package as it is. Libraries are put there, and copies of those below 16 MiB into the folder given.

It also compiles where there is no GPU, with nvcc, ninja and FlashInfer for the Python at hand. Then it has to be told
what for (FLASHINFER_CUDA_ARCH_LIST=9.0a), where CUDA is (CUDA_HOME) and the headers of cuRAND (CPATH; the wheel
nvidia-curand has them), and where a libcuda.so to link with (LIBRARY_PATH; an empty one of the soname libcuda.so.1).
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_cases import DTYPE, LAYER, of_size, with_sinks
from flashinfer.jit import build_jit_specs, gen_batch_prefill_module, gen_customize_batch_prefill_module

from breakgraph.attention import LayerAttention
from breakgraph.attention.flashinfer_kernels import sink_module
from breakgraph.attention.flashinfer_plan import Family, PlanConstants, constants_of

CARRIED_BYTES = 16 << 20
SINKS = with_sinks(of_size(LAYER, 64, 8, 64), torch.device("cpu"))
KERNELS = {
    "bench": (LAYER,),
    "check": (LAYER, replace(LAYER, window=128), replace(SINKS, window=128)),
    "gpt-oss": (SINKS, replace(SINKS, window=128)),
}


def spec_of(constants: PlanConstants, family: Family, dtype: torch.dtype) -> Any:
    """FlashInfer's build recipe of the module that `PlannedKernel` asks for."""
    if constants.has_sinks:
        variant: Any = sink_module(constants, family, dtype)
        return gen_customize_batch_prefill_module(family, *variant["jit_args"], **variant["jit_kwargs"])
    size, windowed, capped = constants.head_dim, constants.window is not None, constants.softcap is not None
    return gen_batch_prefill_module(family, dtype, dtype, dtype, torch.int32, size, size, 0, windowed, capped, False)


def specs_of(layers: Iterable[LayerAttention], dtype: torch.dtype) -> dict[str, Any]:
    """By name: for prompts on fa3 and for decode on fa2."""
    families: tuple[Family, ...] = ("fa3", "fa2")
    specs = (spec_of(constants_of(layer), family, dtype) for layer in layers for family in families)
    return {spec.name: spec for spec in specs}


def missing_kernels(layer: LayerAttention, dtype: torch.dtype) -> list[str]:
    """Names of the modules that would have to be compiled for this layer."""
    return [name for name, spec in specs_of([layer], dtype).items() if not spec.is_compiled]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS], default=["bench"])
    parser.add_argument("--save", type=Path, help="folder for copies of the libraries")
    args = parser.parse_args()
    specs = specs_of([layer for name in args.kernels for layer in KERNELS[name]], DTYPE)
    fresh = [spec for spec in specs.values() if not spec.is_aot]
    started = time.perf_counter()
    build_jit_specs(fresh)
    print(f"{len(fresh)} of {len(specs)} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for spec in fresh:
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, spec.aot_path)
    for name, spec in specs.items():
        size = spec.aot_path.stat().st_size
        if args.save is not None and size < CARRIED_BYTES:
            args.save.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.aot_path, args.save / f"{name}.so")
        print(f"{size / 2**20:6.1f} MiB {'' if size < CARRIED_BYTES else 'too large to carry '}{name}", flush=True)


if __name__ == "__main__":
    main()

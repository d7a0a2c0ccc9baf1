"""Launches of a Triton kernel that are repeated on every step, without Triton's look at each argument.

`kernel[grid](...)` examines what it is given for longer than the launch takes, to find the variant that was compiled
for such arguments. What can differ between two steps of a model is little, and looked at here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from triton.compiler import CompiledKernel

_ALIGNMENT = 16
"""Bytes, and elements of strides: what Triton compiles variants for."""


class RepeatedLaunch:
    """A kernel whose parameters are tensors, then numbers, then constants.

    Launches on the current device and stream, as Triton does. Under Triton's interpreter nothing is kept.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[Hashable, tuple[CompiledKernel, tuple[object, ...]]] = {}

    def __call__(
        self,
        like: Hashable,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        strides: Sequence[int],
        numbers: Sequence[float],
        options: Mapping[str, object],
    ) -> None:
        """Launch it on the tensors, then the numbers, then the strides.

        Args:
            like: What else Triton compiles variants for: the device, and what `options` are made of.
            strides: Numbers that Triton compiles variants for.
            numbers: Those that it does not: `do_not_specialize`, and fractions.
            options: Constants of the kernel by name, and compiler options.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        dtypes = [tensor.dtype for tensor in tensors]
        key = (like, *dtypes, *[2 if n == 1 else n % _ALIGNMENT == 0 for n in strides])
        is_aligned = together % _ALIGNMENT == 0
        variant = self._variants.get(key) if is_aligned else None
        if variant is not None:
            compiled, constants = variant
            compiled[grid](*addresses, *numbers, *strides, *constants)
            return
        made = self._kernel[grid](*tensors, *numbers, *strides, **options)
        if isinstance(made, CompiledKernel) and is_aligned and torch.version.hip is None:  # ROCm looks at sizes too
            names = self._kernel.arg_names[len(tensors) + len(numbers) + len(strides) :]
            self._variants[key] = made, tuple(options[name] for name in names)

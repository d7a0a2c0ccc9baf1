"""Launches of a Triton kernel that are repeated on every step, without Triton's look at each argument.

`kernel[grid](...)` examines what it is given for longer than the launch takes, to find the variant that was compiled
for such arguments. What can differ between two steps of a model is little, and looked at here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from triton.compiler import CompiledKernel

_ALIGNMENT = 16
"""Bytes, and elements of strides: what Triton compiles variants for."""


_Variants: TypeAlias = dict[Hashable, tuple[CompiledKernel, tuple[object, ...]]]
"""By what they were compiled for: a variant, and its constants in order."""


class RepeatedLaunch:
    """A kernel whose parameters are tensors, then numbers, then strides, then constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: _Variants = {}

    def on(
        self,
        like: Hashable,
        tensors: Sequence[torch.Tensor | None],
        strides: Sequence[int],
        options: Mapping[str, object],
    ) -> BoundLaunch:
        """A launch that lacks only what differs from one to the next.

        Args:
            like: What else Triton compiles variants for: the device, and what `options` are made of.
            tensors: In the order of the parameters. Each launch is given one for every None here, always of one dtype.
            strides: Numbers that Triton compiles variants for.
            options: Constants of the kernel by name, and compiler options.
        """
        return BoundLaunch(self._kernel, self._variants, like, tensors, strides, options)


class BoundLaunch:
    """See :meth:`RepeatedLaunch.on`.

    Launches on the current device and stream, as Triton does. Under Triton's interpreter no variant is kept.
    """

    def __init__(
        self,
        kernel: Any,
        variants: _Variants,
        like: Hashable,
        tensors: Sequence[torch.Tensor | None],
        strides: Sequence[int],
        options: Mapping[str, object],
    ) -> None:
        self._kernel = kernel
        self._variants = variants
        self._tensors = list(tensors)
        self._strides = strides
        self._options = options
        self._addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._open = [index for index, tensor in enumerate(tensors) if tensor is None]
        dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
        self._key = (like, *dtypes, *[2 if n == 1 else n % _ALIGNMENT == 0 for n in strides])
        self._variant = variants.get(self._key)

    def __call__(self, grid: tuple[int, int, int], given: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
        """Launch it.

        Args:
            given: The tensors that were left out.
            numbers: Those that Triton compiles no variants for: `do_not_specialize`, and fractions.
        """
        addresses = self._addresses.copy()
        for index, tensor in zip(self._open, given, strict=True):
            addresses[index] = tensor.data_ptr()
        together = 0
        for address in addresses:
            together |= address
        is_aligned = together % _ALIGNMENT == 0
        if self._variant is not None and is_aligned:
            compiled, constants = self._variant
            compiled[grid](*addresses, *numbers, *self._strides, *constants)
            return
        tensors = self._tensors.copy()
        for index, tensor in zip(self._open, given, strict=True):
            tensors[index] = tensor
        made = self._kernel[grid](*tensors, *numbers, *self._strides, **self._options)
        if isinstance(made, CompiledKernel) and is_aligned and torch.version.hip is None:  # ROCm looks at sizes too
            names = self._kernel.arg_names[len(tensors) + len(numbers) + len(self._strides) :]
            self._variant = self._variants[self._key] = made, tuple(self._options[name] for name in names)

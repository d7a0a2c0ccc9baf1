"""Static input buffers: the fixed addresses that graphs read, and how a step's values get there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from breakgraph.errors import ConfigError
from breakgraph.runners.batch import Ints, StepBatch
from breakgraph.runners.spec import FieldSpec, Pad, PhaseSpec


def stage_rows(field: FieldSpec, values: Ints | Sequence[Ints], rows: int, device: torch.device) -> Tensor:
    """A fresh host tensor [rows, *tail] of ``values`` and padding, pinned where ``device`` copies asynchronously.

    Never reused: torch's host allocator holds the memory until the copy that reads it has run.

    Raises:
        ConfigError: a value is out of the field's limit.
    """
    host = torch.empty((rows, *field.tail), dtype=field.dtype, pin_memory=device.type == "cuda")
    array = host.numpy()
    num_live = len(values)
    pad = 0 if isinstance(field.pad, Pad) else field.pad
    if field.tail:
        array[...] = pad
        for row, row_values in enumerate(values):
            array[row, : len(row_values)] = row_values
    else:
        array[:num_live] = values
        array[num_live:] = values[-1] if field.pad is Pad.REPEAT_LAST else pad
    if field.limit is not None and array.size and not 0 <= array.min() <= array.max() < field.limit:
        row = int(np.argwhere((array < 0) | (array >= field.limit))[0][0])
        raise ConfigError(f"{field.name}[{row}]: expected 0 <= value < {field.limit}, got {values[row]}")
    return host


def stage_ints(values: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fresh tensor [len(values)] on ``device``."""
    field = FieldSpec(name="values", dtype=dtype, axis="requests", pad=0)
    return stage_rows(field, values, len(values), device).to(device, non_blocking=True)


def live_fields(spec: PhaseSpec, batch: StepBatch, device: torch.device) -> Mapping[str, Tensor]:
    """Fresh, unpadded device tensors, for a step that runs eagerly."""
    hosts = {field.name: _stage(field, batch, None, device) for field in spec.fields}
    return {name: host.to(device, non_blocking=True) for name, host in hosts.items()}


def _stage(field: FieldSpec, batch: StepBatch, rows: int | None, device: torch.device) -> Tensor:
    values = getattr(batch, field.name)
    return stage_rows(field, values, len(values) if rows is None else rows, device)


class StaticBuffers:
    """One buffer a field, as long as the largest bucket; every bucket uses a prefix of it.

    Owned by a runner. Graphs read these addresses, so they live as long as the plans do.
    """

    def __init__(self, spec: PhaseSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        bufs: dict[str, Tensor] = {}
        # Tables stay on the reserved block, row numbers in the smallest bucket.
        self._poison = {f.name: 0 if f.limit is not None or isinstance(f.pad, Pad) else 1 for f in spec.fields}
        # Ordinary tensors whatever the caller's mode: inference tensors could not be rewritten outside inference mode.
        with torch.inference_mode(False):
            for field in spec.fields:
                rows = spec.num_rows(field.axis, spec.ladder[-1])
                bufs[field.name] = torch.zeros(rows, *field.tail, dtype=field.dtype, device=device)
            self._views = {
                size: {field.name: bufs[field.name][: spec.num_rows(field.axis, size)] for field in spec.fields}
                for size in spec.ladder
            }

    @property
    def num_bytes(self) -> int:
        """Of all fields."""
        return sum(view.nbytes for view in self._views[self._spec.ladder[-1]].values())

    def views(self, size: int) -> Mapping[str, Tensor]:
        """What a bucket's graph reads, by field name."""
        return self._views[size]

    def poison(self) -> None:
        """Overwrite everything: valid indices, but not a step's values. What a load forgets shows."""
        for name, view in self._views[self._spec.ladder[-1]].items():
            view.fill_(self._poison[name])

    def load(self, batch: StepBatch, size: int) -> Mapping[str, Tensor]:
        """Write a whole bucket: live rows, then padding to its last row. All values are checked before the first write.

        Invalidated by: the next load of any bucket.
        """
        views = self._views[size]
        hosts = [
            (views[field.name], _stage(field, batch, self._spec.num_rows(field.axis, size), self._device))
            for field in self._spec.fields
        ]
        for view, host in hosts:
            view.copy_(host, non_blocking=True)
        return views

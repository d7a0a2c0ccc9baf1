"""Static input buffers: the fixed addresses that graphs read, and how a step's values get there.

The fields of a bucket lie one behind the other, so that a step is one copy from pinned host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor

from breakgraph.runners.batch import Ints, StepBatch
from breakgraph.runners.spec import FieldSpec, Pad, PhaseSpec

_ALIGNMENT = 256
"""Bytes; what an allocation of its own would have, and kernels are compiled for."""
_WIDEST = 8
"""Bytes of the widest element: a buffer is so many of each."""
_MAX_TARGETS = 512
"""Layouts that are remembered, of buckets with numbers of requests and widths of their tables."""
Values = Ints | Tensor | Sequence[Ints]
"""Those of a tensor are on the device: `_put_tokens` copies them there."""


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    return torch.empty(0, dtype=dtype).numpy().dtype


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a field lies in its buffer."""

    field: FieldSpec
    shape: tuple[int, ...]
    start: int
    end: int
    dtype: np.dtype[np.generic]

    def view(self, typed: Tensor) -> Tensor:
        """Of the whole buffer in the field's dtype."""
        size = self.field.dtype.itemsize
        return typed[self.start // size : self.end // size].view(self.shape)


class _Layout:
    """Fields of so many rows each, one behind the other."""

    def __init__(self, fields: Sequence[tuple[FieldSpec, int]]) -> None:
        self.places: list[_Place] = []
        end = 0
        for field, rows in fields:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            dtype = _numpy_dtype(field.dtype)
            end = start + rows * prod(field.tail) * dtype.itemsize
            self.places.append(_Place(field, (rows, *field.tail), start, end, dtype))
        self.num_bytes = -(-end // _WIDEST) * _WIDEST
        # What `stage` needs of each, as it runs while the device waits: dtype, first and last element, elements of a
        # row (0: the field has no tail), padding (None: the last value).
        self._dtypes = list({place.dtype for place in self.places})
        self._fills = [
            (
                self._dtypes.index(p.dtype), p.start // p.dtype.itemsize, p.end // p.dtype.itemsize,
                prod(p.field.tail) if p.field.tail else 0, None if isinstance(p.field.pad, Pad) else p.field.pad,
            )
            for p in self.places
        ]  # fmt: skip

    def stage(self, values: Sequence[Values], device: torch.device) -> Tensor:
        """A fresh host tensor [num_bytes] uint8 of the fields' values, pinned where ``device`` copies asynchronously.

        Never reused: torch's host allocator holds the memory until the copy that reads it has run.
        """
        host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        raw = host.numpy()
        arrays = [raw.view(dtype) for dtype in self._dtypes]
        for (which, start, end, row, pad), rows in zip(self._fills, values, strict=True):
            array = arrays[which]
            if row:
                array[start:end] = pad
                assert start + len(rows) * row <= end, f"{len(rows)} rows of {row} in the place of {end - start}"
                for live in cast("Sequence[Ints]", rows):
                    assert len(live) <= row, f"{len(live)} elements in rows of {row}"
                    array[start : start + len(live)] = live
                    start += row
                continue
            padded = start + len(rows)
            assert padded <= end, f"{len(rows)} rows in the place of {end - start}"
            array[start:padded] = 0 if isinstance(rows, Tensor) else rows
            if padded < end:
                array[padded:end] = array[padded - 1] if pad is None else pad
        return host

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The fields in ``buffer`` [num_bytes or more] uint8, by name."""
        typed = {place.field.dtype: buffer.view(place.field.dtype) for place in self.places}
        return {place.field.name: place.view(typed[place.field.dtype]) for place in self.places}


@lru_cache(maxsize=1024)
def _layout_of(fields: tuple[tuple[FieldSpec, int], ...]) -> _Layout:
    return _Layout(fields)


def stage_fields(parts: Sequence[tuple[FieldSpec, Values]], device: torch.device) -> Mapping[str, Tensor]:
    """Fresh, unpadded tensors on ``device``, by field name: one copy goes there, nothing waits."""
    layout = _layout_of(tuple((field, len(values)) for field, values in parts))
    return layout.views(layout.stage([values for _, values in parts], device).to(device, non_blocking=True))


def live_fields(spec: PhaseSpec, batch: StepBatch, device: torch.device) -> Mapping[str, Tensor]:
    """Fresh, unpadded device tensors, for a step that runs eagerly."""
    fields = stage_fields([(field, getattr(batch, field.name)) for field in spec.fields], device)
    _put_tokens(batch, fields)
    return fields


def _put_tokens(batch: StepBatch, fields: Mapping[str, Tensor]) -> None:
    """Tokens that are on the device go into their field there, behind the copy of what was staged."""
    if isinstance(batch.input_ids, Tensor):
        fields["input_ids"][: batch.num_tokens].copy_(batch.input_ids)


class StaticBuffers:
    """One buffer, in which every bucket lays out its fields anew; a graph reads those of its bucket.

    Owned by a runner. Graphs read these addresses, so they live as long as the plans do.
    """

    def __init__(self, spec: PhaseSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self.break_views: Mapping[str, Tensor] = {}
        """The spec's break fields, by name, as the last load for breaks left them: in the step's live rows only."""
        # Tables stay on the reserved block, row numbers in the smallest bucket.
        self._poison = {f.name: 0 if f.tail or isinstance(f.pad, Pad) else 1 for f in spec.fields}
        self._layouts = {
            size: _Layout([(field, spec.num_rows(field.axis, size)) for field in spec.fields]) for size in spec.ladder
        }
        self._targets: dict[tuple[int, int, int], tuple[_Layout, Tensor, Mapping[str, Tensor]]] = {}
        most = max(spec.max_num_seqs, spec.request_slots or 0), spec.max_blocks_per_seq
        layouts = [*self._layouts.values(), *(self._with_live_rows(size, *most) for size in spec.ladder)]
        self.num_bytes = max(layout.num_bytes for layout in layouts)
        # Ordinary tensors whatever the caller's mode: inference tensors could not be rewritten outside inference mode.
        with torch.inference_mode(False):
            self._buffer = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
            self._views = {size: layout.views(self._buffer) for size, layout in self._layouts.items()}

    def views(self, size: int) -> Mapping[str, Tensor]:
        """What a bucket's graph reads, by field name."""
        return self._views[size]

    def poison(self, size: int) -> None:
        """Overwrite a bucket: valid indices, but not a step's values. What a load forgets shows."""
        for name, view in self._views[size].items():
            view.fill_(self._poison[name])

    def load(self, batch: StepBatch, size: int, for_breaks: bool = False) -> Mapping[str, Tensor]:
        """Write a whole bucket: live rows, then padding to its last row. The values are those of a checked step.

        Invalidated by: the next load of any bucket.

        Args:
            for_breaks: Whether attention is in breaks: what those read is written, in the place of fields of the same
                names.
        """
        is_for_breaks = for_breaks and bool(self._spec.break_fields)
        key = (size, batch.num_reqs, max(map(len, batch.block_tables))) if is_for_breaks else (size, 0, 0)
        found = self._targets.get(key)
        layout, target, views = found or self._target(*key)
        host = layout.stage([getattr(batch, place.field.name) for place in layout.places], self._device)
        target.copy_(host, non_blocking=True)
        _put_tokens(batch, self._views[size])
        self.break_views = views
        return self._views[size]

    def _target(self, size: int, num_reqs: int, width: int) -> tuple[_Layout, Tensor, Mapping[str, Tensor]]:
        """The layout of a load, the memory that it writes, and views for breaks; `num_reqs` 0: without those."""
        layout, views = self._layouts[size], dict[str, Tensor]()
        with torch.inference_mode(False):
            if num_reqs:
                layout = self._with_live_rows(size, num_reqs, width)
                all_views = layout.views(self._buffer)
                views = {field.name: all_views[field.name] for field in self._spec.break_fields}
            target = layout, self._buffer[: layout.num_bytes], views
        if len(self._targets) >= _MAX_TARGETS:
            self._targets.clear()
        self._targets[size, num_reqs, width] = target
        return target

    def _with_live_rows(self, size: int, num_reqs: int, width: int) -> _Layout:
        """A bucket's fields where they always are, then those of breaks."""
        names = {field.name for field in self._spec.break_fields}
        kept = [place for place in self._layouts[size].places if place.field.name not in names]
        live = [
            (replace(field, tail=(width,)) if field.tail else field, num_reqs + (field.axis == "request_bounds"))
            for field in self._spec.break_fields
        ]
        layout = _Layout([*((place.field, place.shape[0]) for place in kept), *live])
        assert layout.places[: len(kept)] == kept, f"{sorted(names)} are not the last fields"
        return layout

"""Where Triton's kernels run: compiled on a GPU, interpreted without one. Beside a GPU none runs on the CPU."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

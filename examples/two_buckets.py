"""Two sizes of one model in one memory pool, and the two ways of getting outputs: borrowed and copied."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from breakgraph import PlanFamily
from breakgraph.errors import StaleOutputError

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 4)).to(device).requires_grad_(False)
BUCKETS = (2, 8)
input_buf = torch.zeros(max(BUCKETS), 16, device=device)
batches = [torch.randn(5, 16, device=device), torch.randn(1, 16, device=device)]


def forward(size: int) -> Tensor:
    return model(input_buf[:size])


def show(policy: Literal["borrow", "copy"]) -> None:
    with PlanFamily(device) as family:
        plans = {  # the largest first: the others fit into the memory that it leaves in the pool
            size: family.capture(partial(forward, size), label=f"{size} rows", outputs=policy)
            for size in reversed(BUCKETS)
        }

        def run(batch: Tensor) -> Tensor:
            size = min(bucket for bucket in BUCKETS if bucket >= len(batch))
            input_buf[: len(batch)].copy_(batch)
            input_buf[len(batch) : size].zero_()  # padding
            return plans[size].replay()[: len(batch)]

        first = run(batches[0])
        kept = first.clone()
        second = run(batches[1])
        torch.testing.assert_close(kept, model(batches[0]))
        torch.testing.assert_close(second, model(batches[1]))
        survives = torch.equal(first, kept)
        assert survives == (policy == "copy")
        print(f"{policy}: 5 rows ran in bucket 8, 1 row in bucket 2; first answer after the second: ", end="")
        print("still there" if survives else "overwritten")
        try:
            assert torch.equal(plans[8].outputs[:5], kept)
        except StaleOutputError as error:
            print(f"borrow: plan.outputs says so: {error}")


show("borrow")
show("copy")

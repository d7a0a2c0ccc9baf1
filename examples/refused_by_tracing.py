"""Python that looks at data kept on the host, in the block: no tracer can follow it, and a capture need not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import UntraceableError


@breakgraph.eager_on_graph
def rescaled(h: Tensor) -> Tensor:
    return h / h.abs().max().item()  # read on the host, at every replay


class PrunedExperts(nn.Module):
    """Sums up the experts that a calibration found worth keeping, the busiest first."""

    def __init__(self, usage: np.ndarray) -> None:
        super().__init__()
        self.usage = usage
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in usage)

    def forward(self, x: Tensor) -> Tensor:
        h = rescaled(x)
        for index in np.argsort(-self.usage):
            if self.usage[index] < 0.1:
                break
            h = h + self.usage[index].item() * self.experts[index](h).tanh()
        return h


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
block = PrunedExperts(np.array([0.05, 0.4, 0.02, 0.35, 0.18])).to(device)
x = torch.randn(3, 16, device=device)

try:
    breakgraph.capture(block, x, backend="tc_piecewise")
except UntraceableError as error:
    print(f"tc_piecewise: {error}\n")

# The loop runs once, while the block is captured, and the experts that it chose are in the graph.
with breakgraph.capture(block, x) as graph, torch.no_grad():
    for _ in range(3):
        x.copy_(torch.randn(3, 16))
        torch.testing.assert_close(graph.replay(), block(x))
    report = graph.explain()
    print(f"breakable: {report.num_segments} segments, {report.num_breaks} break, as eager: yes")

"""Routing to experts: Python that looks at the data, in the middle of a model, runs afresh at every replay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import UncapturableOpError


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, h: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for expert in choice.unique().tolist():  # no graph can hold this: its shape and the loop depend on the data
            rows = (choice == expert).nonzero()[:, 0]
            out[rows] = self.linears[expert](h[rows])
        return out


class MarkedExperts(Experts):
    @breakgraph.eager_on_graph
    def forward(self, h: Tensor, choice: Tensor) -> Tensor:
        return super().forward(h, choice)


class Layer(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(16), nn.Linear(16, 4), experts

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.experts(h, self.router(h).argmax(-1))


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(3, 16, device=device)
by_decorator, by_name = Layer(MarkedExperts()).to(device), Layer(Experts()).to(device)

try:
    breakgraph.capture(by_name, x)
except UncapturableOpError as error:
    print(f"without a break: {error}\n")

breakgraph.mark_eager(by_name, "experts")  # for code that is not yours to edit
for name, layer in (("eager_on_graph", by_decorator), ("mark_eager", by_name)):
    with breakgraph.capture(layer, x) as graph, torch.no_grad():
        for _ in range(3):
            x.copy_(torch.randn(3, 16))
            torch.testing.assert_close(graph.replay(), layer(x))
            print(f"{name}: experts {layer.router(layer.norm(x)).argmax(-1).unique().tolist()} ran")
        print(f"{name}: {graph.explain().num_segments} segments, {graph.explain().num_breaks} break, as eager: yes\n")

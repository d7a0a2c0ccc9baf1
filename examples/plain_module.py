"""Capture a plain module, give it other inputs, replay it: three lines, no change to the module."""

from __future__ import annotations

import torch
from torch import nn

import breakgraph

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
x = torch.randn(4, 32, device=device)

graph = breakgraph.capture(model, x)  # 1. x is a static input now: the graph reads it where it lies
x.copy_(torch.randn(4, 32))  # 2. new values go into the same tensor
y = graph.replay()  # 3. the graph's own output, valid until the next replay

torch.testing.assert_close(y, model(x).detach())
print(graph.explain())
graph.close()
print("replay equals model(x): yes")

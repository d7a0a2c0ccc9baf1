"""The scan, the fingerprint and the audit on a GPU: transfers, generators, streams and graph nodes that only it has."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import HazardError, StalePlanError, UncapturableOpError
from breakgraph.graph import audit


def pageable(x: Tensor) -> Tensor:
    return x + torch.ones(4).to("cuda")


def to_the_host(x: Tensor) -> Tensor:
    return x + x.sum().cpu().item()


def cpu_random(x: Tensor) -> Tensor:
    return x * torch.rand(()).item()


def test_f25_what_torch_refuses_inside_of_an_operator_is_named_and_harms_nobody() -> None:
    """In float32 torch multiplies one group after the other, and reads on the host where each ends."""
    x, weight = torch.randn(4, 4, device="cuda"), torch.ones(1, 4, 4, device="cuda")
    ends = torch.full((1,), 4, dtype=torch.int32, device="cuda")
    with torch.no_grad():
        with pytest.raises(UncapturableOpError, match=r"grouped_mm.* no stream may .*test_hazards_cuda\.py"):
            breakgraph.capture(lambda x: nn.functional.grouped_mm(x * 2, weight, offs=ends), x)
        with breakgraph.capture(lambda x: x * 2 @ weight[0], x) as graph:
            x.normal_()
            assert torch.equal(graph.replay(), x * 2 @ weight[0])


@pytest.mark.parametrize(
    ("planted", "kind"),
    [(pageable, "pageable copy"), (to_the_host, "host sync"), (cpu_random, "unregistered generator")],
)
def test_f25_what_only_cuda_shows(planted: Callable[[Tensor], Tensor], kind: str) -> None:
    with torch.no_grad(), pytest.raises(HazardError) as caught:
        breakgraph.capture(lambda x: planted(x * 2), torch.randn(4, device="cuda"))
    assert kind in [hazard.kind for hazard in caught.value.report.blocking]


def test_f16_a_side_stream_is_a_note() -> None:
    side, x = torch.cuda.Stream(), torch.randn(4, device="cuda")

    def forks(x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + 1

    with torch.no_grad(), breakgraph.capture(forks, x) as graph:
        assert any("another stream" in note for note in graph.explain().notes)
        x.add_(1)
        assert torch.equal(graph.replay(), x * 2 + 1)


def test_f33_weights_that_moved() -> None:
    model, x = nn.Linear(4, 4).cuda(), torch.randn(3, 4, device="cuda")
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model.cpu()
        with pytest.raises(StalePlanError, match=r"Linear\.\w+ was .* on cuda:0 and is .* on cpu"):
            graph.replay()
        model.cuda()
        graph.recapture()
        assert torch.equal(graph.replay(), model(x))


def test_the_audit_reads_kernels() -> None:
    weight = torch.randn(8, 8, device="cuda")

    def make(variation: int) -> Callable[[], Tensor]:
        x = torch.randn(4, 8, device="cuda")
        return lambda: (x @ weight) * (3.0 + variation)

    def clean(variation: int) -> Callable[[], Tensor]:
        x = torch.randn(4, 8, device="cuda")
        return lambda: (x @ weight).relu() + x

    with torch.no_grad():
        torch.mm(weight, weight)
        report = audit(clean, "cuda")
        print(report)
        assert report.differences == ()
        assert report.coverage > 0.5
        assert audit(make, "cuda").differences != ()


def test_a_fingerprint_of_400_parameters() -> None:
    """Prints its cost; asserts nothing on the clock."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(200)]).cuda()
    x = torch.randn(2, 8, device="cuda")
    with torch.no_grad(), breakgraph.PlanFamily("cuda") as family:
        plan = family.capture(lambda: model(x))
        fingerprint = plan._fingerprint
        assert fingerprint is not None
        started = time.perf_counter()
        for _ in range(1000):
            fingerprint.check()
        print(f"fingerprint of 400 parameters: {(time.perf_counter() - started) * 1e3:.1f} us")

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from breakgraph import eager_on_graph
from breakgraph.bench.profiler import ANNOTATION, Event
from breakgraph.bench.trace import document, export
from breakgraph.errors import ConfigError
from breakgraph.graph import PlanFamily


@eager_on_graph
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def spans(path: Path) -> list[dict[str, object]]:
    entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [entry for entry in entries if entry["ph"] == "X" and entry["pid"] == 1]


def test_one_replay_with_its_steps_by_name(family: PlanFamily, device: torch.device, tmp_path: Path) -> None:
    x = torch.ones(4, device=device)
    plan = family.capture(lambda: halve(halve(x + 1) * 3) + 1)
    assert export(plan.replay, family, tmp_path / "trace.json") == 5
    found = spans(tmp_path / "trace.json")
    assert [entry["name"] for entry in found] == ["segment 0", "break halve", "segment 1", "break halve", "segment 2"]
    assert [entry["cat"] for entry in found] == ["segment", "break", "segment", "break", "segment"]
    assert found[0]["ts"] == 0
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in pairwise(found))  # type: ignore[operator]
    assert [child.name for child in tmp_path.iterdir()] == ["trace.json"]
    # The plan is as it was: replayable, and without the profiler in its host times.
    assert torch.equal(plan.replay(), torch.full((4,), 2.5, device=device))
    assert all(step.host_sec is not None for step in plan.explain().steps)
    assert plan.num_replays == 7


def test_names_are_right_where_a_segment_is_empty(family: PlanFamily, device: torch.device, tmp_path: Path) -> None:
    x = torch.ones(4, device=device)
    plan = family.capture(lambda: halve(halve(x)))
    names = [f"{step.kind} {step.name}" for step in plan.explain().steps if step.kind == "break" or step.num_nodes]
    export(plan.replay, family, tmp_path / "trace.json")
    assert [entry["name"] for entry in spans(tmp_path / "trace.json")] == names


def test_annotations_end_with_the_block(family: PlanFamily, device: torch.device) -> None:
    x, names = torch.ones(4, device=device), []
    plan = family.capture(lambda: halve(x + 1) + 1)

    def scope(name: str) -> torch.profiler.record_function:
        names.append(name)
        return torch.profiler.record_function(name)

    with family.annotating(scope):
        plan.replay()
    plan.replay()
    assert names == ["segment 0", "break halve", "segment 1"]


def test_a_call_without_a_replay_is_refused(family: PlanFamily, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none was replayed; pass plan.replay"):
        export(lambda: None, family, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(family: PlanFamily, device: torch.device, tmp_path: Path) -> None:
    x = torch.ones(4, device=device)
    plan = family.capture(lambda: halve(x + 1))
    with pytest.raises(ConfigError, match=r"cannot be written to .*gone.*No such file"):
        export(plan.replay, family, tmp_path / "gone" / "trace.json")


def test_kernels_have_a_track_a_stream() -> None:
    steps = [Event("segment 0", ANNOTATION, 100.0, 5.0, "1"), Event("break b", ANNOTATION, 106.0, 9.0, "1")]
    kernels = [Event("gemm", "kernel", 103.0, 4.0, "20"), Event("copy", "gpu_memcpy", 104.0, 1.0, "7")]
    entries = document(steps, kernels, emulated=False)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["ph"] == "M"}
    gpu = {(2, 0): "GPU", (2, 1): "stream 20", (2, 2): "stream 7"}
    assert names == {(1, 0): "host", (1, 1): "segments and breaks", **gpu}
    found = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X"]
    assert found == [
        ("segment 0", 1, 1, 0.0, 5.0),
        ("break b", 1, 1, 6.0, 9.0),
        ("gemm", 2, 1, 3.0, 4.0),
        ("copy", 2, 2, 4.0, 1.0),
    ]
    assert "emulated" in document(steps, [], emulated=True)["traceEvents"][0]["args"]["name"]

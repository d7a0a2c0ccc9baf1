"""Each backend against a plan family that only records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import breakgraph
from breakgraph.backends import BACKENDS, Backend, backend_class, make_backend
from breakgraph.errors import CaptureError, ConfigError, ReplayError, UnknownNameError
from breakgraph.graph import ShapeKey
from unit.backends.fakes import FakeFamily

CAPTURING = ("auto", "breakable", "debug_eager", "full", "tc_piecewise", "tc_piecewise_inductor")
SMALL, LARGE = ShapeKey("prefill", 2), ShapeKey("prefill", 8)


@pytest.fixture
def family() -> FakeFamily:
    return FakeFamily()


def test_names() -> None:
    assert BACKENDS == (
        "auto", "breakable", "debug_eager", "eager", "full", "tc_piecewise", "tc_piecewise_inductor",
    )  # fmt: skip
    assert [backend_class(name).name for name in BACKENDS] == list(BACKENDS)


@pytest.mark.parametrize("name", ["Full", "tc", "", "breakable "])
def test_unknown_name_lists_the_known(name: str, family: FakeFamily) -> None:
    with pytest.raises(UnknownNameError, match="known: auto, breakable, debug_eager, eager, full, tc_pie") as error:
        make_backend(name, family)
    assert repr(name) in str(error.value)
    assert isinstance(error.value, ConfigError)


def test_backends_are_imported_when_asked_for() -> None:
    code = (
        "import sys, breakgraph.backends as b; m = lambda: 'breakgraph.backends.full' in sys.modules; "
        "assert not m(); b.backend_class('full'); assert m()"
    )
    source = str(Path(breakgraph.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})


def test_the_contract_stays_small() -> None:
    assert len(Backend.__abstractmethods__) == 6


@pytest.mark.parametrize(
    ("name", "captures", "records_breaks"),
    [
        ("auto", True, False),
        ("breakable", True, False),
        ("debug_eager", True, False),
        ("eager", False, False),
        ("full", True, True),
        ("tc_piecewise", True, False),
        ("tc_piecewise_inductor", True, False),
    ],
)
def test_declarations(name: str, captures: bool, records_breaks: bool) -> None:
    cls = backend_class(name)
    assert (cls.captures, cls.records_breaks) == (captures, records_breaks)


@pytest.mark.parametrize("name", CAPTURING)
def test_capture_asks_the_family_for_the_right_plan(name: str, family: FakeFamily) -> None:
    state = (torch.zeros(1),)
    make_backend(name, family).capture(SMALL, lambda: 1, state, on_hazard="warn", version=int)
    options = {"state": state, "outputs": "borrow", "on_hazard": "warn", "version": int}
    assert family.options == {"prefill[2]": {"breaks": name != "full", **options}}


@pytest.mark.parametrize("name", BACKENDS)
def test_capture_replay_release(name: str, family: FakeFamily) -> None:
    backend = make_backend(name, family)
    value = torch.ones(2)
    backend.capture(SMALL, lambda: value + 1)
    backend.capture(LARGE, lambda: value + 2)
    value.fill_(5)
    assert backend.replay(SMALL).tolist() == [6, 6]
    assert backend.replay(LARGE).tolist() == [7, 7]
    assert backend.captured(SMALL)
    backend.release(SMALL)
    backend.release(SMALL)
    assert not backend.captured(SMALL)
    assert backend.captured(LARGE)
    with pytest.raises(ReplayError, match=r"prefill\[2\] is not captured \(captured: prefill\[8\]\)"):
        backend.replay(SMALL)
    backend.capture(SMALL, lambda: value)
    assert backend.replay(SMALL).tolist() == [5, 5]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_key_is_captured_once(name: str, family: FakeFamily) -> None:
    backend = make_backend(name, family)
    backend.capture(SMALL, lambda: 1)
    with pytest.raises(CaptureError, match=r"prefill\[2\] is already captured; release it first"):
        backend.capture(SMALL, lambda: 2)
    assert backend.replay(SMALL) == 1


@pytest.mark.parametrize("name", CAPTURING)
def test_a_failed_capture_publishes_nothing(name: str, family: FakeFamily) -> None:
    backend = make_backend(name, family)
    family.fail_at["prefill[2]"] = first = RuntimeError("boom")
    with pytest.raises(RuntimeError) as error:
        backend.capture(SMALL, lambda: 1)
    assert error.value is first
    assert not backend.captured(SMALL)
    assert backend.explain() == {}
    family.fail_at.clear()
    backend.capture(SMALL, lambda: 1)
    assert backend.replay(SMALL) == 1


@pytest.mark.parametrize("name", CAPTURING)
def test_close_closes_each_plan_once(name: str, family: FakeFamily) -> None:
    backend = make_backend(name, family)
    backend.capture(LARGE, lambda: 1)
    backend.capture(SMALL, lambda: 1)
    assert [(key, report.label) for key, report in backend.explain().items()] == [
        (LARGE, "prefill[8]"), (SMALL, "prefill[2]"),
    ]  # fmt: skip
    backend.close()
    backend.close()
    assert family.events[-2:] == ["close prefill[8]", "close prefill[2]"]
    assert not backend.captured(SMALL)


def test_eager_forgets_its_forwards_on_close(family: FakeFamily) -> None:
    backend = make_backend("eager", family)
    backend.capture(SMALL, lambda: 1)
    backend.close()
    assert not backend.captured(SMALL)
    assert backend.explain() == {}
    assert family.events == []

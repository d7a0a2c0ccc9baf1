"""A plan family that records what is asked of it; its replays call the captured function again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from breakgraph.graph import PlanReport


class FakePlan:
    def __init__(self, family: FakeFamily, fn: Callable[[], Any], label: str) -> None:
        self.family, self.fn, self.label = family, fn, label
        self.is_closed = False

    def replay(self) -> Any:
        self.family.events.append(f"replay {self.label}")
        return self.fn()

    def explain(self) -> PlanReport:
        sizes = {name: 0 for name in PlanReport.__dataclass_fields__ if name.endswith(("bytes", "sec", "replays"))}
        return PlanReport(label=self.label, device="cpu", emulated=True, steps=(), **sizes)

    def close(self) -> None:
        self.is_closed = True
        self.family.events.append(f"close {self.label}")


class FakeFamily:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.fail_at: dict[str, BaseException] = {}

    @contextmanager
    def window(self) -> Iterator[None]:
        self.events.append("window opens")
        try:
            yield
        finally:
            self.events.append("window closes")

    def capture(self, fn: Callable[[], Any], *, label: str, compiler: object, **options: Any) -> FakePlan:
        self.events.append(f"capture {label}")
        self.options[label] = options
        fn()
        if label in self.fail_at:
            raise self.fail_at[label]
        return FakePlan(self, fn, label)

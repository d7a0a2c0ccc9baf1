"""What captures of one bucket bake in: recorded calls compared, differences that are not declared named.

A graph holds every number that reached a kernel. Captured twice, with other host values and with inputs at other
addresses, a number that differs is one that a replay of another step would get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from breakgraph.errors import BakedValueError
from breakgraph.graph.device import RecordedCall
from breakgraph.graph.family import PlanFamily
from breakgraph.graph.tree import Tree

_HELD = 256
"""More than a capture frees, so that the host memory it had is not handed out again."""

Recording = Sequence[Sequence[RecordedCall]]
"""The calls of each step of a plan."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One argument that is not the same in both captures.

    Attributes:
        step: Index of the segment or break in the plan.
        call: Index of the call in it.
        name: Operator, kernel or break.
        argument: Which argument; "call" where another operator was called.
        first: What it was in the first capture.
        second: What it was in the second one.
    """

    step: int
    call: int
    name: str
    argument: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"step {self.step}, call {self.call}, {self.name}: {self.argument} is {self.first} and {self.second}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        differences: Not declared, in the order of a replay.
        declared: Differences that were declared.
        unread: What could not be read or classified, by call.
        num_words: Arguments compared, those of ``unread`` included.
    """

    differences: tuple[Difference, ...]
    declared: tuple[Difference, ...]
    unread: tuple[str, ...]
    num_words: int

    @property
    def coverage(self) -> float:
        """Share of the arguments that could be read and classified."""
        return 1.0 if not self.num_words else 1 - len(self.unread) / self.num_words

    def check(self) -> None:
        """Raises BakedValueError if there are differences."""
        if self.differences:
            listed = "\n".join(f"  {difference}" for difference in self.differences)
            raise BakedValueError(
                f"two captures of one bucket differ, and a replay would keep the first one's values:\n{listed}\n"
                "put what changes from step to step into a tensor or a break, or into the key; declare what may differ"
            )

    def __str__(self) -> str:
        head = (
            f"{self.num_words} arguments compared, {self.coverage:.1%} of them classified: "
            f"{len(self.differences)} differ, {len(self.declared)} declared"
        )
        return "\n".join(
            [head, *(f"  {d}" for d in self.differences), *(f"  not read: {text}" for text in self.unread)]
        )


def audit(
    make: Callable[[int], Callable[[], Tree]],
    device: torch.device | str,
    *,
    breaks: bool = True,
    declared: Collection[str] = (),
) -> AuditReport:
    """Capture two variations and compare what was recorded. Nothing is published.

    Each is captured twice: a word that changes although everything is the same is no argument. Kernels are given
    structures whole, and what lies between their fields is whatever was there.

    Args:
        make: Called with 0 and 1; returns what to capture. Both are of one bucket, the same shapes, and differ in
            everything else that steps differ in: values, lengths, partitions, and where the inputs lie.
        device: Where they run.
        breaks: Whether marked calls are breaks; see :meth:`PlanFamily.capture`.
        declared: Names of operators, kernels or breaks whose arguments may differ.

    Returns:
        The report; its ``check()`` raises.

    Raises:
        CaptureError: one of the captures failed.
    """
    functions = [make(0), make(1)]  # both alive, so that their tensors lie at different addresses
    captured: list[Recording] = []
    held: list[torch.Tensor] = []
    for fn in (*functions, *functions):
        with PlanFamily(device) as family:
            captured.append(family.capture(fn, breaks=breaks).recorded())
        # What lies between fields is often the address of a tensor object: the next capture's are elsewhere.
        held += [torch.empty(0) for _ in range(_HELD)]
    one, other, one_again, other_again = captured
    return compare(one, other, declared, repeats=[(one, one_again), (other, other_again)])


def compare(
    one: Recording,
    other: Recording,
    declared: Collection[str] = (),
    repeats: Sequence[tuple[Recording, Recording]] = (),
) -> AuditReport:
    """Compare the calls of two plans, a list for each step of a plan. ``repeats`` are of one variation each."""
    changing = {
        (d.step, d.call, d.argument): f"{d.name}: {d.argument} changes from capture to capture of the same"
        for pair in repeats for d in _differences(*pair) if d.argument != "call"
    }  # fmt: skip
    found = [d for d in _differences(one, other) if (d.step, d.call, d.argument) not in changing]
    calls = [call for step in (*one, *other) for call in step]
    unread = [f"{call.name}: {text}" for step in one for call in step for text in call.unread]
    return AuditReport(
        differences=tuple(d for d in found if d.name not in declared),
        declared=tuple(d for d in found if d.name in declared),
        unread=(*unread, *changing.values()),
        num_words=sum(len(call.arguments) + len(call.unread) for call in calls) // 2,
    )


def _differences(one: Recording, other: Recording) -> Iterator[Difference]:
    nothing = RecordedCall("nothing", {})
    for step, (first_step, second_step) in enumerate(zip_longest(one, other, fillvalue=())):
        for index, (first, second) in enumerate(zip_longest(first_step, second_step, fillvalue=nothing)):
            if first.name != second.name:
                name = first.name if first is not nothing else second.name
                yield Difference(step, index, name, "call", first.name, second.name)
                break  # what follows is shifted
            for argument in dict.fromkeys([*first.arguments, *second.arguments]):
                before, now = first.arguments.get(argument, "missing"), second.arguments.get(argument, "missing")
                if before != now:
                    yield Difference(step, index, first.name, argument, before, now)

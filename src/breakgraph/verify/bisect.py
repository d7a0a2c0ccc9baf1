"""From a step that is wrong to the segment and the operator that are wrong first."""

from __future__ import annotations

from dataclasses import replace

from breakgraph.graph import BreakWatcher, PlanFamily, watch_eager
from breakgraph.verify.arms import Case
from breakgraph.verify.log import BreakLog, ValueLog, same_point
from breakgraph.verify.probe import Probe
from breakgraph.verify.report import Culprit

_FROZEN = (
    "the operator, or an argument it got from Python (a number, a list, a branch), was fixed when the plan was "
    "captured; take such values from a static tensor, or move the call into an eager break"
)
_OF_THE_BREAK = (
    "it gets the same tensors and returns something else: it reads values that are the capture's, or that a "
    "replay does not set, or leaves rows undefined; read what changes from the current step, and fill every row"
)
_VANISHES = (
    "captured anew, with a graph for each operator, it gives what eager gives: a Python value that the plan holds has "
    "changed since, or kernels run that nobody declares (beside the dispatcher, on another stream), or memory is used "
    "after it was given back"
)


def find_culprit(case: Case) -> Culprit:
    """Where the replay of ``case`` begins to differ from eager. Captures the forward once more, in a family of its own.

    Looks at breaks first, then at every operator of the segment in question. What two eager runs disagree on is left
    out of account.
    """
    first, second, got = BreakLog(), BreakLog(), BreakLog()
    for log in (first, second):
        with watch_eager(log, breaks=case.breaks):
            case.eager()
    raised: str | None = None
    try:
        with case.family.watching(got):
            case.replay()
    except Exception as error:  # said in the hint; the breaks that it came through are in the log
        raised = " ".join(str(error).split())
    culprit, is_break = _first_break(first, second, got, raised is not None)
    if raised is not None:
        return replace(culprit, hint=raised)
    return culprit if is_break else _take_apart(case, culprit)


def _first_break(first: BreakLog, second: BreakLog, got: BreakLog, has_raised: bool) -> tuple[Culprit, bool]:
    """The first segment or break that is wrong, and whether it is a break."""

    def differs(kind: str, index: int) -> bool:
        one, two, other = (getattr(log, kind).points.get(index) for log in (first, second, got))
        return same_point(one, two) and not same_point(one, other)

    for index, name in enumerate(first.names):
        if index >= len(got.names) or got.names[index] != name:
            return Culprit(segment=index, break_name=name), False
        if differs("given", index):
            return Culprit(segment=index, break_name=name), False
        if has_raised and index not in got.results.points:
            return Culprit(segment=None, break_name=name), True
        if differs("results", index):
            if differs("written", index):
                # Only the operators can tell whether somebody filled it before.
                return Culprit(segment=index, break_name=name, hint=_OF_THE_BREAK), False
            return Culprit(segment=None, break_name=name, hint=_OF_THE_BREAK), True
    return Culprit(segment=len(first.names), break_name=None), False


def _take_apart(case: Case, culprit: Culprit) -> Culprit:
    assert culprit.segment is not None
    probe = Probe(culprit.segment, case.breaks, case.family.device)
    try:
        eager = [_eager_values(case, probe) for _ in range(2)]
        calls, probe.log = probe.calls, ValueLog()
        with PlanFamily(case.family.device.torch_device) as family:
            with case.ready_for_capture() as forward:
                plan = family.capture(probe.wrap(forward), label="probe", breaks=case.breaks)
            captured = probe.calls
            with case.ready():
                probe.log.restart()
                plan.replay()
            got = probe.log
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return replace(culprit, hint=f"the segment could not be taken apart to find the operator: {text}")
    for index, call in enumerate(calls):
        if index >= len(captured) or captured[index].op != call.op:
            op = captured[index].op if index < len(captured) else "nothing"
            return replace(culprit, op=f"{call.op}, where the capture has {op}", module=call.module, source=call.source,
                           hint="Python took another branch when the plan was captured; " + _FROZEN)  # fmt: skip
        one, two = (log.points.get(index) for log in eager)
        if same_point(one, two) and not same_point(one, got.points.get(index)):
            return replace(culprit, op=call.op, module=call.module, source=call.source, hint=_FROZEN)
    if culprit.hint:  # the break behind the segment was the other suspect
        return Culprit(segment=None, break_name=culprit.break_name, hint=culprit.hint)
    return replace(culprit, hint=_VANISHES)


def _eager_values(case: Case, probe: Probe) -> ValueLog:
    probe.log = ValueLog()
    with case.ready() as forward, watch_eager(BreakWatcher(), breaks=case.breaks):
        probe.wrap(forward)()
    return probe.log

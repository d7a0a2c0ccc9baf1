"""Plants one bug at a time in a copy of the sources and runs the tests: which bugs do they miss?

    python3 benchmarks/planted_bugs.py --out result.json

Each bug is an edit of one line or two: a pin that is not kept, a boundary that is not copied, a tail that stays. A bug
is killed when a test fails; the first failing test is named. Those marked gpu show on a CUDA device only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    *(
        f"tests/footguns/test_{name}_faults.py"
        for name in ("memory", "break", "capture", "runner", "input", "value", "rank")
    ),
    "tests/unit/graph", "tests/unit/runners", "tests/unit/backends", "tests/unit/test_api.py",
    "tests/footguns/test_programs.py",
)  # fmt: skip
GPU_TESTS = (
    "tests/gpu/test_capture_cuda.py", "tests/footguns/test_runner_faults.py", "tests/unit/runners/test_buffers.py",
)  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """`old` occurs once in `file`, below src/breakgraph."""

    name: str
    file: str
    old: str
    new: str
    gpu: bool = False


BUGS = (
    Bug("a segment's reads are not pinned", "graph/builder.py",
        "self.pins.update((pin._cdata, pin) for pin in segment.pins if not self._pool.owns(pin.data_ptr()))", "pass"),
    Bug("a break's outside arguments are not pinned", "graph/builder.py",
        "        self.pins[storage._cdata] = storage\n", ""),
    Bug("a boundary is not filled at a replay", "graph/boundary.py",
        "        if value.shape == view.shape and same_strides(value, view):\n            view.copy_(value)",
        "        if value.shape == view.shape and same_strides(value, view):\n            pass"),
    Bug("a boundary has default strides", "graph/boundary.py",
        "torch.empty_strided(result.shape, result.stride(), dtype", "torch.empty(result.shape, dtype"),
    Bug("a boundary stays alive after its segment", "graph/boundary.py",
        "        self.view = view_of(self.view, pool)", "        pass"),
    Bug("the tail behind live rows is forgotten", "graph/eager_break.py",
        "            tensor.narrow(self.row_dim, valid, rows - valid).zero_()", "            pass"),
    Bug("a late check is left out", "graph/plan.py",
        "            raise\n        if self._checks_late:\n", "            raise\n        if False:\n"),
    Bug("a stale plan tells what it ran into", "graph/plan.py",
        "            if self._checks_late:  # what", "            if False:  # what"),
    Bug("Python state that changes is not told", "graph/python_state.py",
        "        elif _is_told_apart(was, is_now):", "        elif False:"),
    Bug("the tail of a written argument is forgotten", "graph/boundary.py",
        "            for tensor in mutated:\n                spec.define_tail(tensor, valid)", "            pass"),
    Bug("a view starts at the beginning of its storage", "graph/boundary.py",
        "bare.set_(storage, tensor.storage_offset(), tensor.shape", "bare.set_(storage, 0, tensor.shape"),
    Bug("a constant result may change", "graph/boundary.py",
        "if not is_same or type(value) is not type(self.value):", "if False:"),
    Bug("a result of another structure is stored", "graph/boundary.py",
        "        if tree_structure(result) != self._structure:", "        if False:"),
    Bug("results that overlap an argument pass", "graph/boundary.py",
        "if any(leaf is argument or overlaps(leaf, argument) for argument in arguments):", "if False:"),
    Bug("two results of one tensor get two boundaries", "graph/boundary.py",
        "                if key not in fresh:", "                if True:"),
    Bug("the boundary before is not filled while capturing", "graph/builder.py",
        "            with pending.scope():\n                pending.results.fill_first()", "            pass"),
    Bug("a closed segment is not run while capturing", "graph/builder.py",
        "        segment.replay()\n", "        pass\n"),
    Bug("a break's argument keeps its pool block", "graph/builder.py",
        "            return view_of(tensor, self._pool)", "            return tensor.detach()"),
    Bug("older pool tensors are accepted", "graph/builder.py", "        if self._older:\n", "        if False:\n"),
    Bug("tensors made in a break are accepted without being its result", "graph/builder.py",
        "if made is not None and not made[0].expired():", "if False:"),
    Bug("objects are accepted as arguments of breaks", "graph/builder.py",
        "if is_constant(leaf) or isinstance(leaf, torch.nn.Module | torch.Size):", "if True:"),
    Bug("a swallowed error publishes half a plan", "graph/builder.py",
        "                if self._failure is not None:\n                    raise self._failure",
        "                if False:\n                    raise self._failure"),
    Bug("what is live at the end of a capture is not looked at", "graph/family.py",
        "        if left:\n            holders =", "        if False:\n            holders ="),
    Bug("registered state is not put back", "graph/restore.py",
        "            for tensor, value in saved:\n                tensor.detach().copy_(value)", "            pass"),
    Bug("random generators are not put back", "graph/restore.py", "        device.set_rng_state(rng)\n", ""),
    Bug("a failed replay leaves its outputs valid", "graph/plan.py",
        "                family.end_replay(self)\n            finally:\n",
        "            finally:\n                family.end_replay(self)\n"),
    Bug("outputs of other plans count as this one's", "graph/family.py",
        "return self._last_plan is plan", "return True"),
    Bug("the collector runs inside a capture", "graph/modes.py", "    gc.disable()\n", ""),
    Bug("the collector stays off after a capture", "graph/modes.py", "            gc.enable()", "            pass"),
    Bug("replays run under the caller's modes", "graph/plan.py",
        "                with self._mode.apply():\n                    self._launch",
        "                if True:\n                    self._launch"),
    Bug("a nested break is a break of its own", "graph/builder.py",
        "if not (self._breaks or spec.always) or self._in_break or self._failure is not None:",
        "if not (self._breaks or spec.always) or self._failure is not None:"),
    Bug("padded tokens write to a request's slot", "runners/spec.py", "RESERVED_SLOT = 0\n", "RESERVED_SLOT = 5\n"),
    Bug("metadata behind the live rows stays", "runners/buffers.py",
        "        target.copy_(host, non_blocking=True)\n",
        "        for p in layout.places:\n"
        "            n = batch.num_reqs if p.shape[0] == len(self._views[size]['logits_rows']) else p.shape[0]\n"
        "            live = slice(p.start, p.start + n * (p.end - p.start) // p.shape[0])\n"
        "            self._buffer[live].copy_(host[live], non_blocking=True)\n"),
    Bug("unused request slots have a length", "runners/prefill.py",
        'FieldSpec(name="seq_lens", dtype=torch.int32, axis="requests", pad=0)',
        'FieldSpec(name="seq_lens", dtype=torch.int32, axis="requests", pad=1)'),
    Bug("offsets of unused request slots are not parked", "runners/prefill.py",
        'axis="request_bounds", pad=Pad.REPEAT_LAST', 'axis="request_bounds", pad=0'),
    Bug("more requests than slots are replayed", "runners/spec.py",
        "fits = bucket is not None and num_reqs <= self.num_rows(\"requests\", bucket)",
        "fits = bucket is not None"),
    Bug("a table of another request passes", "runners/spec.py",
        "            if batch.slot_mapping[end - 1] != slot:", "            if False:"),
    Bug("static buffers are staged in memory that is used again", "runners/buffers.py",
        "host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=device.type == \"cuda\")",
        "host = _STAGED.setdefault(self.num_bytes, torch.empty(self.num_bytes, dtype=torch.uint8, "
        "pin_memory=device.type == \"cuda\"))", gpu=True),
    Bug("a break does not wait for its side streams", "graph/cuda_device.py",
        "        for side in side_streams:\n            main.wait_stream(side)", "        pass", gpu=True),
    Bug("a replaced weight is not noticed", "graph/fingerprint.py",
        "            if not all(map(is_, map(getitem, self._tables, self._names), self._tensors)):",
        "            if False:"),
    Bug("a weight on other memory is not noticed", "graph/fingerprint.py",
        "        return _lie_at(self._tensors, self._addresses, self._indices)\n", "        return True\n"),
    Bug("a changed mode is not noticed", "graph/fingerprint.py",
        " and self._modes() == self._flags\n", "\n"),
    Bug("an input on other memory is not noticed", "graph/fingerprint.py",
        "        if _lie_at(self._tensors, self._addresses, self._indices):\n            return\n",
        "        return\n"),
    Bug("a scan lets state pass that every call changes", "graph/side_effects.py",
        "return key not in before or key not in now or not before[key].is_same(now[key])", "return False"),
    Bug("a scan lets what no graph holds pass", "graph/hazard_scan.py",
        "            if fault is not None:\n                scan.note(fault)\n", ""),
    Bug("an audit compares nothing", "graph/audit.py", "if before != now:", "if False:"),
    Bug("an audit takes noise for an argument", "graph/audit.py",
        " if (d.step, d.call, d.argument) not in changing]", "]"),
    Bug("ranks that differ go on", "graph/ranks.py",
        "        if self._received != message * len(self._ranks):", "        if False:"),
    Bug("a pool trace begins before its memory was its own", "graph/cuda_pool.py",
        "                found = [event for event in found if not address <= event[0] < end]\n", ""),
    Bug("runs are chosen for one order of segments", "graph/packing.py", "_NUM_LAYOUTS = 8", "_NUM_LAYOUTS = 1"),
    Bug("a replay on another stream does not wait", "graph/cuda_device.py",
        "        if last_stream is not None and current != last_stream:\n            current.wait_stream(last_stream)",
        "        pass", gpu=True),
)  # fmt: skip


def plant(bug: Bug, root: Path) -> None:
    path = root / "src" / "breakgraph" / bug.file
    text = path.read_text(encoding="utf-8")
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: expected its line once in {bug.file}, found it {text.count(bug.old)} times")
    text = text.replace(bug.old, bug.new)
    if "_STAGED" in bug.new:
        text = text.replace("class _Layout", "_STAGED: dict = {}\n\n\nclass _Layout")
    path.write_text(text, encoding="utf-8")


def copy_of_sources(folder: Path) -> Path:
    root = folder / "copy"
    for name in ("src", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root / name)
    return root


def first_failure(bug: Bug | None, *rounds: tuple[str, ...]) -> tuple[str | None, float]:
    """The test that fails first, or None; and the seconds it took. A round of tests is run if those before it pass."""
    started, failure = time.perf_counter(), None
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of_sources(Path(folder))
        if bug is not None:
            plant(bug, root)
        for tests in rounds:
            failure = failure or failure_in(root, tests, is_last=tests is rounds[-1])
    return failure, time.perf_counter() - started


def failure_in(root: Path, tests: tuple[str, ...], *, is_last: bool) -> str | None:
    environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests],
        cwd=root, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode == 4 and not is_last:
        return None  # a test that there is no longer
    if done.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else None if done.returncode == 0 else "collection"


def main() -> None:
    from breakgraph.bench.result import Metric, Result, Row, Shape, here, read_result, write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="bugs whose name holds this text")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at the same time")
    parser.add_argument("--gpu", action="store_true", help="the bugs that only a GPU shows")
    parser.add_argument("--first", type=Path, help="an earlier result: what killed a bug then is run before the rest")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    bugs = [bug for bug in BUGS if bug.gpu == args.gpu and (args.only or "") in bug.name]
    tests = GPU_TESTS if args.gpu else TESTS
    earlier = {row.name: row.params.get("killed_by") for row in read_result(args.first).rows} if args.first else {}
    failure, seconds = first_failure(None, tests)
    if failure is not None:
        raise SystemExit(f"{failure} fails without a bug; nothing to learn then")
    print(f"no bug: all pass, {seconds:.0f} s", flush=True)

    def row_of(bug: Bug) -> Row:
        killer = earlier.get(bug.name)
        failure, seconds = first_failure(bug, *([(str(killer),)] if killer else []), tests)
        print(f"{'killed' if failure else 'SURVIVED':9}{bug.name}: {failure or ''} ({seconds:.0f} s)", flush=True)
        metrics = {
            "killed": Metric(value=failure is not None, unit="bool"),
            "wall": Metric(value=seconds, unit="s"),
        }
        return Row(name=bug.name, params={"file": bug.file, "killed_by": failure}, metrics=metrics)

    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(row_of, bugs))
    device = "cuda" if args.gpu else "cpu"
    told = [Path(word).name for word in sys.argv[1:-2]]  # of an earlier result the name is enough
    run, where, versions = here(" ".join(("python3 benchmarks/planted_bugs.py", *told)), device)
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model="planted bugs", dtype="float32"), rows=tuple(rows),
        notes=(f"tests: {', '.join(tests)}; they pass without a bug",), excluded=(),
    ))  # fmt: skip
    survived = [row.name for row in rows if not row.metrics["killed"].value]
    print(f"{len(rows)} bugs, {len(survived)} survived")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()

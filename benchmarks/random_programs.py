"""Many random programs with breaks, each captured and replayed under poison: how many differ from eager.

    PYTHONPATH=src:tests python3 benchmarks/random_programs.py --programs 20000 --out result.json

Programs come in pairs that share a memory pool and take turns, see tests/footguns/programs.py. The tests run hundreds
that hypothesis chooses; these are numbered, so that any of them can be made again (--first).
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from pathlib import Path

import torch

from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from footguns.checker import ROUNDS, differences
from footguns.programs import Program, write_program


def pair(number: int) -> list[Program]:
    rng = random.Random(number)
    return [write_program(rng.randrange) for _ in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    start, wrong = time.perf_counter(), 0
    num_pairs = -(-args.programs // 2)
    for number in range(args.first, args.first + num_pairs):
        programs = pair(number)
        try:
            found = differences(programs, torch.device(args.device), number)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            wrong += 1
            print(f"pair {number}: {found}", *programs, sep="\n", flush=True)
        if number % 1000 == 999:
            print(f"{number + 1} pairs, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    command = f"python3 benchmarks/random_programs.py {' '.join(sys.argv[1:-2])}".strip()
    run, where, versions = here(command, args.device)
    metrics = {
        "programs": Metric(value=2 * num_pairs, unit="count"),
        "replays": Metric(value=2 * num_pairs * ROUNDS, unit="count"),
        "wrong_pairs": Metric(value=wrong, unit="count"),
        "wall": Metric(value=time.perf_counter() - start, unit="s"),
    }
    print(*(f"{name} {metric.value} {metric.unit}" for name, metric in metrics.items()))
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model="random programs", dtype="float32"),
        rows=(Row(name="all", params={"first_pair": args.first}, metrics=metrics),),
        notes=("a pair is wrong where a replay, in memory filled with NaN patterns, differs from eager in any bit of "
               "outputs or registered state, or where the capture raises or changes the state",),
        excluded=(),
    ))  # fmt: skip
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

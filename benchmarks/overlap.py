"""What it is worth that the host works while the GPU runs, and that the GPU has the next step before this one ends.

    PYTHONPATH=src python3 benchmarks/overlap.py --model qwen3-0.6b --out result.json

Three ways to serve the same streams take turns on one engine. "one step ahead" is the engine as it is: the GPU has the
next step before the tokens of this one are on the host. "beside the GPU": it has it after they were booked; tokens go
out and the next step is prepared when the GPU has its work. "between steps": tokens go out when they are there, and
each step is built afresh once its tokens are booked. Weights are random, answers are greedy and have one length. A
reader in a thread of its own makes a JSON event of each token, as a server does; there is no tokenizer and no network.
"""

from __future__ import annotations

import argparse
import json
import queue
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from breakgraph import LLM, SamplingParams
from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from breakgraph.bench.workloads import random_prompts
from breakgraph.engine.ahead import NotAhead, StepAhead
from breakgraph.engine.engine_thread import EngineThread, TokenEvent
from breakgraph.engine.scheduler import Scheduler
from breakgraph.engine.step_batch import PreparedDecode

WAYS = ("one step ahead", "beside the GPU", "between steps")


@contextmanager
def working(way: str, thread: EngineThread) -> Iterator[None]:
    """Let the host work in one way or the other; the engine must be idle."""
    with ExitStack() as stack:
        if way != "one step ahead":
            reason = NotAhead.LIVE_CHECK  # any will do
            stack.enter_context(patch.object(StepAhead, "why_not", lambda *args, **options: reason))
        if way == "between steps":
            stack.enter_context(patch.object(thread, "_has_own_device", False))
            stack.enter_context(patch.object(PreparedDecode, "after", lambda step, block_size: None))
            stack.enter_context(patch.object(Scheduler, "take_ahead", lambda scheduler, step: None))
        yield


class Reader:
    """Makes an event of each token and forgets it; knows when the streams have ended."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()
        self._num_open = 0
        self._is_idle = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def publish(self, events: list[TokenEvent]) -> None:
        self._events.put(events)

    def expect(self, num_streams: int) -> None:
        self._num_open = num_streams
        self._is_idle.clear()

    def wait(self) -> None:
        self._is_idle.wait()

    def _read(self) -> None:
        while True:
            for event in self._events.get():
                delta = {"index": 0, "delta": {"content": str(event.token_id)}, "finish_reason": event.finish_reason}
                json.dumps({"id": event.request.request_id, "object": "chat.completion.chunk", "choices": [delta]})
                self._num_open -= event.is_last
            if not self._num_open:
                self._is_idle.set()


def serve(llm: LLM, thread: EngineThread, reader: Reader, num_streams: int, args: argparse.Namespace) -> float:
    """Seconds a step, from the moment at which every stream has a token to the last token of all."""
    params = SamplingParams(temperature=0.0, max_tokens=args.answer_len, ignore_eos=True)
    prompts = random_prompts(num_streams, args.prompt_len, llm.engine.facts.vocab_size, seed=0)
    requests = [llm.engine.make_request(prompt, params, with_text=False) for prompt in prompts]
    reader.expect(num_streams)
    thread.add(requests)
    while not all(request.output_token_ids for request in requests):
        time.sleep(0.001)
    left = sum(args.answer_len - len(request.output_token_ids) for request in requests)
    started = time.perf_counter()
    reader.wait()
    return (time.perf_counter() - started) / (left / num_streams)


def measure(llm: LLM, thread: EngineThread, reader: Reader, num_streams: int, args: argparse.Namespace) -> list[Row]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(args.rounds + 1):
        for way in WAYS:
            with working(way, thread):
                per_step = serve(llm, thread, reader, num_streams, args)
            if index:  # the first round is not counted
                seconds[way].append(per_step)
    rows = []
    for way, values in seconds.items():
        median = statistics.median(values)
        metrics = {
            "step": Metric(value=median * 1e3, unit="ms"),
            "fastest": Metric(value=min(values) * 1e3, unit="ms"),
            "slowest": Metric(value=max(values) * 1e3, unit="ms"),
            "answer_rate": Metric(value=num_streams / median, unit="tokens/s"),
        }
        rows.append(Row(name="overlap", params={"streams": num_streams, "host work": way}, metrics=metrics))
        rate = f"{num_streams / median:.0f} tokens/s"
        print(f"{num_streams} streams, {way}: {median * 1e3:.2f} ms a step, {rate}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset or a folder with a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--answer-len", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fusion", default="none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = {"max_num_seqs": max(args.streams), "max_model_len": args.prompt_len + args.answer_len}
    with LLM(
        args.model, load_format="dummy", device=args.device, fusion=args.fusion, use_tqdm=False,
        enable_prefix_caching=False, max_num_batched_tokens=2048, **sizes,
    ) as llm:  # fmt: skip
        reader = Reader()
        thread = EngineThread(llm.engine, reader.publish, max_waiting=0)
        thread.start()
        try:
            rows = [row for streams in args.streams for row in measure(llm, thread, reader, streams, args)]
        finally:
            thread.close()
        dtype = llm.engine.config.dtype
    run, where, versions = here(shlex.join(["python3", "benchmarks/overlap.py", *sys.argv[1:]]), args.device)
    result = Result(
        run=run, where=where, versions=versions, shape=Shape(model=args.model, dtype=dtype), rows=tuple(rows),
        notes=(
            "step: from the moment at which every stream has a token until all have ended, by tokens of a stream",
            "beside the GPU: the same engine, which launches no step before the tokens of the last one are booked",
            "between steps: its hand-over and its preparation of the next step are switched off, too",
        ),
        excluded=("prompts", "tokenising and detokenising", "HTTP"),
    )  # fmt: skip
    if args.out is not None:
        write_result(args.out, result)


if __name__ == "__main__":
    main()

"""The runners on the real capture library and the real attention, on every device that is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from breakgraph.attention import make_attention
from breakgraph.backends import make_backend
from breakgraph.errors import ConfigError
from breakgraph.graph import PlanFamily, eager_on_graph
from breakgraph.runners import DecodeRunner, PrefillRunner, Runner, SlottedPrefillRunner, StepBatch
from unit.runners.fakes import NUM_BLOCKS, make_decode_spec, make_prefill_spec
from unit.runners.toy_model import LAYERS, NUM_LAYERS, ToyModel, ToyRequest, new_cache, next_step

PREFILL_BACKENDS = ("breakable", "debug_eager", "full", "tc_piecewise")
DECODE_BACKENDS = ("full", "breakable", "debug_eager", "tc_piecewise")
Forward = Callable[[Mapping[str, Tensor]], Tensor]


class Bench:
    """A model, its cache, one plan family, and runners on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.family = PlanFamily(device)
        self.model = ToyModel(device)
        self.kv = new_cache(device, NUM_BLOCKS)
        self.attention = make_attention("sdpa", device, torch.float32, LAYERS)
        self.attention.bind(self.kv)
        self.runners: list[Runner] = []

    def prefill(self, backend: str = "breakable", capture: bool = True, forward: Forward | None = None) -> Runner:
        if backend == "full":
            return self._ready(SlottedPrefillRunner, make_prefill_spec(request_slots=4), backend, capture, forward)
        return self._ready(PrefillRunner, make_prefill_spec(), backend, capture, forward)

    def decode(self, backend: str = "full", capture: bool = True, forward: Forward | None = None) -> Runner:
        return self._ready(DecodeRunner, make_decode_spec(), backend, capture, forward)

    def _ready(self, runner_class: type[Runner], spec: object, backend: str, capture: bool, forward: object) -> Runner:
        made = make_backend(backend, self.family)
        runner = runner_class(spec, made, forward or self.model.forward, self.attention, self.device)
        self.runners.append(runner)
        runner.allocate()
        if capture:
            runner.capture()
        return runner

    def check(self, runner: Runner, batch: StepBatch, requests: Sequence[ToyRequest]) -> None:
        """A replay in poisoned memory: equal to the padded eager step, close to the model without a cache."""
        replays = sum(runner.stats.replays.values())
        self.family.poison()
        logits = runner.run(batch).clone()
        assert sum(runner.stats.replays.values()) == replays + 1
        self.expect(logits, requests)
        assert torch.equal(logits, runner.run_padded_eager(batch))

    def expect(self, logits: Tensor, requests: Sequence[ToyRequest]) -> None:
        expected = torch.stack([self.model.without_cache(r.token_ids[: r.num_cached]) for r in requests])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self.family.close()


@pytest.fixture
def bench(device: torch.device) -> Iterator[Bench]:
    bench = Bench(device)
    yield bench
    bench.close()


def new_requests(num_reqs: int, num_tokens: int = 24) -> list[ToyRequest]:
    """Requests on blocks of their own, which are not in order."""
    generator = torch.Generator().manual_seed(num_reqs)
    blocks = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    per_request = num_tokens // 4
    return [
        ToyRequest(
            torch.randint(48, (num_tokens,), generator=generator).tolist(),
            blocks[per_request * index : per_request * (index + 1)],
        )
        for index in range(num_reqs)
    ]


@pytest.mark.parametrize("backend", PREFILL_BACKENDS)
def test_prefill_of_any_partition(bench: Bench, backend: str) -> None:
    runner = bench.prefill(backend)
    for partition in [(3,), (4,), (5,), (7,), (8,), (9,), (1, 1, 1), (4, 4), (1, 6, 1), (2, 3, 4, 7)]:
        requests = new_requests(len(partition))
        bench.check(runner, next_step(list(zip(requests, partition, strict=True))), requests)
        # Again with a prefix in the cache.
        bench.check(runner, next_step([(request, 2) for request in requests]), requests)


@pytest.mark.parametrize("backend", DECODE_BACKENDS)
def test_decode_after_prompts_of_other_lengths(bench: Bench, backend: str) -> None:
    prefill, decode = bench.prefill("eager"), bench.decode(backend)
    # The last one leaves a tail of eight longer requests in its bucket.
    for num_reqs in (1, 2, 3, 4, 7, 8, 5):
        requests = new_requests(num_reqs)
        prefill.run(next_step([(request, 3 + index) for index, request in enumerate(requests)]))
        for _ in range(2):
            bench.check(decode, next_step([(request, 1) for request in requests]), requests)


@pytest.mark.parametrize("backend", PREFILL_BACKENDS)
def test_decoding_rows_ride_along_in_a_prefill_step(bench: Bench, backend: str) -> None:
    runner, requests = bench.prefill(backend), new_requests(3)
    runner.run(next_step([(requests[0], 5), (requests[1], 9)]))
    bench.check(runner, next_step([(requests[0], 1), (requests[1], 1), (requests[2], 7)]), requests)


def test_two_runners_share_a_family_and_take_turns(bench: Bench) -> None:
    prefill, decode = bench.prefill(), bench.decode()
    requests = new_requests(4)
    for count, request in enumerate(requests, start=1):
        running = requests[:count]
        bench.check(prefill, next_step([(request, 4 + count)]), [request])
        bench.check(decode, next_step([(each, 1) for each in running]), running)
    prefill.close()
    bench.check(decode, next_step([(each, 1) for each in requests]), requests)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_kv_outside_the_live_slots_and_the_reserved_block_stays(bench: Bench, phase: str) -> None:
    runner = bench.prefill() if phase == "prefill" else bench.decode()
    generator = torch.Generator(device=bench.device).manual_seed(0)
    for buffers in (bench.kv.key, bench.kv.value):
        for layer in buffers.values():
            layer.normal_(generator=generator)
    before = {id(t): t.clone() for buffers in (bench.kv.key, bench.kv.value) for t in buffers.values()}
    requests = new_requests(3)
    batch = next_step([(request, 1) for request in requests])
    runner.run(batch)
    slots = torch.tensor(batch.slot_mapping, device=bench.device)
    for buffers in (bench.kv.key, bench.kv.value):
        for layer in buffers.values():
            old, new = before[id(layer)].flatten(0, 1), layer.flatten(0, 1).clone()
            assert not torch.equal(new[slots], old[slots])
            new[slots] = old[slots]
            new[:4] = old[:4]
            assert torch.equal(new, old)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_warm_up_and_capture_write_to_the_reserved_slot_only(bench: Bench, phase: str) -> None:
    runner = bench.prefill(capture=False) if phase == "prefill" else bench.decode(capture=False)
    runner.warm_up()
    runner.capture()
    for buffers in (bench.kv.key, bench.kv.value):
        for layer in buffers.values():
            assert layer[0, 0].any()
            assert not layer.flatten(0, 1)[1:].any()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_measuring_touches_the_reserved_block_only_and_says_what_the_largest_bucket_takes(
    bench: Bench, phase: str
) -> None:
    runner = bench.prefill(capture=False) if phase == "prefill" else bench.decode(capture=False)
    largest = runner.spec.ladder[-1]
    memory = runner.measure_memory(num_long_reqs=3)
    for buffers in (bench.kv.key, bench.kv.value):
        for layer in buffers.values():
            assert not layer.flatten(0, 1)[1:].any()
    report = runner.explain()[runner.spec.key(largest)]
    assert (memory.phase, memory.num_plans, memory.runs_eagerly) == (phase, 3, False)
    assert memory.pool_bytes == bench.family.pool_bytes > 0
    assert memory.pool_peak_bytes == report.pool_peak_bytes > 0
    assert memory.output_bytes == bench.family.output_bytes > 0
    assert memory.input_bytes == runner.input_bytes > 0
    assert (
        (memory.driver_bytes_per_plan is None) == (memory.eager.allocated_bytes is None) == (bench.device.type == "cpu")
    )
    assert sum(runner.stats.replays.values()) == sum(runner.stats.eager_steps.values()) == 0


def test_measuring_what_captures_nothing(bench: Bench) -> None:
    memory = bench.prefill("eager").measure_memory(num_long_reqs=2)
    assert (memory.num_plans, memory.runs_eagerly, memory.pool_bytes, memory.output_bytes) == (0, True, 0, 0)
    assert bench.family.pool_bytes == 0


@pytest.mark.parametrize(
    ("phase", "backend", "num_breaks"),
    [
        ("prefill", "breakable", NUM_LAYERS),
        ("prefill", "debug_eager", 1),
        ("prefill", "full", 0),
        ("decode", "full", 0),
        ("decode", "breakable", NUM_LAYERS),
        ("decode", "debug_eager", 1),
    ],
)
def test_explain_shows_what_each_backend_made(bench: Bench, phase: str, backend: str, num_breaks: int) -> None:
    runner = bench.prefill(backend) if phase == "prefill" else bench.decode(backend)
    reports = runner.explain()
    assert [key.size for key in reports] == list(reversed(runner.spec.ladder))
    assert {report.num_breaks for report in reports.values()} == {num_breaks}
    recorded = [sum(step.num_ops for step in report.steps) for report in reports.values()]
    # debug_eager records the copy to the output buffer and nothing else.
    assert all((ops < 5) == (backend == "debug_eager") for ops in recorded)


def test_full_prefill_is_refused_by_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(bench.attention), "graph_support", lambda self, phase: "decode")
    with pytest.raises(ConfigError, match=r"prefill with backend 'full' needs .*, attention 'sdpa' has 'decode' there"):
        bench.prefill("full")
    assert bench.family.pool_bytes == 0


def test_a_replay_borrows_and_an_eager_step_does_not(bench: Bench) -> None:
    runner, requests = bench.prefill(), new_requests(2)
    borrowed = runner.run(next_step([(requests[0], 4)]))
    eager = bench.prefill("eager").run(next_step([(requests[1], 4)]))
    kept = borrowed.clone(), eager.clone()
    runner.run(next_step([(requests[1], 5)]))
    assert not torch.equal(borrowed, kept[0])
    assert torch.equal(eager, kept[1])


def test_a_capture_that_fails_can_be_repeated_in_the_same_memory(bench: Bench) -> None:
    broken = True
    error = RuntimeError("bucket 4")

    def forward(fields: Mapping[str, Tensor]) -> Tensor:
        if broken and fields["input_ids"].shape[0] == 4:
            raise error
        return bench.model.forward(fields)

    runner = bench.prefill(capture=False, forward=forward)
    with pytest.raises(RuntimeError) as raised:
        runner.capture()
    assert raised.value is error
    assert runner.explain() == {}
    requests = new_requests(1)
    bench.expect(runner.run(next_step([(requests[0], 9)])), requests)
    assert runner.stats.to_dict()["num_eager_steps_by_reason"] == {"not_captured": 1}
    broken, pool_bytes = False, bench.family.pool_bytes
    runner.capture()
    assert bench.family.pool_bytes <= pool_bytes
    bench.check(runner, next_step([(requests[0], 3)]), requests)


def test_a_break_that_fails_voids_its_step_only(bench: Bench) -> None:
    should_fail = False

    @eager_on_graph
    def fragile(hidden: Tensor) -> Tensor:
        if should_fail:
            raise ValueError("this step")
        return hidden * 1

    runner = bench.prefill(forward=lambda fields: fragile(bench.model.forward(fields)))
    requests = new_requests(1)
    should_fail = True
    batch = next_step([(requests[0], 5)])
    with pytest.raises(ValueError, match="this step"):
        runner.run(batch)
    assert sum(runner.stats.replays.values()) == 0
    should_fail = False
    bench.check(runner, batch, requests)


@pytest.mark.parametrize("captured_in", ["grad", "no_grad", "inference"])
def test_any_grad_mode_around_any_call(bench: Bench, captured_in: str) -> None:
    modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "grad": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    with modes[captured_in]():
        prefill, decode = bench.prefill(), bench.decode()
    for run_in in modes.values():
        requests = new_requests(2)
        with run_in():
            bench.check(prefill, next_step([(requests[0], 5), (requests[1], 2)]), requests)
            bench.check(decode, next_step([(request, 1) for request in requests]), requests)

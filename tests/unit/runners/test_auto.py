"""Backend auto: each bucket is captured as what was faster, and replays are right either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from breakgraph.attention import make_attention
from breakgraph.backends import make_backend
from breakgraph.errors import CaptureError, ConfigError
from breakgraph.graph import Plan, PlanFamily, eager_on_graph
from breakgraph.runners import AutoDecodeRunner, AutoPrefillRunner, Runner, auto
from unit.runners.fakes import NUM_BLOCKS, make_decode_spec, make_prefill_spec
from unit.runners.test_runner_graph import new_requests
from unit.runners.toy_model import LAYERS, ToyModel, new_cache, next_step

Seconds = dict[str, float]


class Choosing:
    """A runner with its model, cache and family; `times` answers for each bucket, largest first."""

    def __init__(self, device: torch.device, runner_class: type[Runner], spec: object) -> None:
        self.model, self.kv, self.family = ToyModel(device), new_cache(device, NUM_BLOCKS), PlanFamily(device)
        self.attention = make_attention("sdpa", device, torch.float32, LAYERS)
        self.attention.bind(self.kv)
        backend = make_backend("auto", self.family)
        self.runner = runner_class(spec, backend, self.model.forward, self.attention, device)
        self.runner.allocate()

    def limit_pool(self, limit: int) -> None:
        """Bytes that a plan may need. Attention of this model takes room in a full graph that it does not elsewhere."""
        choose = self.runner._choose_faster
        self.runner._choose_faster = lambda size, _: choose(size, limit)

    def chosen(self) -> dict[int, tuple[str, int]]:
        """By bucket, the note and the number of breaks."""
        return {key.size: (report.notes[-1], report.num_breaks) for key, report in self.runner.explain().items()}

    def check(self, work: list[int]) -> None:
        requests = new_requests(len(work))
        batch = next_step(list(zip(requests, work, strict=True)))
        self.family.poison()
        logits = self.runner.run(batch).clone()
        expected = torch.stack([self.model.without_cache(r.token_ids[: r.num_cached]) for r in requests])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, self.runner.run_padded_eager(batch))


@pytest.fixture
def make(device: torch.device) -> Iterator[Callable[..., Choosing]]:
    made: list[Choosing] = []

    def start(runner_class: type[Runner] = AutoPrefillRunner, spec: object = None) -> Choosing:
        spec = spec or make_prefill_spec(request_slots=3, buckets=(4, 8, 16))
        made.append(Choosing(device, runner_class, spec))
        return made[-1]

    yield start
    for side in made:
        side.runner.close()
        side.family.close()


def answer(monkeypatch: pytest.MonkeyPatch, *answers: Seconds) -> list[set[str]]:
    """Both ways run once, and take what `answers` says; returns what ran."""
    remaining, ran = iter(answers), []

    def time_steps(steps: Mapping[str, Callable[[], object]], device: torch.device) -> Seconds:
        for step in steps.values():
            step()
        ran.append(set(steps))
        return next(remaining)

    monkeypatch.setattr(auto, "can_time", lambda device: True)
    monkeypatch.setattr(auto, "time_steps", time_steps)
    return ran


SLOW, FAST = {"full": 0.003, "breakable": 0.002}, {"full": 0.001, "breakable": 0.002}


def test_each_bucket_becomes_what_was_faster(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    ran = answer(monkeypatch, SLOW, FAST, SLOW)
    side = make(spec=make_prefill_spec(request_slots=3, buckets=(2, 4, 8, 12, 16)))
    side.limit_pool(1 << 40)
    side.runner.capture()
    assert ran == [{"full", "breakable"}] * 3
    layers = len(LAYERS)
    assert side.chosen() == {
        16: ("backend auto: breakable (full 3.000 ms, breakable 2.000 ms)", layers),
        12: ("backend auto: breakable (as bucket 8, which was timed)", layers),
        8: ("backend auto: breakable (full 3.000 ms, breakable 2.000 ms)", layers),
        4: ("backend auto: full (full 1.000 ms, breakable 2.000 ms)", 0),
        2: ("backend auto: full (as bucket 4, which was timed)", 0),
    }
    for work in ([16], [3, 9], [8], [2, 3, 1], [4], [1]):
        side.check(work)
    assert side.runner.stats.replays == {16: 1, 12: 1, 8: 2, 4: 1, 2: 1}
    side.runner.capture()  # nothing is left to choose
    assert len(ran) == 3


@pytest.mark.parametrize("num_full", range(7))
def test_the_size_up_to_which_full_graphs_win_is_found(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch, num_full: int
) -> None:
    ladder, timed = (1, 2, 4, 6, 8, 16), list[int]()
    side = make(spec=make_prefill_spec(request_slots=3, buckets=ladder))

    def choose(size: int, limit: int | None) -> int:
        assert (limit is None) == (not timed)
        timed.append(size)
        side.runner._choose(size, "full" if size in ladder[:num_full] else "breakable", step_sec={"full": 1.0})
        return 77

    monkeypatch.setattr(auto, "can_time", lambda device: True)
    monkeypatch.setattr(side.runner, "_choose_faster", choose)
    side.runner.choose()
    assert [size for size in ladder if not side.runner._has_breaks(size)] == list(ladder[:num_full])
    assert timed[0] == 16
    assert len(timed) <= 4


def test_a_full_graph_has_to_be_a_little_faster(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    answer(monkeypatch, {"full": 0.996, "breakable": 1.0}, {"full": 0.98, "breakable": 1.0}, SLOW)
    side = make()
    side.limit_pool(1 << 40)
    side.runner.choose()
    assert {size: side.runner._has_breaks(size) for size in (4, 8, 16)} == {4: False, 8: True, 16: True}


def test_a_full_graph_that_was_not_timed_and_fails_is_captured_with_breaks(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, FAST)
    side = make()
    side.limit_pool(1 << 40)
    forward = side.runner.forward

    @eager_on_graph
    def read(x: torch.Tensor) -> None:
        x.sum().item()

    def reading_in_small_steps(fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if len(fields["slot_mapping"]) < 16:
            read(fields["slot_mapping"])
        return forward(fields)

    side.runner.forward = reading_in_small_steps
    side.runner.capture()
    notes = side.chosen()
    assert notes[16][1] == 0
    assert all("breakable (no full graph: " in notes[size][0] for size in (4, 8))
    side.check([2, 3])


def test_request_slots_are_filled_for_full_graphs_only(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, SLOW, FAST, FAST)
    side = make()
    side.limit_pool(1 << 40)
    side.runner.capture()
    buffers = side.runner._buffers
    side.check([16])
    assert buffers.break_views["seq_lens"].tolist() == [16]
    side.check([8])
    assert buffers.break_views == {}
    assert buffers.views(8)["seq_lens"].tolist() == [8, 0, 0]


def test_decode_chooses_too(make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, SLOW, FAST)
    side = make(AutoDecodeRunner, make_decode_spec(buckets=(2, 4)))
    side.limit_pool(1 << 40)
    side.runner.capture()
    assert {size: breaks for size, (_, breaks) in side.chosen().items()} == {4: len(LAYERS), 2: 0}
    side.check([1, 1, 1])
    side.check([1])


def test_a_full_graph_that_needs_more_of_the_pool_is_not_taken(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, *[{"full": 0.001, "breakable": 0.002}] * 3)
    side = make()
    side.limit_pool(512)
    side.runner.capture()
    note, breaks = side.chosen()[16]
    assert "breakable (full 1.000 ms, breakable 2.000 ms) (full needs" in note
    assert breaks == len(LAYERS)


def test_where_nothing_can_be_timed_there_are_breaks_and_the_reason(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not auto.can_time(torch.device("cpu"))
    monkeypatch.setattr(auto, "can_time", lambda device: False)
    side = make()
    side.runner.capture()
    note = "backend auto: breakable (nothing is timed on the emulated device)"
    assert set(side.chosen().values()) == {(note, len(LAYERS))}
    side.check([2, 3])


def test_what_is_timed_is_a_step_as_it_will_be(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With breaks attention is planned behind the first segment, not ahead of the replay."""
    monkeypatch.setattr(auto, "can_time", lambda device: True)
    side, events = make(), list[str]()
    plan, replay = side.attention.plan, Plan.replay

    def spy_plan(step: object) -> object:
        events.append("plan")
        return plan(step)

    def spy_replay(plan: Plan) -> object:
        events.append(plan.label.split()[0])
        return replay(plan)

    monkeypatch.setattr(side.attention, "plan", spy_plan)
    monkeypatch.setattr(Plan, "replay", spy_replay)
    monkeypatch.setattr(side.runner, "_has_breaks", lambda size: True)  # whatever was faster
    side.runner.choose()
    of_a_round = ["plan", "full", "breakable", "plan"]
    rounds = auto._WARM_ROUNDS + auto._ROUNDS
    assert events == (["plan"] * 2 + of_a_round * rounds) * 2, "the largest, then one of the others"
    assert all(side.runner.backend.has_choice(side.runner.spec.key(size)) for size in (4, 8, 16))
    assert side.runner.explain() == {}


def test_a_forward_that_no_full_graph_can_hold_keeps_its_breaks(
    device: torch.device, make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch)
    side = make()
    forward = side.runner.forward

    @eager_on_graph
    def read(x: torch.Tensor) -> None:
        x.sum().item()

    def reading(fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        read(fields["slot_mapping"])
        return forward(fields)

    side.runner.forward = reading
    side.runner.capture()
    notes = {size: note for size, (note, _) in side.chosen().items()}
    assert "no full graph: " in notes[16]
    assert "no full graph: " in notes[4]
    assert "breakable (as bucket 4, which was timed)" in notes[8]
    side.check([2, 3])


def test_ranks_do_not_choose_for_themselves(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    side = make()
    monkeypatch.setattr(side.family, "ranks", object())
    with pytest.raises(ConfigError, match="ranks might choose differently"):
        side.runner.choose()
    monkeypatch.setattr(side.family, "ranks", None)


def test_attention_that_no_graph_can_hold_stays_in_breaks(
    make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = answer(monkeypatch)
    side = make()
    monkeypatch.setattr(side.attention, "graph_support", lambda phase: "none")
    side.runner.capture()
    assert not ran
    assert all("needs an attention with graph support varlen" in note for note, _ in side.chosen().values())
    side.check([2, 3])


def test_more_requests_than_slots_run_eagerly(make: Callable[..., Choosing]) -> None:
    side = make()
    side.runner.capture()
    batch = next_step([(request, 1) for request in new_requests(4)])
    side.runner.run(batch)
    assert side.runner.stats.to_dict()["num_eager_steps_by_reason"] == {"too_many_requests": 1}


def test_memory_is_measured_with_breaks(make: Callable[..., Choosing], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = answer(monkeypatch)
    side = make()
    side.runner.capture_largest()
    assert not ran
    assert side.chosen() == {16: ("backend auto: breakable (nothing was chosen)", len(LAYERS))}
    with pytest.raises(CaptureError, match="already captured"):
        side.runner.capture_largest()


def test_a_capture_by_hand_has_nothing_to_choose_from(device: torch.device) -> None:
    import breakgraph

    with pytest.raises(ConfigError, match="'auto' chooses for each bucket of a runner"):
        breakgraph.capture(lambda x: x + 1, torch.zeros(2, device=device), backend="auto")

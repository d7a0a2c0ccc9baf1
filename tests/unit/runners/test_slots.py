"""Request slots: full prefill graphs of any partition, equal to breakable ones bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from breakgraph.attention import make_attention
from breakgraph.backends import make_backend
from breakgraph.graph import PlanFamily
from breakgraph.runners import Runner, SlottedPrefillRunner
from triton_device import DEVICE
from unit.runners.fakes import NUM_BLOCKS, make_prefill_spec
from unit.runners.test_runner_graph import new_requests
from unit.runners.toy_model import LAYERS, ToyModel, ToyRequest, new_cache, next_step

SLOTS = 3
PARTITIONS = [(16,), (9,), (3, 5), (1, 1, 1), (1, 12, 2), (4,), (2, 2)]


class Side:
    """One backend with a cache of its own."""

    def __init__(self, backend: str, attention: str, device: torch.device) -> None:
        self.family = PlanFamily(device)
        self.model, self.kv = ToyModel(device), new_cache(device, NUM_BLOCKS)
        self.attention = make_attention(attention, device, torch.float32, LAYERS)
        self.attention.bind(self.kv)
        spec = make_prefill_spec(request_slots=SLOTS, buckets=(8, 16))
        self.runner: Runner = SlottedPrefillRunner(
            spec, make_backend(backend, self.family), self.model.forward, self.attention, device
        )
        self.runner.allocate()
        self.runner.capture()

    def run(self, work: list[tuple[ToyRequest, int]]) -> Tensor:
        self.family.poison()
        batch = next_step(work)
        return self.runner.run(batch).clone()

    def close(self) -> None:
        self.runner.close()
        self.family.close()


PAIRS = [*(("sdpa", device) for device in sorted({"cpu", DEVICE.type})), ("triton", DEVICE.type)]


@pytest.fixture(params=PAIRS, ids="-".join)
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    attention, device = request.param
    full, breakable = (Side(backend, attention, torch.device(device)) for backend in ("full", "breakable"))
    yield full, breakable
    full.close()
    breakable.close()


def test_full_equals_breakable_and_the_model_without_a_cache(sides: tuple[Side, Side]) -> None:
    full, breakable = sides
    for partition in PARTITIONS:
        pair = [new_requests(len(partition)) for _ in sides]
        for news in (partition, (2,) * len(partition)):  # the second time with a prefix in the cache
            left, right = (
                side.run(list(zip(requests, news, strict=True))) for side, requests in zip(sides, pair, strict=True)
            )
            assert torch.equal(left, right), news
            expected = [full.model.without_cache(r.token_ids[: r.num_cached]) for r in pair[0]]
            torch.testing.assert_close(left, torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert full.runner.stats.replays == breakable.runner.stats.replays
    assert sum(full.runner.stats.replays.values()) == 2 * len(PARTITIONS)


def test_more_requests_than_slots_run_eagerly_and_are_counted(sides: tuple[Side, Side]) -> None:
    full, _ = sides
    requests = new_requests(SLOTS + 1)
    logits = full.run([(request, 3) for request in requests])
    assert full.runner.stats.to_dict()["num_eager_steps_by_reason"] == {"too_many_requests": 1}
    assert not full.runner.stats.replays
    expected = torch.stack([full.model.without_cache(r.token_ids[:3]) for r in requests])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_what_a_former_step_left_in_the_slots_is_gone(sides: tuple[Side, Side]) -> None:
    full, _ = sides
    crowd, one = new_requests(SLOTS), new_requests(1)
    full.run([(request, 5) for request in crowd])
    before = {id(t): t.clone() for buffers in (full.kv.key, full.kv.value) for t in buffers.values()}
    batch = next_step([(one[0], 2)])
    full.runner.run(batch)
    for buffers in (full.kv.key, full.kv.value):
        for layer in buffers.values():
            changed = (layer != before[id(layer)]).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(batch.slot_mapping) <= set(changed) <= {0, *batch.slot_mapping}

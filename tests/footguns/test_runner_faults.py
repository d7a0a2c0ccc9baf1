"""Faults of padding and metadata: whose slots are written, and what an earlier step leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from breakgraph.attention import make_attention
from breakgraph.backends import make_backend
from breakgraph.graph import PlanFamily
from breakgraph.runners import DecodeRunner, PrefillRunner, Runner, SlottedPrefillRunner
from breakgraph.runners.buffers import StaticBuffers
from unit.runners.fakes import NUM_BLOCKS, decode_batch, make_decode_spec, make_prefill_spec
from unit.runners.test_runner_graph import new_requests
from unit.runners.toy_model import LAYERS, ToyModel, new_cache, next_step

SPECS = {
    "prefill-breakable": (PrefillRunner, lambda: make_prefill_spec(max_num_seqs=8), "breakable"),
    "prefill-full": (SlottedPrefillRunner, lambda: make_prefill_spec(max_num_seqs=8, request_slots=8), "full"),
    "decode-full": (DecodeRunner, make_decode_spec, "full"),
    "decode-breakable": (DecodeRunner, make_decode_spec, "breakable"),
}


class Served:
    def __init__(self, kind: str, device: torch.device) -> None:
        runner_class, spec, backend = SPECS[kind]
        self.family, self.model, self.kv = PlanFamily(device), ToyModel(device), new_cache(device, NUM_BLOCKS)
        attention = make_attention("sdpa", device, torch.float32, LAYERS)
        attention.bind(self.kv)
        made = make_backend(backend, self.family)
        self.runner: Runner = runner_class(spec(), made, self.model.forward, attention, device)
        self.runner.allocate()
        self.runner.capture()
        generator = torch.Generator(device=device).manual_seed(0)
        for tensor in self.kv_tensors:
            tensor.normal_(generator=generator)

    @property
    def kv_tensors(self) -> list[torch.Tensor]:
        return [t for buffers in (self.kv.key, self.kv.value) for t in buffers.values()]

    def close(self) -> None:
        self.runner.close()
        self.family.close()


@pytest.fixture(params=list(SPECS))
def served(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Served]:
    served = Served(request.param, device)
    yield served
    served.close()


def test_f11_padding_writes_to_nobodys_slots(served: Served) -> None:
    requests = new_requests(3)
    batch = next_step([(request, 1) for request in requests])
    before = [tensor.clone() for tensor in served.kv_tensors]
    served.family.poison()
    served.runner.run(batch)
    assert served.runner.stats.num_padded_tokens > 0
    for old, new in zip(before, served.kv_tensors, strict=True):
        changed = (old != new).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(batch.slot_mapping) <= set(changed) <= {0, *batch.slot_mapping}


def test_f12_a_crowded_step_leaves_nothing_for_the_next(served: Served) -> None:
    crowd, one = new_requests(8), new_requests(1)
    served.runner.run(next_step([(request, 1) for request in crowd]))
    # Whatever a former step left in the static buffers is garbage now, as far as it is not written anew.
    for buffer in served.runner._buffers.views(served.runner.spec.ladder[-1]).values():
        buffer.fill_(1)
    batch = next_step([(one[0], 1)])
    before = [tensor.clone() for tensor in served.kv_tensors]
    logits = served.runner.run(batch).clone()
    torch.testing.assert_close(logits[0], served.model.without_cache(one[0].token_ids[:1]), rtol=1e-4, atol=1e-4)
    for old, new in zip(before, served.kv_tensors, strict=True):
        changed = (old != new).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {0, *batch.slot_mapping}


def test_f35_a_replay_has_the_bits_of_a_padded_eager_step(served: Served) -> None:
    requests = new_requests(3)
    batch = next_step([(request, 1) for request in requests])
    served.family.poison()
    replayed = served.runner.run(batch).clone()
    assert sum(served.runner.stats.replays.values()) == 1
    assert torch.equal(replayed, served.runner.run_padded_eager(batch))
    expected = torch.stack([served.model.without_cache(r.token_ids[: r.num_cached]) for r in requests])
    torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-4)


def test_f46_steps_in_flight_keep_the_values_that_they_were_sent(device: torch.device) -> None:
    buffers = StaticBuffers(make_decode_spec(), device)
    if device.type == "cuda":
        torch.cuda._sleep(200_000_000)
    seen = [buffers.load(decode_batch(2, first_token=10 * step), 2)["input_ids"].clone() for step in range(30)]
    assert [ids.tolist() for ids in seen] == [[10 * step, 10 * step + 1] for step in range(30)]

"""Python state that a captured function changes, wherever it keeps it: a replay would go on with the captured value."""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig, StaticCache

import breakgraph
from breakgraph.errors import HazardError, HazardWarning
from breakgraph.graph import eager_on_graph

COUNT = 0
TABLE: dict[str, Any] = {"count": 0}
SEEN: dict[object, int] = {}


class Layer:
    def __init__(self) -> None:
        self.length = 4
        self.keys = torch.zeros(2, 4)


class Cache:
    """As those of `transformers`: the layers hold the tensors, and count in Python."""

    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]

    def update(self, x: Tensor) -> Tensor:
        self.layers[1].length += 1
        return x * self.layers[1].length


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = 0


class Model(nn.Module):
    """Uses the cache that it is given, or its own."""

    def __init__(self, cache: Cache | None = None) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.cache = cache

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        held = cache or self.cache
        assert held is not None
        return held.update(self.proj(x))


Forward = Callable[..., Tensor]


def in_a_closure() -> Forward:
    cache, model = Cache(), Model()
    return lambda x: model(x, cache)


def in_a_module() -> Forward:
    return Model(Cache())


def in_a_variable() -> Forward:
    count = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    return forward


def in_a_global() -> Forward:
    def forward(x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT

    return forward


class NamesAGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        TABLE["count"] += 1
        return x * TABLE["count"]


def in_a_default() -> Forward:
    def forward(x: Tensor, counts: list[int] = [0]) -> Tensor:  # noqa: B006
        counts[0] += 1
        return x * counts[0]

    return forward


def in_slots() -> Forward:
    slotted = Slotted()

    def forward(x: Tensor) -> Tensor:
        slotted.count += 1
        return x * slotted.count

    return forward


def in_a_namespace() -> Forward:
    space = SimpleNamespace(lengths=(1, 2))

    def forward(x: Tensor) -> Tensor:
        space.lengths = (space.lengths[0], space.lengths[1] + 1)
        return x * space.lengths[1]

    return forward


def in_the_function() -> Forward:
    def forward(x: Tensor) -> Tensor:
        forward.calls = getattr(forward, "calls", 0) + 1  # type: ignore[attr-defined]
        return x * forward.calls  # type: ignore[attr-defined]

    return forward


def in_a_queue() -> Forward:
    waiting = deque([1.0, 2.0])

    def forward(x: Tensor) -> Tensor:
        waiting.rotate()
        return x * waiting[0]

    return forward


class Counted(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return x * Counted.calls


def in_a_generator_of_its_own() -> Forward:
    drawn = random.Random(3)
    return lambda x: x * drawn.random()


def in_a_generator_of_numpy() -> Forward:
    drawn = np.random.default_rng(3)
    return lambda x: x * float(drawn.random())


def in_a_random_state_of_numpy() -> Forward:
    drawn = np.random.RandomState(3)
    return lambda x: x * float(drawn.rand())


def counting(held: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        held["n"] += 1
        return x * float(held["n"])

    return forward


def in_a_parsed_argument() -> Forward:
    held = SimpleNamespace(args=argparse.Namespace(n=0))

    def forward(x: Tensor) -> Tensor:
        held.args.n += 1
        return x * held.args.n

    return forward


class ClassHolds:
    held: dict[str, int] = {"n": 0}  # noqa: RUF012


class OfAClass(ClassHolds):
    def __call__(self, x: Tensor) -> Tensor:
        self.held["n"] += 1
        return x * self.held["n"]


class OfAModuleClass(nn.Module):
    held: dict[str, int] = {"n": 0}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.held["n"] += 1
        return x * self.held["n"]


def in_a_module_of_the_user() -> Forward:
    module: Any = types.ModuleType("users_module")
    module.step = 0
    sys.modules["users_module"] = module

    def forward(x: Tensor) -> Tensor:
        import users_module  # type: ignore[import-not-found]

        users_module.step += 1
        return x * users_module.step

    return forward


def in_a_hook() -> Forward:
    calls, module = [0], nn.Linear(4, 4)

    def hook(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        calls[0] += 1
        return out * calls[0]

    module.register_forward_hook(hook)
    return module


def which_tensor() -> Forward:
    layer = Layer()

    def forward(x: Tensor) -> Tensor:
        layer.keys = torch.zeros(2, 4)
        return x + layer.keys

    return lambda x: [forward][0](x)


@pytest.mark.parametrize(("make", "told"), [
    (in_a_closure, r"cache\.layers\[1\]\.length cannot be captured: it is changed by every call \(5 -> 6\)"),
    (in_a_module, r"Model\.cache\.layers\[1\]\.length cannot .* \(5 -> 6\).*module Model"),
    (in_a_variable, r"count cannot .* \(1 -> 2\).*test_python_state.py:\d+ in forward"),
    (in_a_global, r"COUNT cannot .*->"),
    (NamesAGlobal, r"TABLE\['count'\] cannot .*->"),
    (in_a_default, r"counts\[0\] cannot .* \(1 -> 2\)"),
    (in_slots, r"slotted\.count cannot .* \(1 -> 2\)"),
    (in_a_namespace, r"space\.lengths\[1\] cannot .* \(3 -> 4\)"),
    (in_the_function, r"forward\.calls cannot .* \(1 -> 2\)"),
    (in_a_queue, r"waiting\[0\] cannot .* \(2\.0 -> 1\.0, and 1 more like it\)"),
    (Counted, r"Counted\.calls cannot .* \(\d -> \d\)"),
    (in_a_generator_of_its_own, r"drawn.* cannot "),
    (in_a_generator_of_numpy, r"drawn.* cannot "),
    (in_a_random_state_of_numpy, r"drawn.* cannot "),
    (lambda: counting({"n": np.int64(0)}), r"held\['n'\] cannot .*1\W.*2\W"),
    (lambda: counting({"n": Decimal(0)}), r"held\['n'\] cannot .*Decimal\('1'\) -> Decimal\('2'\)"),
    (in_a_parsed_argument, r"held\.args\.n cannot .* \(1 -> 2\)"),
    (OfAClass, r"ClassHolds\.held\['n'\] cannot .* \(\d -> \d\)"),
    (OfAModuleClass, r"OfAModuleClass\.held\['n'\] cannot .* \(\d -> \d\)"),
    (in_a_module_of_the_user, r"users_module\.step cannot .* \(1 -> 2\)"),
    (in_a_hook, r"calls\[0\] cannot .* \(1 -> 2\)"),
    (which_tensor, r"Layer\.keys cannot .* \(a tensor float32\[2, 4\].* -> a tensor"),
])  # fmt: skip
def test_state_that_every_call_changes_is_named(make: Callable[[], Forward], told: str) -> None:
    with torch.no_grad(), pytest.raises(HazardError, match=told) as caught:
        breakgraph.capture(make(), torch.randn(2, 4))
    assert {hazard.kind for hazard in caught.value.report.blocking} == {"Python side effect"}
    assert 'capture with on_hazard="warn"' in str(caught.value)


def test_state_of_an_argument_is_named() -> None:
    told = r"static_inputs\[1\]\.layers\[1\]\.length cannot .* \(5 -> 6\)"
    with torch.no_grad(), pytest.raises(HazardError, match=told):
        breakgraph.capture(Model(), torch.randn(2, 4), Cache())


def test_a_cache_of_transformers_that_slides_counts_in_python() -> None:
    kinds = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=4, sliding_window=8,
        layer_types=kinds,
    )  # fmt: skip
    cache, x = StaticCache(config=config, max_cache_len=16), torch.randn(1, 1, 1, 4)

    def step(x: Tensor, cache: StaticCache) -> Tensor:
        return cache.update(x, x, 0)[0].sum() + cache.update(x, x, 1)[0].sum()

    with torch.no_grad(), pytest.raises(HazardError, match=r"cache\.layers\[1\]\.cumulative_length\w* can") as caught:
        breakgraph.capture(lambda x: step(x, cache), x)
    (hazard,) = caught.value.report.blocking
    assert "1 -> 2" in hazard.why
    with torch.no_grad(), pytest.raises(HazardError, match=r"static_inputs\[1\]\.layers\[1\]\.cumulative_length"):
        breakgraph.capture(step, x, StaticCache(config=config, max_cache_len=16))


def test_a_warning_goes_on() -> None:
    with torch.no_grad(), pytest.warns(HazardWarning, match=r"cache\.layers\[1\]\.length"):
        breakgraph.capture(in_a_closure(), torch.randn(2, 4), on_hazard="warn").close()


def test_a_break_that_changes_state_runs_at_every_replay(device: torch.device) -> None:
    cache, other = Cache(), Cache()

    @eager_on_graph
    def counted(x: Tensor) -> Tensor:
        if cache.layers[1].length > 4:
            other.layers[0].length += 1  # not in the first call
        return cache.update(x) + other.layers[0].length

    x = torch.randn(2, 4, device=device)
    with torch.no_grad(), breakgraph.capture(lambda x: counted(x * 2) + len(cache.layers + other.layers), x) as graph:
        before = cache.layers[1].length, other.layers[0].length
        graph.replay()
        graph.replay()
        assert (cache.layers[1].length, other.layers[0].length) == (before[0] + 2, before[1] + 2)


def test_a_break_beside_code_that_changes_state_does_not_hide_it() -> None:
    cache, other = Cache(), Cache()
    update = eager_on_graph(cache.update)
    told = r"^other\.layers\[1\]\.length cannot [^\n]*$"
    with torch.no_grad(), pytest.raises(HazardError, match=told):
        breakgraph.capture(lambda x: other.update(update(x)) + len(cache.layers), torch.randn(2, 4))


def caches_that_grow(x: Tensor) -> Tensor:
    SEEN[object()] = 1
    return x + 1


def memo() -> Forward:
    known: dict[tuple[int, ...], float] = {}

    def forward(x: Tensor) -> Tensor:
        return x * known.setdefault(tuple(x.shape), 2.0)

    return forward


def rebuilding() -> Forward:
    held: dict[str, Any] = {}

    def forward(x: Tensor) -> Tensor:
        held["options"] = [{"scale": 2.0, "sizes": (1, 2)}]  # other objects, and the same contents
        return x * held["options"][0]["scale"]

    return forward


def counts_and_goes_back() -> Forward:
    depth = [0]

    def forward(x: Tensor) -> Tensor:
        depth[0] += 1
        y = x * depth[0]
        depth[0] -= 1
        return y

    return forward


@pytest.mark.parametrize("make", [lambda: caches_that_grow, memo, rebuilding, counts_and_goes_back])
def test_what_is_no_change_is_no_hazard(make: Callable[[], Forward], device: torch.device) -> None:
    fn, x = make(), torch.randn(2, 4, device=device)
    with torch.no_grad(), breakgraph.capture(fn, x) as graph:
        assert torch.equal(graph.replay(), fn(x))


@dataclass
class Settings:
    """Equal to others, and so without a hash."""

    scale: float = 2.0
    names: list[str] = field(default_factory=list)
    calls: int = 0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def counted(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_objects_without_a_hash_are_watched() -> None:
    settings, x = Settings(), torch.randn(2, 4)
    with torch.no_grad(), breakgraph.capture(settings.scaled, x) as graph:
        assert torch.equal(graph.replay(), x * 2)
    with torch.no_grad(), pytest.raises(HazardError, match=r"Settings\.calls cannot .* \(1 -> 2\)"):
        breakgraph.capture(settings.counted, x)

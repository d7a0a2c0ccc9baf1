"""Layers and functions of torch, each captured as it is called: replays on new values have the bits of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import breakgraph
from breakgraph.errors import (
    BreakArgumentError,
    BreakResultError,
    CaptureError,
    HazardError,
    StalePlanError,
    UncapturableOpError,
)
from breakgraph.graph import Plan, PlanFamily

ROWS, SIGNAL, IMAGE, VOLUME = (3, 8), (2, 4, 16), (2, 4, 8, 8), (1, 2, 4, 4, 4)
CASES: dict[str, tuple[Callable[[], Callable[[Tensor], Any]], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 4), ROWS),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), SIGNAL),
    "conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), IMAGE),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), VOLUME),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), IMAGE),
    "batch norm": (lambda: nn.BatchNorm1d(8), ROWS),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), IMAGE),
    "instance norm": (lambda: nn.InstanceNorm2d(4), IMAGE),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "layer norm": (lambda: nn.LayerNorm(8), ROWS),
    "rms norm": (lambda: nn.RMSNorm(8), ROWS),
    "max pool and indices": (lambda: nn.MaxPool2d(2, return_indices=True), IMAGE),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(3), IMAGE),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "unfold": (lambda: nn.Unfold(2), IMAGE),
    "bilinear": (lambda: lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), IMAGE),
    "bicubic": (lambda: lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), IMAGE),
    "circular padding": (lambda: lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), IMAGE),
    "circular convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    "reflected padding": (lambda: lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), IMAGE),
    "lstm": (lambda: nn.LSTM(16, 8, num_layers=2, bidirectional=True, batch_first=True), SIGNAL),
    "gru": (lambda: nn.GRU(16, 8, batch_first=True), SIGNAL),
    "attention": (lambda: _attend_to_itself(nn.MultiheadAttention(16, 4, batch_first=True)), SIGNAL),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), SIGNAL),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2), SIGNAL),
    "sorted": (lambda: lambda x: x.sort(-1), ROWS),
    "top k": (lambda: lambda x: x.topk(2), ROWS),
    "numbers on the device": (lambda: _scaled, ROWS),
    "filled by a mask": (lambda: _zero_negatives, ROWS),
    "running sum": (lambda: lambda x: x.cumsum(-1), ROWS),
    "one hot": (lambda: lambda x: F.one_hot(x.argmax(-1), num_classes=8) * x, ROWS),
    "bag of embeddings": (lambda: _embed_ranks(nn.EmbeddingBag(8, 4)), ROWS),
    "scattered": (lambda: lambda x: torch.zeros_like(x).scatter_add_(1, x.argsort(-1), x), ROWS),
    "fourier": (lambda: lambda x: torch.fft.rfft(x).abs(), ROWS),
    "complex": (lambda: lambda x: torch.view_as_real(torch.polar(x.abs(), x)), ROWS),
    "solved": (lambda: _solved, ROWS),
}


def _scaled(x: Tensor) -> Tensor:
    """Nothing is uploaded for one number."""
    floats = torch.tensor(2.5, device=x.device), torch.tensor(float("-inf"), dtype=torch.float64, device=x.device)
    others = torch.tensor(3, device=x.device), torch.as_tensor(True, device=x.device)
    assert [t.dtype for t in (*floats, *others)] == [torch.float32, torch.float64, torch.int64, torch.bool]
    return torch.where(x > 0, x * floats[0] + others[0] * others[1], floats[1].float())


def _solved(x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(x[:, :3].tril() + 9 * torch.eye(3, device=x.device), x, upper=False)


def _zero_negatives(x: Tensor) -> Tensor:
    """With a number from the host, torch looks for no places."""
    x = x.clone()
    x[x < 0] = 0.0
    return x


def _attend_to_itself(attention: nn.MultiheadAttention) -> Callable[[Tensor], Tensor]:
    attention.eval()
    return _OnDevice(attention, lambda layer, x: layer(x, x, x, need_weights=False)[0])


def _embed_ranks(bag: nn.EmbeddingBag) -> Callable[[Tensor], Tensor]:
    return _OnDevice(bag, lambda layer, x: layer(x.argsort(-1)))


class _OnDevice(nn.Module):
    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def make(name: str, device: torch.device) -> tuple[Callable[[Tensor], Any], Tensor]:
    build, shape = CASES[name]
    fn = build()
    if isinstance(fn, nn.Module):
        fn.to(device).eval()
    return fn, torch.randn(shape, device=device)


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for item in value for leaf in leaves(item)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_replays_have_the_bits_of_the_call(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], Any], name: str, mode: Callable[[], Any]
) -> None:
    """In inference mode the dispatcher shows operators that are made of others, and torch has two ways to take some of
    them apart."""
    with mode():
        fn, x = make(name, device)
        plan = family.capture(lambda: fn(x))
        x.normal_()
        for got, want in zip(leaves(replay(plan)), leaves(fn(x)), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["attention", "encoder layer", "encoder"])
def test_fast_paths_of_torch_pass_verification(device: torch.device, name: str) -> None:
    fn, x = make(name, device)
    asked = torch.overrides.has_torch_function
    with torch.no_grad(), breakgraph.capture(fn, x, verify=True):
        pass
    assert torch.overrides.has_torch_function is asked


def test_a_mode_of_the_users_own_is_as_good_a_reason_as_outside(device: torch.device, family: PlanFamily) -> None:
    layer, x = make("encoder layer", device)

    class Doubled(Tensor):
        asked = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Doubled.asked += func is F.multi_head_attention_forward
            return super().__torch_function__(func, types, args, kwargs)

    def fn() -> Tensor:
        return layer(x.as_subclass(Doubled)).as_subclass(Tensor)

    with torch.no_grad():
        plan = family.capture(fn)
        assert Doubled.asked > 0
        assert torch.equal(plan.replay(), fn())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_drops_padded_tokens_reads_the_mask(device: torch.device) -> None:
    """As outside a capture: how many are left depends on data. Told to keep them, it can be captured."""
    layer, x = make("encoder layer", device)
    padded = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
    padded[0, -1] = True

    def make_encoder(drops: bool) -> Callable[[Tensor], Tensor]:
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=drops).eval()
        return lambda x: encoder(x, src_key_padding_mask=padded)

    with torch.no_grad(), pytest.raises(HazardError, match="_nested_tensor_from_mask"):
        breakgraph.capture(make_encoder(drops=True), x)
    fn = make_encoder(drops=False)
    with torch.no_grad(), breakgraph.capture(fn, x, verify=True) as captured:
        x.normal_()
        assert torch.equal(captured.replay(), fn(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_module_of_torchscript(device: torch.device) -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Dropout())).to(device).eval()
    x = torch.randn(3, 8, device=device)
    with torch.no_grad(), breakgraph.capture(module, x) as captured:
        x.normal_()
        assert torch.equal(captured.replay(), module(x))
        module.train()
        with pytest.raises(StalePlanError, match="was in evaluation mode and is in training mode"):
            captured.replay()
        module.eval()
        getattr(module, "0").weight.data = torch.randn(8, 8, device=device)
        with pytest.raises(StalePlanError, match=r"weight was"):
            captured.replay()


def test_what_only_a_break_can_hold_is_named(device: torch.device) -> None:
    x, picks = torch.randn(3, 8, device=device), torch.eye(3, device=device).to_sparse()

    def with_sparse(x: Tensor) -> Tensor:
        return torch.sparse.mm(picks, x + 1) * 2

    def with_mask(x: Tensor) -> Tensor:
        x = x.clone()
        x[x < 0] = x[x < 0] * 2
        return x

    for fn, message in ((with_sparse, "on a sparse_coo tensor cannot be captured"), (with_mask, "a boolean mask")):
        with torch.no_grad(), pytest.raises(HazardError, match=message):
            breakgraph.capture(fn, x)
        with torch.no_grad(), PlanFamily(device) as family, pytest.raises(UncapturableOpError, match=message):
            family.capture(lambda fn=fn: fn(x))
    pick = breakgraph.eager_on_graph(lambda x: torch.sparse.mm(picks, x))
    with torch.no_grad(), breakgraph.capture(lambda x: pick(x + 1) * 2, x, verify=True) as captured:
        x.normal_()
        assert torch.equal(captured.replay(), with_sparse(x))


def test_a_sparse_tensor_crosses_no_edge_of_a_break_or_plan(device: torch.device) -> None:
    x, picks = torch.randn(3, 3, device=device), torch.eye(3, device=device).to_sparse()
    given = breakgraph.eager_on_graph(lambda picks, x: torch.sparse.mm(picks, x))
    returned = breakgraph.eager_on_graph(lambda x: x.to_sparse())
    for fn, error, message in (
        (lambda: given(picks, x + 1), BreakArgumentError, "argument picks of break .* is a sparse_coo tensor"),
        (lambda: returned(x + 1).to_dense(), BreakResultError, "result.* is a sparse_coo tensor"),
        (lambda: (x + 1, picks), CaptureError, r"output\[1\] is a sparse_coo tensor; return to_dense"),
    ):
        with torch.no_grad(), PlanFamily(device) as family, pytest.raises(error, match=message):
            family.capture(fn)


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5)


OLD_WEIGHTS: list[tuple[Callable[[], nn.Module], str]] = [
    (pruned, r"torch\.nn\.utils\.prune,.*utils\.prune\.remove\(module, 'weight'\)"),
    (lambda: nn.utils.weight_norm(nn.Linear(8, 8)), r"weight_norm,.*remove_weight_norm\(module, 'weight'\).*param"),
    (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), r"spectral_norm,.*remove_spectral_norm\(module, 'weight'\)"),
]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(("make", "told"), OLD_WEIGHTS, ids=["prune", "weight_norm", "spectral_norm"])
def test_a_weight_that_a_hook_computes_is_called_what_it_is(make: Callable[[], nn.Module], told: str) -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), pytest.raises(HazardError, match=r"0\.weight cannot .* by a forward pre-hook of .*" + told):
        breakgraph.capture(nn.Sequential(make()), x)


def test_a_pruned_layer_that_was_made_permanent_is_captured(device: torch.device) -> None:
    layer, x = pruned().to(device), torch.randn(3, 8, device=device)
    prune.remove(layer, "weight")
    with torch.no_grad(), breakgraph.capture(layer, x, verify=True) as captured:
        assert torch.equal(captured.replay(), layer(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_rrelu_that_trains_writes_its_noise(device: torch.device, in_place: bool) -> None:
    layer, x = nn.RReLU(inplace=in_place).train(), torch.randn(3, 8, device=device)
    with torch.no_grad(), breakgraph.capture(lambda x: layer(x * 2) + 1, x) as captured:
        x.normal_()
        torch.manual_seed(3)
        replayed = captured.replay().clone()
        torch.manual_seed(3)
        assert torch.equal(replayed, layer(x * 2) + 1)

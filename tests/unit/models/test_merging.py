"""Linear layers that are computed as one keep their names, weights and results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from breakgraph.models.merging import merge_linears
from tiny_models import TINY_CONFIGS, VOCAB_SIZE, tiny_model


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=bias) for n in (12, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x) * 2, self.v_proj(x) * 3], -1)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_results_names_and_weights_stay(bias: bool) -> None:
    module, x = Attention(bias), torch.randn(5, 8)
    wanted, before = module(x), {name: p.clone() for name, p in module.named_parameters()}
    assert merge_linears(module) == 1
    assert torch.allclose(module(x), wanted, atol=1e-6)
    assert {name: p.shape for name, p in module.named_parameters()} == {name: p.shape for name, p in before.items()}
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == 1 + bias  # no second copy of the weights


@torch.no_grad()
def test_an_update_in_place_reaches_the_joint_weight() -> None:
    module, x = Attention(), torch.randn(5, 8)
    merge_linears(module)
    module.k_proj.weight.zero_()
    assert torch.equal(module(x)[:, 12:16], torch.zeros(5, 4))


@torch.no_grad()
def test_no_result_is_kept_between_calls() -> None:
    module = Attention()
    merge_linears(module)
    module(torch.randn(5, 8))
    assert module.q_proj.group.parts == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "k_proj", nn.Linear(9, 4, bias=False)),
        lambda m: setattr(m, "k_proj", nn.Linear(8, 4, bias=True)),
        lambda m: setattr(m, "k_proj", nn.Linear(8, 4, bias=False, dtype=torch.float64)),
        lambda m: setattr(m, "k_proj", nn.Identity()),
        lambda m: delattr(m, "k_proj"),
        lambda m: m.k_proj.register_forward_hook(lambda *_: None),
    ],
    ids=["width", "bias", "dtype", "class", "missing", "hook"],
)
def test_layers_that_differ_stay_alone(change) -> None:
    module = Attention()
    change(module)
    assert merge_linears(module) == 0
    assert type(module.q_proj) is nn.Linear


@pytest.mark.parametrize("name", TINY_CONFIGS)
@torch.no_grad()
def test_models_compute_the_same(name: str) -> None:
    model, tokens = tiny_model(name, "eager"), torch.randint(0, VOCAB_SIZE, (1, 9))
    wanted = model(tokens, use_cache=False).logits
    merge_linears(model)
    assert torch.allclose(model(tokens, use_cache=False).logits, wanted, atol=1e-5)


@torch.no_grad()
def test_llama_merges_both_groups_of_each_layer() -> None:
    assert merge_linears(tiny_model("llama", "eager")) == 4

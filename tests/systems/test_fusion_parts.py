"""Parts of a fused model that change later act as they do in the given model."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fusion_models import WIDTH, encoder_layer, llama_block, saved_bytes
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.nn.utils import parametrizations, prune

from flash_cute.attention.fusion import (
    FusionConfig,
    UnifiedAttentionFusion,
    create_unified_attention_fusion,
)
from flash_cute.attention.fusion.parts import FusedBlock
from flash_cute.precision import convert_model_to_fp8

HERE = Path(__file__).resolve().parent
MODELS = {
    "layer": lambda: encoder_layer(batch_first=True),
    "norm_first": lambda: encoder_layer(batch_first=True, norm_first=True, activation=nn.GELU()),
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(batch_first=True), 2),
    "llama": lambda: nn.Sequential(llama_block(bias=True), llama_block()),
}


@cache
def fused_once(kind: str) -> tuple[nn.Module, UnifiedAttentionFusion]:
    given = MODELS[kind]()
    return given, create_unified_attention_fusion(given)


def pair(kind: str) -> tuple[nn.Module, UnifiedAttentionFusion]:
    """A model and its fused form, whose parameters are apart."""
    given, fused = fused_once(kind)
    return copy.deepcopy(given), copy.deepcopy(fused)


def inputs() -> torch.Tensor:
    return torch.randn(2, 9, WIDTH)


def linears(model: nn.Module) -> list[str]:
    """Names of the linear layers that the given model calls."""
    names = [name for name, part in model.named_modules() if type(part) is nn.Linear]
    return [name for name in names if not name.endswith("out_proj")]


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


def replaced(model: nn.Module, name: str) -> None:
    old = model.get_submodule(name)
    new = Doubled(old.in_features, old.out_features, old.bias is not None)
    new.load_state_dict(old.state_dict())
    model.set_submodule(name, new)


def own_forward(model: nn.Module, name: str) -> None:
    part = model.get_submodule(name)
    part.forward = lambda x: F.linear(x, 3 * part.weight, part.bias)


CHANGES = {
    "replaced": replaced,
    "own_forward": own_forward,
    "hook": lambda model, name: model.get_submodule(name).register_forward_hook(
        lambda module, args, out: out.roll(1, 1)
    ),
    "pre_hook": lambda model, name: model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: (args[0].roll(1, 1),)
    ),
    "weight_norm": lambda model, name: parametrizations.weight_norm(model.get_submodule(name)),
    "old_weight_norm": lambda model, name: nn.utils.weight_norm(model.get_submodule(name)),
    "pruned": lambda model, name: prune.l1_unstructured(model.get_submodule(name), "weight", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_changed_linear_layers_act(kind, change):
    given, x = fused_once(kind)[0], inputs()
    for name in linears(given):
        model, fused = pair(kind)
        for one in (model, fused):
            CHANGES[change](one, name)
        wanted, got = model(x), fused(x)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: n + m)
        got.square().sum().backward()
        assert "weight" in change or bool((wanted - given(x)).abs().max() > 1e-3)


@pytest.mark.parametrize("of", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("kind", MODELS)
def test_hooks_run_as_the_given_model_s_do(kind, of):
    """Of all parts at once, and of each alone."""
    called = []
    for model in pair(kind):
        found: set[str] = set()
        for name, part in model.named_modules():
            hook = lambda *_, name=name, found=found: found.add(name)  # noqa: E731
            getattr(part, f"register_{of}_hook")(hook)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(inputs().requires_grad_()).sum().backward()
        called.append(found)
    assert called[0] <= called[1]
    for name in called[0]:
        (_, model), count = pair(kind), []
        hook = lambda *_, count=count: count.append(1)  # noqa: E731
        getattr(model.get_submodule(name), f"register_{of}_hook")(hook)
        model(inputs().requires_grad_()).sum().backward()
        assert count, name


@pytest.mark.parametrize("kind", MODELS)
def test_hooks_of_all_modules_run(kind):
    (_, fused), called = pair(kind), set()
    register = nn.modules.module.register_module_forward_hook
    with register(lambda module, *_: called.add(module)):
        fused(inputs())
    assert all(fused.get_submodule(name) in called for name in linears(fused))


@pytest.mark.parametrize("target", ["q_proj", "o_proj", "gate_proj", "down_proj", "linear1"])
def test_adapters_act_and_learn(target):
    peft = pytest.importorskip("peft")
    kind = "encoder" if target == "linear1" else "llama"
    (_, fused), x = pair(kind), inputs()
    before = fused(x)
    options = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
    adapted = peft.get_peft_model(fused, options)
    out = adapted(x)
    assert not torch.allclose(out, before, atol=1e-3)
    out.square().sum().backward()
    learned = [p for name, p in adapted.named_parameters() if "lora" in name]
    assert learned and all(p.grad is not None and bool(p.grad.any()) for p in learned)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["encoder", "llama"])
def test_fp8_layers_run(kind):
    (given, fused), x = pair(kind), inputs()
    before, fused = fused(x), convert_model_to_fp8(fused)
    converted = [part for part in fused.modules() if "FP8" in type(part).__name__]
    called = set()
    for part in converted:
        part.register_forward_hook(lambda module, *_: called.add(module))
    out = fused(x)
    assert len(called) == {"encoder": 6, "llama": 14}[kind] + 2 * (kind == "encoder")
    wanted = convert_model_to_fp8(given)(x)
    worst = float((out - wanted).detach().abs().max() / wanted.detach().abs().max())
    assert worst < 1e-2 and not torch.allclose(out, before, rtol=1e-4, atol=1e-4)


WRAPPED = {
    "encoder": nn.TransformerEncoderLayer,
    "llama": type(llama_block()),
    "attention": type(llama_block().self_attn),
    "mlp": type(llama_block().mlp),
}


@pytest.mark.parametrize("what", WRAPPED)
def test_checkpoint_wrappers_save_less(what):
    _, fused = pair("encoder" if what == "encoder" else "llama")
    x = torch.randn(2, 128, WIDTH)
    before, wanted = saved_bytes(lambda: fused(x), fused), fused(x)
    checkpoints.apply_activation_checkpointing(
        fused, check_fn=lambda part: isinstance(part, WRAPPED[what])
    )
    out = fused(x)
    torch.testing.assert_close(out, wanted)
    assert saved_bytes(lambda: fused(x), fused) < {"encoder": 0.2, "llama": 0.2}.get(what, 0.8) * (
        before
    )
    out.square().sum().backward()
    assert all(p.grad is not None for p in fused.parameters())


def test_dropouts_norms_and_activations_that_change():
    given, x = fused_once("norm_first")[0], inputs()
    for name in ("norm1", "norm2", "dropout", "dropout1", "dropout2", "activation"):
        model, fused = pair("norm_first")
        for one in (model, fused):
            one.set_submodule(name, nn.Sequential(one.get_submodule(name), nn.Hardtanh(-0.1, 0.1)))
        wanted = model(x)
        torch.testing.assert_close(fused(x), wanted, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(wanted, given(x), atol=1e-2)


def test_a_changed_attribute_of_attention_acts():
    """What was recognised is no longer: its own forward runs, whatever it makes of it."""
    (given, fused), x = pair("llama"), inputs()
    assert fused.model[0].frozen() is not None
    for one in (given, fused.model):
        one[0].self_attn.head_dim = 16
    assert fused.model[0].frozen() is None
    torch.testing.assert_close(fused(x), given(x), rtol=1e-4, atol=1e-4)


SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from fusion_models import WIDTH, encoder_layer, llama_block
from flash_cute.attention.fusion import create_unified_attention_fusion

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
encoder = nn.TransformerEncoder(encoder_layer(batch_first=True), 2)
for given, kinds in (
    (encoder, nn.TransformerEncoderLayer),
    (encoder, (nn.Linear, nn.LayerNorm)),
    (nn.Sequential(llama_block(), llama_block()), type(llama_block())),
    (nn.Sequential(llama_block()), nn.Linear),
):
    x, fused = torch.randn(2, 9, WIDTH), create_unified_attention_fusion(given)
    parts = [part for part in (fused.model, *fused.modules()) if isinstance(part, kinds)]
    wanted = given(x)
    for part in parts:
        fully_shard(part, mesh=mesh)
    fully_shard(fused, mesh=mesh)
    out = fused(x)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for (name, p), q in zip(fused.named_parameters(), given.parameters(), strict=True):
        grad = p.grad.full_tensor()
        torch.testing.assert_close(grad, q.grad, rtol=1e-3, atol=1e-3 * float(q.grad.abs().max()))
    given.zero_grad()
dist.destroy_process_group()
"""


def test_sharded_layers_and_parts():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]


# --- names, copies, several names of one part ----------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_one_name_for_each_parameter(kind):
    given, fused = fused_once(kind)
    names = [name for name, _ in given.named_parameters()]
    assert names == [name for name, _ in fused.named_parameters()] == list(fused.state_dict())
    assert all(fused.get_parameter(name) is given.get_parameter(name) for name in names)
    outer = nn.Sequential(fused)
    assert [f"0.{name}" for name in names] == [name for name, _ in outer.named_parameters()]
    given.load_state_dict(fused.state_dict())
    fused.load_state_dict(given.state_dict())


@pytest.mark.parametrize("kind", [*MODELS, "transformers"])
def test_distributed_state_dicts(kind):
    """Also of a model that has a submodule called "model"."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    x = inputs()
    if kind == "transformers":
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=50,
        )  # fmt: skip
        given, x = transformers.LlamaForCausalLM(config), torch.randint(50, (2, 5))
        fused = create_unified_attention_fusion(given)
        fused(x, use_cache=False).logits.sum().backward()
    else:
        given, fused = pair(kind)
        fused(x).sum().backward()
    optimizer = torch.optim.AdamW(fused.parameters())
    optimizer.step()
    weights, state = get_state_dict(fused, optimizer)
    assert set(weights) == set(given.state_dict())
    assert set(state["state"]) == {name for name, _ in given.named_parameters()}
    set_state_dict(fused, optimizer, model_state_dict=weights, optim_state_dict=state)


@pytest.mark.parametrize("kind", MODELS)
def test_copies_and_pickles_stay_fused(kind):
    (given, fused), x, buffer = fused_once(kind), inputs(), io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for one in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), loaded):
        blocks = [part for part in (one.model, *one.modules()) if isinstance(part, FusedBlock)]
        assert blocks and all(block.frozen() is not None for block in blocks)
        assert torch.equal(one(x), fused(x))
        assert not {id(p) for p in one.parameters()} & {id(p) for p in given.parameters()}


@pytest.mark.parametrize("kind", MODELS)
def test_replicas_of_data_parallel_have_members_of_their_own(kind):
    """As nn.DataParallel makes them: of no parameters, which it sets then."""
    _, fused = pair(kind)
    x, replica = inputs(), fused._replicate_for_data_parallel()
    for name, child in fused.named_children():
        replica.add_module(name, copy.deepcopy(child).double())
    assert replica.model is not fused.model
    assert replica(x.double()).dtype == torch.float64 and fused(x).dtype == torch.float32


def test_a_part_of_several_names():
    layer, last = encoder_layer(batch_first=True, dropout=0.1), nn.Linear(WIDTH, WIDTH)
    layer.dropout1 = layer.dropout2
    given = nn.Sequential(layer, nn.Sequential(layer, last), last)
    encoder = nn.TransformerEncoder(layer, 3)
    encoder.layers[2] = encoder.layers[0]
    for model in (given, encoder):
        fused, x = create_unified_attention_fusion(model), inputs()
        fused.eval()
        assert all(part.training for part in model.modules())
        assert not any(part.training for part in fused.modules())
        model.eval()
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-3)
    inside = create_unified_attention_fusion(given).model
    assert inside[0] is inside[1][0] and inside[2] is inside[1][1] and inside[2] is not last


def test_layers_that_differ():
    """Masks are each layer's own, not the first one's."""
    encoder = nn.TransformerEncoder(encoder_layer(batch_first=True), 3)
    encoder.layers[1] = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.0, batch_first=True)
    fused, x, mask = create_unified_attention_fusion(encoder), inputs(), torch.randn(9, 9)
    torch.testing.assert_close(fused(x, mask), encoder(x, mask), rtol=1e-4, atol=1e-3)


def test_what_a_layer_has_besides_stays():
    layer = encoder_layer(batch_first=True)
    layer.register_buffer("steps", torch.zeros(3))
    layer.extra = nn.Parameter(torch.ones(2))
    fused = create_unified_attention_fusion(layer)
    assert list(fused.state_dict()) == list(layer.state_dict()) and fused.steps is layer.steps


def test_numbers_in_tuples_are_cast_too():
    config = FusionConfig(enable_mixed_precision=False)
    fused = UnifiedAttentionFusion(llama_block(), config)
    position = tuple(torch.randn(1, 9, 8).double() for _ in "cs")
    out = fused(inputs().double(), position_embeddings=position)
    assert out.dtype == torch.float32

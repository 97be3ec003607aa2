"""flash_cute.core against torch's layers: parameters, values, gradients, and saved tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute.core import AttentionLayer, FusedGELU, OptimizedLinear

LEVELS = ["conservative", "balanced", "aggressive"]


class Ops(TorchDispatchMode):
    """Names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Bytes of each storage that is kept for backward."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield storages


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is not x.KEYWORD_ONLY}


def test_parameters_and_defaults():
    empty = inspect.Parameter.empty
    assert defaults(AttentionLayer) == {
        "d_model": empty, "num_heads": empty, "dropout": 0.1, "bias": True
    }  # fmt: skip
    assert defaults(OptimizedLinear) == {
        "in_features": empty, "out_features": empty, "bias": True,
        "optimization_level": "balanced",
    }  # fmt: skip
    assert defaults(FusedGELU) == {"approximate": "none"}


# --- AttentionLayer ------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_is_multihead_attention(device, bias):
    torch.manual_seed(0)
    other = nn.MultiheadAttention(48, 4, bias=bias, batch_first=True, device=device)
    torch.manual_seed(0)
    layer = AttentionLayer(48, 4, bias=bias, device=device)
    assert list(layer.state_dict()) == list(other.state_dict())
    for name, x in other.state_dict().items():
        assert torch.equal(layer.state_dict()[name], x), name
    with torch.no_grad():
        for x in other.parameters():
            x.copy_(torch.randn_like(x) / 4)
    layer.load_state_dict(other.state_dict())
    other.load_state_dict(layer.state_dict())
    layer.eval()
    x, memory = torch.randn(3, 20, 48, device=device), torch.randn(3, 9, 48, device=device)
    keep = torch.rand(3, 20, device=device) < 0.5
    keep[:, 3] = True
    expected = other(x, x, x, key_padding_mask=~keep)[0]
    torch.testing.assert_close(layer(x), other(x, x, x)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x, keep)[keep], expected[keep], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        layer(x, key=memory), other(x, memory, memory)[0], rtol=1e-4, atol=1e-5
    )


def test_drops_in_training_alone(device):
    layer = AttentionLayer(64, 4, dropout=0.5, device=device)
    x = torch.randn(2, 50, 64, device=device)
    first, second = layer(x), layer(x)
    assert not torch.allclose(first, second)
    torch.manual_seed(1)
    drawn = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), drawn)
    layer.eval()
    expected = layer(x)
    assert torch.equal(layer(x), expected)
    layer.train()
    mean = torch.stack([layer(x) for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.25 * expected.abs().max().item())
    all_dropped = AttentionLayer(64, 4, dropout=1.0, device=device)
    nn.init.normal_(all_dropped.out_proj.bias)
    torch.testing.assert_close(all_dropped(x), all_dropped.out_proj.bias.expand_as(x))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((64, 7), ValueError, "d_model is 64 and num_heads 7"),
        ((64, 0), ValueError, "num_heads is 0"),
        (("64", 8), TypeError, "d_model is str"),
        ((64, 8, -0.1), ValueError, "dropout is -0.1"),
        ((64, 8, True), TypeError, "dropout is bool"),
    ],
)
def test_refuses_sizes(arguments, error, said):
    with pytest.raises(error, match=said):
        AttentionLayer(*arguments)


# --- OptimizedLinear -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_layers_of_no_width_are_those_of_torch(device, level, sizes):
    layer = OptimizedLinear(*sizes, optimization_level=level, device=device)
    x = torch.randn(2, 3, sizes[0], device=device)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
    "vector": lambda x: x[0, 0],
    "empty": lambda x: x[:, :0],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("level", LEVELS)
def test_linear(device, level, view, bias):
    torch.manual_seed(0)
    expected = nn.Linear(24, 40, bias, device=device)
    torch.manual_seed(0)
    layer = OptimizedLinear(24, 40, bias, level, device=device)
    assert list(layer.state_dict()) == list(expected.state_dict())
    assert all(
        torch.equal(x, y) for x, y in zip(layer.parameters(), expected.parameters(), strict=True)
    )
    x = VIEWS[view](torch.randn(3, 5, 24, device=device))
    x1, x2 = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
    out, right = layer(x1), expected(x2)
    out.backward(right.detach().cos())
    right.backward(right.detach().cos())
    bound = {"rtol": 2**-6, "atol": 0.05} if level == "aggressive" else {"rtol": 1e-5, "atol": 1e-5}
    pairs = [(out, right), (x1.grad, x2.grad)]
    pairs += [
        (y.grad, z.grad) for y, z in zip(layer.parameters(), expected.parameters(), strict=True)
    ]
    for y, z in pairs:
        assert y.dtype == torch.float32 and y.shape == z.shape
        torch.testing.assert_close(y, z, **bound)
    if level == "conservative":
        assert torch.equal(out, right)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded"])
def test_balanced_makes_one_gemm_of_all_rows(view, frozen):
    x = VIEWS[view](torch.randn(8, 5, 24))
    counts = {}
    for level in ("conservative", "balanced"):
        layer = OptimizedLinear(24, 40, optimization_level=level).requires_grad_(not frozen)
        with Ops() as forward:
            layer(x)
        counts[level] = [name for name in forward.names if name in ("addmm", "mm", "bmm", "add")]
    assert counts["balanced"] == ["addmm"]
    product = "bmm" if frozen and view != "sliced" else "mm"
    assert counts["conservative"] == [product, "add"]


def test_aggressive_multiplies_in_bf16(device):
    layer = OptimizedLinear(256, 64, optimization_level="aggressive", device=device)
    x = torch.randn(100, 256, device=device, requires_grad=True)
    with saved_bytes() as saved:
        out = layer(x)
    assert max(saved.values()) <= x.nbytes // 2 and out.dtype == torch.float32
    operands = [y.detach().bfloat16().double() for y in (x, layer.weight, layer.bias)]
    exact = F.linear(*operands)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-4)
    assert not torch.allclose(out, F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-6)
    for dtype in (torch.float16, torch.bfloat16):
        low, y = layer.to(dtype), x.detach().to(dtype)
        assert torch.equal(low(y), F.linear(y, low.weight, low.bias))


@pytest.mark.parametrize("level", LEVELS)
def test_linear_under_autocast_and_compile(device, level):
    layer = OptimizedLinear(24, 40, optimization_level=level, device=device)
    x = torch.randn(3, 5, 24, device=device)
    with torch.autocast(device, dtype=torch.float16):
        out = layer(x)
        assert out.dtype == torch.float16
        torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))
    assert f"optimization_level='{level}'" in repr(layer)


@pytest.mark.parametrize("name", ["in_features", "out_features"])
@pytest.mark.parametrize(
    ("size", "error"), [(True, TypeError), (1.5, TypeError), ("8", TypeError), (-1, ValueError)]
)
def test_sizes_of_a_linear_layer_are_looked_at(name, size, error):
    sizes = {"in_features": 3, "out_features": 4} | {name: size}
    with pytest.raises(error, match=f"{name} is .*expected an int >= 0"):
        OptimizedLinear(**sizes)
    with pytest.raises(TypeError, match="bias is str; expected a bool"):
        OptimizedLinear(3, 4, bias="no")


def test_linear_refuses_levels_and_widths():
    with pytest.raises(ValueError, match="'fast'; expected one of conservative, balanced, aggres"):
        OptimizedLinear(3, 4, optimization_level="fast")
    for level in LEVELS:
        with pytest.raises(RuntimeError, match="shape"):
            OptimizedLinear(3, 4, optimization_level=level)(torch.ones(2, 6))


# --- FusedGELU -----------------------------------------------------------------------------------


def written_out(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(device, approximate):
    layer = FusedGELU(approximate)
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64, device=device).requires_grad_()
    expected = written_out(x, approximate)
    torch.testing.assert_close(layer(x), expected)
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])
    few = x.detach()[::50].requires_grad_()
    assert torch.autograd.gradcheck(layer, few) and torch.autograd.gradgradcheck(layer, few)
    for dtype in (torch.float16, torch.bfloat16):
        out = layer(x.detach().to(dtype))
        exact = written_out(x.detach().to(dtype).double(), approximate)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_its_input_alone(device, approximate):
    x = torch.randn(1000, device=device, requires_grad=True)
    with saved_bytes() as saved, Ops() as forward:
        out = FusedGELU(approximate)(x)
    assert list(saved.values()) == [x.nbytes]
    with saved_bytes() as unfused:
        written_out(x, approximate)
    assert sum(unfused.values()) > sum(saved.values())
    with Ops() as backward:
        out.backward(torch.ones_like(out))
    assert forward.names == ["gelu"]
    assert [name for name in backward.names if name not in ("ones_like", "detach")] == [
        "gelu_backward"
    ]


def test_gelu_is_one_kernel_each_way(cuda):
    layer, x = FusedGELU(), torch.randn(4096, device=cuda, requires_grad=True)
    dout = torch.ones_like(x)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for call, count in ((lambda: layer(x), 1), (lambda: layer(x).backward(dout), 2)):
        call()
        x.grad = None
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if "CUDA" in str(e.device_type)]
        assert len([e for e in kernels if "elementwise" in e.name]) == count


def test_gelu_compiles_and_refuses(device):
    x = torch.randn(10, device=device)
    compiled = torch.compile(FusedGELU(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), F.gelu(x))
    with pytest.raises(ValueError, match="approximate is 'erf'; expected 'none' or 'tanh'"):
        FusedGELU("erf")

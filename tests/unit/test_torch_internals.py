"""What must hold of torch's symbols that are not public: they live in one file of flash_cute.

Those that graphs need are in tests/unit/test_torch_internals_graphs.py.
"""

from __future__ import annotations

import ast
import copy
import importlib
import os
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import fresh
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import _torch_internals as internals

PACKAGE = Path(flash_cute.__file__).parent
HOME = PACKAGE / "_torch_internals.py"
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # public, as Python documents them
# Other libraries' symbols that are not public, each library's in one file.
OTHERS = {
    PACKAGE / "integrations" / "transformers" / "registry.py",
    PACKAGE / "integrations" / "vllm" / "backend.py",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(node: ast.AST) -> list[str]:
    """What an attribute or an import names, from torch's root on if it begins there."""
    if isinstance(node, ast.Attribute):
        return [ast.unparse(node)] if ast.unparse(node).startswith("torch.") else [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def own_names() -> set[str]:
    """Private names that flash_cute defines itself."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def test_private_symbols_live_in_one_file():
    """Elsewhere a private name is flash_cute's own, or an object's that it made."""
    known, found = own_names() | {HOME.stem} | OF_NAMED_TUPLES, []
    for path in PACKAGE.rglob("*.py"):
        for node in [] if path == HOME else ast.walk(ast.parse(path.read_text())):
            for name in names_in(node):
                parts = set(filter(private, name.split(".")))
                if path in OTHERS and not name.startswith("torch."):
                    continue
                if parts if name.startswith("torch.") else parts - known:
                    found.append(f"{path.name}:{node.lineno}: {name}")
    assert not found, found


def test_kernel_of():
    """It stays the one that was registered, when another one is."""
    kernel = internals.kernel_of("aten::trunc", "CPU")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("trunc", lambda x: x + 7, "CPU", allow_override=True)
    x = torch.tensor([1.5])
    assert torch.ops.aten.trunc(x).item() == 8.5 and kernel(x).item() == 1
    del library
    assert torch.ops.aten.trunc(x).item() == 1


def test_has_kernel():
    """Of those that are registered, in Python too, until they are taken back."""
    assert internals.has_kernel("aten::trunc", "CPU")
    library = torch.library.Library("flash_cute_test", "FRAGMENT")
    library.define("nothing(Tensor x) -> Tensor")
    assert not internals.has_kernel("flash_cute_test::nothing", "CPU")
    library.impl("nothing", lambda x: x, "CPU")
    assert internals.has_kernel("flash_cute_test::nothing", "CPU")
    assert not internals.has_kernel("flash_cute_test::nothing", "CUDA")


def test_the_order_of_sdpa_s_backends():
    """Is a list of all of them, which can be set; CUDA's own is settled by asking once."""
    internals.settle_sdp_order()
    order = internals.sdp_order()
    assert {SDPBackend(x) for x in order} == {
        x for x in SDPBackend.__members__.values() if int(x) >= 0
    }
    try:
        internals.set_sdp_order(order[::-1])
        internals.settle_sdp_order()
        assert internals.sdp_order() == order[::-1]
    finally:
        internals.set_sdp_order(order)


def test_when_cuda_starts():
    """At once if there is no GPU to wait for, or if it has started."""
    called = []
    if torch.cuda.is_available():
        torch.cuda.init()
    internals.when_cuda_starts(lambda: called.append(1))
    assert called == [1]


def test_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with internals.below_autograd():
        assert not (x * x).requires_grad
    assert (x * x).requires_grad


def test_without_autograd():
    @internals.without_autograd
    def double(x, *, times=2):
        return x * times

    x = torch.ones(2, requires_grad=True)
    assert not double(x, times=3).requires_grad and double.__name__ == "double"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flash_attention_on_the_cpu(dtype, causal):
    """Log-sum-exps are natural and not rounded, results are laid out as (batch, seqlen, heads, dim)
    and a causal mask begins at the first key."""
    q, k, v, dout = torch.randn(4, 2, 600, 3, 20, dtype=dtype).transpose(2, 3).unbind()
    with torch.no_grad():
        out, lse = internals.flash_forward_on_cpu(q, k, v, 0.0, causal, scale=0.3)
        args = (dout, q, k, v, out, lse.contiguous(), 0.0, causal)
        gradients = internals.flash_backward_on_cpu(*args, scale=0.3)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(600, 600).triu(1).bool(), -torch.inf)
    exact = scores.softmax(-1) @ leaves[2]
    expected = torch.autograd.grad(exact, leaves, dout.double())
    close = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 0, "atol": 1e-12}
    assert lse.dtype == dtype
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)
    for x, y in zip((out, *gradients), (exact, *expected), strict=True):
        assert x.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(x.double(), y.detach(), **close)


def test_has_bf16_products():
    """It is what the processor says, where there is a list of what it has."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or "avx512" not in flags.read_text():
        assert not internals.has_bf16_products()
    else:
        assert internals.has_bf16_products() == ("avx512_bf16" in flags.read_text())


def test_below_versions():
    x = torch.ones(2)
    with internals.below_versions():
        x.add_(1)
    assert x._version == 0
    x.add_(1)
    assert x._version == 1


def test_arguments_and_results():
    op = torch.ops.flash_cute.fwd_kvcache.default
    arguments = internals.arguments(op)
    assert [x.name for x in arguments][:2] == ["q", "k_cache"]
    assert {x.name: x.default_value for x in arguments}["window_size_left"] == -1
    assert [x.alias_info is not None and x.alias_info.is_write for x in arguments][:2] == [0, 1]
    assert internals.results(op) == ["out", "softmax_lse"]


def test_transforms_are_seen():
    seen = []

    def look(x):
        seen.append(
            (internals.in_forward_mode(), internals.in_transform(), internals.transformed())
        )
        return x.sum()

    x = torch.ones(2)
    look(x)
    with forward_ad.dual_level():
        look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    none, forward, transform = (False, False, False), (True, False, True), (False, True, True)
    assert seen == [none, forward, transform, transform]


def test_with_derivatives():
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), internals.with_derivatives():
        assert torch.is_grad_enabled()
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
            assert forward_ad.unpack_dual(x * x).tangent.tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_parts_of_sparse_tensors_share_their_memory():
    x = torch.eye(6)
    assert internals.parts_of(x) == (x,)
    for layout in ("coo", "csr", "csc", "bsr", "bsc"):
        blocks = {"blocksize": (2, 2)} if layout.startswith("b") else {}
        sparse = x.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **blocks)
        parts = internals.parts_of(sparse)
        assert len(parts) == (2 if layout == "coo" else 3)
        assert all(part.layout is torch.strided for part in parts)
        parts[-1].mul_(3)
        assert torch.equal(sparse.to_dense(), 3 * x)


class Cube(internals.Formula):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with internals.below_autograd():
            if not internals.in_transform():
                return torch.ops.flash_cute_test.cube(x)
            with internals.with_derivatives():
                return torch.ops.flash_cute_test.cube(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


@pytest.fixture
def cube():
    """An op whose kernel of autograd applies a formula, as those of flash_cute do."""
    library = torch.library.Library("flash_cute_test", "DEF")
    library.define("cube(Tensor x) -> Tensor")
    library.impl("cube", lambda x: x**3, "CPU")
    library.impl("cube", lambda x: internals.apply_formula(Cube, (x,)), "Autograd")
    yield torch.ops.flash_cute_test.cube.default
    library._destroy()


def test_apply_formula(cube):
    """Outside of transforms, inside of them, and through several levels."""
    x = torch.tensor(2.0, requires_grad=True)
    (once,) = torch.autograd.grad(cube(x), x, create_graph=True)
    assert (once, *torch.autograd.grad(once, x)) == (12, 12)
    grad = torch.func.grad
    assert (grad(cube)(x), grad(grad(cube))(x), grad(grad(grad(cube)))(x)) == (12, 12, 6)
    out, pullback = torch.func.vjp(cube, x)
    assert (out, *pullback(torch.tensor(1.0)), *torch.autograd.grad(out, x)) == (8, 12, 12)


def test_fake_tensors_are_recognised():
    with FakeTensorMode():
        assert internals.is_fake(torch.ones(2))
        seen = []
        torch.func.vmap(lambda x: seen.append(internals.is_fake(x)) or x)(torch.ones(2))
        assert seen == [True]
    assert not internals.is_fake(torch.ones(2))
    traced = torch.compile(
        lambda x: x + 1 if internals.is_fake(x) else x, backend="eager", fullgraph=True
    )
    assert torch.equal(traced(torch.ones(2)), torch.ones(2))


def test_fake_tensors_have_no_memory():
    real = torch.ones(2**10)
    with internals.fake_tensors():
        huge = torch.empty(2**50)
        assert (huge + 1).shape == huge.shape
        assert internals.is_fake(real * 2)  # real tensors are taken as fakes
        for by_values in (lambda: huge.sum().item(), lambda: huge.nonzero()):
            with pytest.raises(internals.NEEDS_VALUES):
                by_values()
    assert not internals.is_fake(real * 2)
    assert (huge * huge).untyped_storage().nbytes() == 2**52  # fakes stay fakes outside


def test_dispatch_mode_sees_every_op_and_backward_s():
    seen = []

    class Names(internals.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Names():
        (x.sin() * 2).sum().backward()
    x.cos()
    assert {"aten.sin.default", "aten.mul.Tensor", "aten.cos.default"} <= set(seen)
    assert seen.count("aten.cos.default") == 1


def test_memory_events_are_those_of_the_allocator():
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profiled:
        kept = torch.ones(1000)
        address = torch.ones(3000).data_ptr()
    events = internals.memory_events(profiled)
    assert events == [(kept.data_ptr(), 4000), (address, 12000), (address, -12000)]


def test_plain_torch_function_makes_a_class_of_tensors_whose_results_are_plain():
    class Named(torch.Tensor):
        __torch_function__ = internals.plain_torch_function

    x = torch.ones(2, 2).as_subclass(Named)
    assert type(x) is Named and type(x @ x) is type(x.t()) is torch.Tensor
    assert not torch.overrides.has_torch_function((x,))


def test_hooks_on_gradients_are_copied():
    layer = torch.nn.Linear(2, 2)
    layer.weight.register_hook(lambda grad: 3 * grad)
    made = copy.deepcopy(layer)
    internals.copy_gradient_hooks(layer, made)
    x = torch.ones(1, 2)
    (weight, bias) = torch.autograd.grad(made(x).sum(), [made.weight, made.bias])
    assert torch.equal(weight, torch.full((2, 2), 3.0)) and torch.equal(bias, torch.ones(2))


def test_samples_of_several_gradients():
    """They come off and on; a level that is not there has none."""
    x, seen = torch.randn(3, 4), []

    def outer(y):
        plain, dim = internals.without_samples(y, 1)
        seen.append((internals.is_of_several_gradients(y), dim))
        assert internals.without_samples(y, 2)[1] is None
        assert torch.equal(plain, x) and not internals.is_of_several_gradients(plain)
        return internals.with_samples(plain + 1, 0, 1)

    several = torch._vmap_internals._vmap
    assert torch.equal(several(outer)(x), x + 1)
    assert seen == [(True, 0)]
    assert internals.without_samples(x, 1) == (x, None)
    assert not internals.is_of_several_gradients(x)


def test_below_a_dispatch_key():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with internals.below("AutocastCPU"):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_plain_tensors_are_recognised():
    x = torch.ones(2)
    assert internals.are_plain([x, None, torch.nn.Parameter(x)])
    assert not internals.are_plain([x, TwoTensor(x, x)])
    assert not internals.are_plain([FakeTensorMode().from_tensor(x)])
    seen = []

    def look(x):
        seen.append(internals.are_plain([x]))
        return x.sum()

    with FlopCounterMode(display=False):
        look(x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        look(x)
    with forward_ad.dual_level():
        look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    torch._vmap_internals._vmap(look)(x[None])  # of autograd's is_grads_batched
    assert seen == [False] * 6
    traced = torch.compile(
        lambda x: x + 1 if internals.are_plain([x]) else x, backend="eager", fullgraph=True
    )
    assert torch.equal(traced(x), x)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtypes", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")])
def test_scaled_mm(device, dtypes, out_dtype):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 tensor cores")
    a, b = (
        torch.randint(-4, 5, (n, 32), device=device).to(getattr(torch, f"float8_{dtype}"))
        for n, dtype in zip((17, 16), dtypes, strict=True)
    )
    scales = torch.tensor(0.5, device=device), torch.tensor(4.0, device=device)
    out = internals.scaled_mm(a, b.t(), *scales, out_dtype, False)
    assert out.dtype == out_dtype
    assert torch.equal(out.double(), a.double() @ b.double().t() * 2)


def test_copies_of_modules_share_parameters_alone():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    copy = internals.copy_of(module)
    assert all(p is q for p, q in zip(module.parameters(), copy.parameters(), strict=True))
    copy[0] = torch.nn.Identity()
    copy.eval()
    copy.register_forward_hook(lambda *_: None)
    assert isinstance(module[0], torch.nn.Linear) and module.training
    assert internals.has_hooks(copy) and not internals.has_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert internals.has_hooks(module)


def test_hooks_of_any_kind():
    registers = [name for name in dir(torch.nn.Module) if name.startswith("register_")]
    hooks = [name for name in registers if "hook" in name and "module_full" not in name]
    assert len(hooks) >= 8
    for name in hooks:
        module = torch.nn.Linear(2, 2)
        assert not internals.has_hooks_of_any_kind(module)
        getattr(module, name)(lambda *_: None)
        assert internals.has_hooks_of_any_kind(module), name


def test_copies_of_modules_are_called_in_their_own_place():
    """Bound methods are the copy's; what was compiled, which calls the module, it lacks."""
    module = torch.nn.Linear(2, 2)
    module.forward = module.forward
    module.compile(backend="eager")
    copy = internals.copy_of(module)
    assert copy.forward.__self__ is copy and copy._compiled_call_impl is None
    assert module.forward.__self__ is module and module._compiled_call_impl is not None


def test_global_module_hooks_are_found():
    register = torch.nn.modules.module.register_module_forward_hook
    assert not internals.has_global_hooks()
    with register(lambda *_: None):
        assert internals.has_global_hooks()
    assert not internals.has_global_hooks()


def test_shared_members_are_registered_on_both():
    linear = torch.nn.Linear(2, 2)
    module = torch.nn.Sequential(linear, linear, torch.nn.ReLU())
    assert list(internals.children(module).values()) == [linear, linear, module[2]]
    module.register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    module.register_buffer("steps", torch.zeros(1), persistent=False)
    module.register_state_dict_post_hook(lambda _, state, *__: state.update(more=torch.ones(1)))
    other = torch.nn.Module()
    internals.share_members(other, module)
    other.added = torch.nn.Tanh()
    assert module.added is other.added and other.scale is module.scale
    assert list(other.state_dict()) == list(module.state_dict())
    assert "steps" not in other.state_dict() and "more" in other.state_dict()


def test_versions_count_writes():
    x = torch.zeros(3)
    before = internals.version(x)
    x[1:].add_(1)
    assert internals.version(x) == before + 1


def test_backward_passes_are_recognised():
    found = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.append(internals.in_backward())
            return grad

    Identity.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert found == [True] and not internals.in_backward()


def test_what_a_fused_block_would_skip():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert internals.skipped_if_fused(model) is None
    handle = model[0].register_forward_hook(lambda *_: None)
    assert internals.skipped_if_fused(model) == "hooks of 0 would not be called"
    handle.remove()
    model.forward = model.forward
    expected = "the block itself has a forward that is not its class's"
    assert internals.skipped_if_fused(model) == expected


def test_linear_relu_is_both():
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    expected = torch.nn.functional.linear(x, weight, bias).relu()
    torch.testing.assert_close(internals.linear_relu(x, weight, bias), expected)


def test_context_parallel_is_torch_s_wrapper_around_sdpa(monkeypatch):
    """tests/distributed/test_interfaces.py enters the context; this is the sign that it is told by,
    which other wrappers do not have."""
    assert not internals.in_context_parallel()
    name = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, name, lambda *args: None)
    assert not internals.in_context_parallel()
    attention = importlib.import_module("torch.distributed.tensor.experimental._attention")
    monkeypatch.setattr(torch.nn.functional, name, attention.context_parallel.__wrapped__)
    assert internals.in_context_parallel()


SETTLED = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Log(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in ("exp", "log", "tanh"):
            print(op.overloadpacket.__name__, out.dtype, out.numel(), out.device)
        return out

with Log():
    import flash_cute
"""


def test_vector_math_is_settled_by_one_thread():
    """When flash_cute is imported: in one call of one number each."""
    result = fresh.run(SETTLED)
    assert result.returncode == 0, result.stderr
    dtypes = ("torch.float32", "torch.float64")
    expected = {f"{name} {x} 1 cpu" for name in internals.VECTOR_MATH for x in dtypes}
    assert set(result.stdout.splitlines()) == expected


def test_cpu_kernels_call_no_other_vector_math():
    """ATen's functions that may go to MKL's vector math."""
    names = "a?(?:cos|sin|tan)h?|erf(?:c|inv)?|exp[2m1]*|log(?:10|1p|2)?|r?sqrt|lgamma|ceil|floor"
    files = [
        *(PACKAGE / "cpu").glob("*.py"),
        *(PACKAGE / "tiled").glob("*.py"),
        *(PACKAGE / "reference").glob("*.py"),
    ]
    called = {
        name
        for file in files
        for name in re.findall(rf"(?<!math)\.({names})_?\(", file.read_text())
    }
    assert called == set(internals.VECTOR_MATH)


def test_products_of_bf16_are_left_to_aten_s_own_choice():
    """A process that is kept from AVX-512 computes bf16 too."""
    call = (
        "import torch, flash_cute; q = torch.ones(1, 300, 1, 64, dtype=torch.bfloat16); "
        "assert torch.equal(flash_cute.flash_attn_func(q, q, q), q)"
    )
    for capability in ("default", "avx2"):
        variables = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        result = subprocess.run(
            [sys.executable, "-c", call], env=variables, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr


def test_timeout_of_a_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7)
    )
    try:
        assert internals.timeout_of(torch.distributed.group.WORLD) == timedelta(seconds=7)
    finally:
        torch.distributed.destroy_process_group()

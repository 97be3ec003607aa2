"""Every symbol of torch that is not public and that flash_cute needs, behind a name of its own.

torch may change such a symbol in any release. tests/unit/test_torch_internals.py says what must
hold of each, and that no other file of flash_cute uses one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])

# Contexts: a call of an op goes on below autograd's kernels, or below those that count versions.
below_autograd = torch._C._AutoDispatchBelowAutograd
below_versions = torch._C._AutoDispatchBelowADInplaceOrView


def without_autograd(function: F) -> F:
    """``function``, which writes into new tensors alone, below autograd's kernels and those that
    count versions: less dear than no_grad(), and results are no views, which nobody may write."""

    @wraps(function)
    def below(*args: Any, **named: Any) -> Any:
        with below_versions():
            return function(*args, **named)

    return below  # type: ignore[return-value]


def arguments(op: Any) -> list[Any]:
    """The op's arguments by its schema: each has a name, a default_value and an alias_info."""
    return op._schema.arguments


def argument_list(op: Any) -> str:
    """The same as text, as a schema has it between its brackets."""
    return str(op._schema).partition("(")[2].rpartition(") ->")[0]


def results(op: Any) -> list[str]:
    """Names of the op's results by its schema."""
    return [result.name for result in op._schema.returns]


# --- derivatives ---------------------------------------------------------------------------------


def in_forward_mode() -> bool:
    """Whether derivatives in forward mode may be asked for."""
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether this is inside of a transform of torch.func: grad, vjp, vmap, ..."""
    return torch._C._functorch.maybe_current_level() is not None


def transformed() -> bool:
    """Whether derivatives may be asked for in a way that ``requires_grad`` does not show."""
    return in_forward_mode() or in_transform()


@contextmanager
def with_derivatives() -> Iterator[None]:
    """Inside, derivatives of both modes are on: a formula's forward has them off."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


class Formula(torch.autograd.Function):
    """The base of an op's formula. Its ``apply`` is one of a single level, without the search for
    transforms and their dead tensors, which ops do themselves and which takes 2 us."""

    apply = torch._C._FunctionBase.__dict__["apply"]  # type: ignore[attr-defined]


def apply_formula(formula: type[Formula], args: Sequence[Any]) -> Any:
    """``formula.apply``, which autograd's kernel of an op may also call inside of a transform.

    There torch calls the kernel once a level, so the formula is one of a single level.
    """
    if not in_transform():
        return formula.apply(*args)
    with enable_single_level_autograd_function():
        return _of_single_level(formula).apply(*args)


@cache
def _of_single_level(formula: type[Formula]) -> Any:
    methods = {name: staticmethod(getattr(formula, name)) for name in ("forward", "backward")}
    return type(formula.__name__, (_SingleLevelFunction,), methods)


# --- kinds of tensors ----------------------------------------------------------------------------


FakeTensor = fake_tensor.FakeTensor


def is_fake(x: Tensor) -> bool:
    """Whether ``x`` has no values, though it says that it is on a device; mapped ones included.

    What torch.compile traces cannot be told, and is not.
    """
    return not torch.compiler.is_dynamo_compiling() and fake_tensor.is_fake(x)


def parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that hold what a sparse one is made of: indices and values. Of any other
    itself."""
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether an op on these tensors computes at once and as it stands, so that it may fill memory
    that was allocated for it: no subclass, no mode, no graph and no mapped dimension is involved.
    """
    if torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(
        x is None or (type(x) in (Tensor, torch.nn.Parameter) and not is_of_several_gradients(x))
        for x in tensors
    )


def is_of_several_gradients(x: Any) -> bool:
    """Whether ``x`` holds samples of autograd's ``is_grads_batched``."""
    return isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)


def without_samples(x: Any, level: int) -> tuple[Any, int | None]:
    """``x`` with its samples of this level of ``is_grads_batched`` in front, and where they are:
    0, or None if it has none."""
    if not is_of_several_gradients(x):
        return x, None
    plain = torch._remove_batch_dim(x, level, 0, 0)  # type: ignore[attr-defined]
    return (x, None) if plain.shape[0] == 0 else (plain, 0)  # 0 samples: there were none


def with_samples(x: Tensor, dim: int, level: int) -> Tensor:
    """The other way round."""
    return torch._add_batch_dim(x, dim, level)  # type: ignore[attr-defined]


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, ops take and make tensors that have no memory; real ones are taken as such."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


# What ops raise inside of it if their result depends on values.
NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


# --- dispatch ------------------------------------------------------------------------------------

# The base of contexts whose ``__torch_dispatch__`` sees every op of ATen, below autograd.
DispatchMode = TorchDispatchMode
OpOverload = type(torch.ops.aten.add.Tensor)


def flops_of(func: Any, args: Any, named: Any, result: Any) -> int:
    """What FlopCounterMode counts of an op that a DispatchMode sees: additions and multiplications
    of its matrix products; 0 of others. Of the CPU's attention and LSTM too, which it leaves out.
    """
    from torch.utils.flop_counter import flop_registry

    if not isinstance(func, OpOverload):
        return 0
    name = func.overloadpacket.__name__.replace("_for_cpu", "")
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):  # of rows by two weights
        rows, products = args[0].shape[:-1].numel(), 2 if name.endswith("backward") else 1
        return 2 * products * rows * (args[1].numel() + args[2].numel())
    packet = (
        getattr(torch.ops.aten, name, None) if func.namespace == "aten" else func.overloadpacket
    )
    formula = flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **named, out_val=result)


def below(key: str) -> AbstractContextManager[None]:
    """Inside, calls of ops do not come to the kernels of this dispatch key."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return torch._C._ExcludeDispatchKeyGuard(keys)  # type: ignore[return-value]


def kernel_of(op: str, key: str) -> Callable[..., Any]:
    """The kernel that an op has for a dispatch key now, whatever is registered later."""
    kernel = torch.library.get_kernel(op, key)  # type: ignore[attr-defined]
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return lambda *args, **named: kernel.call_boxed(keys, *args, **named)


def sdp_order() -> list[int]:
    """The order in which SDPA asks its backends, as values of SDPBackend."""
    return list(torch._C._get_sdp_priority_order())


set_sdp_order = torch._C._set_sdp_priority_order


def settle_sdp_order() -> None:
    """CUDA puts its own order over any other when it is first asked for a backend: this asks."""
    if torch.cuda.is_available():
        with _disable_current_modes():
            x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)  # type: ignore[attr-defined]


def when_cuda_starts(function: Callable[[], None]) -> None:
    """Calls it now, or as soon as CUDA starts if there is a GPU that nobody has used yet."""
    if torch.cuda.is_available():
        torch.cuda._lazy_call(function)
    else:
        function()


def is_profiled() -> bool:
    """Whether torch.profiler runs, or may: its ranges cost some microseconds each."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", True)


def memory_events(profiled: torch.autograd.profiler.profile) -> list[tuple[int, int]]:
    """What the CPU's allocator did while this ran with ``profile_memory``, in the order of time:
    (address, bytes), the bytes below 0 where memory was given back."""
    left: list[Any] = list(profiled.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    found: list[tuple[int, int, int, int]] = []
    while left:
        event = left.pop()
        left += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            found.append((event.start_time_ns, len(found), fields.ptr, fields.alloc_size))
    return [(address, size) for _, _, address, size in sorted(found)]


# --- torch.compile -------------------------------------------------------------------------------


def has_inductor() -> bool:
    """Whether Inductor is loaded: any op may be called by a graph that it has made."""
    return "torch._inductor.compile_fx" in sys.modules


def constant_in_graphs(function: F) -> F:
    """What ``torch.compiler.assume_constant_result`` does, which loads all of torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def in_context_parallel() -> bool:
    """Whether this is inside of torch.distributed's ``context_parallel``, which shards tensors, and
    replaces SDPA by what communicates."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa.__module__.startswith("torch.distributed.tensor.experimental")


def assume(right: bool | torch.SymBool) -> bool:
    """``right`` inside of a graph; True where only data will tell, which the graph then asks."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if guard_or_true(right):
        torch._check(right)
        return True
    return bool(right)


def is_decided(right: bool | torch.SymBool) -> bool:
    """Whether ``right`` is known without data: that of a graph, too, by its guards."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return guard_or_true(right) == guard_or_false(right)


def is_symbolic(x: float | torch.SymInt | torch.SymFloat) -> bool:
    """Whether ``x`` is a number of a graph that is being made: other calls of it have others."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(x)


def example(x: Any) -> Any:
    """The number that a graph is being made with where ``x`` is one of its own, without a guard;
    None where only data will tell. Other values are themselves."""
    return x.node.hint if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) else x


def in_graph() -> bool:
    """Whether a graph is being made, whose ops see fakes: before torch 2.13 ``is_compiling`` does
    not say so there."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def assert_in_graph(right: Tensor, message: str) -> None:
    """Raises RuntimeError when the graph runs, if ``right`` is False; on CUDA without waiting."""
    torch._assert_async(right, message)


def begins_by_sizes(x: Tensor) -> bool:
    """Whether dynamic sizes decide where a fake begins in its memory: it is a view that the graph
    makes. A number decides no longer, nor does the offset that an input of the graph has."""
    offset = x.storage_offset()
    if not isinstance(offset, torch.SymInt):
        return False
    from torch._dynamo.source import TensorProperty

    expression, sources = offset.node.expr, offset.node.shape_env.var_to_sources
    if not expression.is_Symbol:
        return not expression.is_number
    properties = [getattr(source, "prop", None) for source in sources.get(expression, ())]
    return TensorProperty.STORAGE_OFFSET not in properties


# --- attention on the CPU ------------------------------------------------------------------------

# ATen's own flash attention of (batch, heads, seqlen, dim), whatever is activated in its place
# later: (output, logsumexp), and gradients.
flash_forward_on_cpu = kernel_of("aten::_scaled_dot_product_flash_attention_for_cpu", "CPU")
flash_backward_on_cpu = kernel_of(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "CPU"
)


# What the CPU's kernels take from MKL's vector math, by ATen's names.
VECTOR_MATH = ("exp", "log", "tanh")


def settle_vector_math() -> None:
    """One thread makes the first call of each of these functions, in which MKL picks its kernel.
    Where several make it at once, one may get a kernel with errors of 1e-4 (pytorch #188792)."""
    for dtype in (torch.float32, torch.float64):
        for name in VECTOR_MATH:
            getattr(torch, name)(torch.ones(1, dtype=dtype, device="cpu"))


@cache
def has_bf16_products() -> bool:
    """Whether ATen multiplies bf16 faster than fp32: what it does elsewhere may be slow. It packs
    bf16 for AVX-512 alone, which ``ATEN_CPU_CAPABILITY`` may keep it from."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith("AVX512") and torch.cpu._is_avx512_bf16_supported()


# --- fp8 -----------------------------------------------------------------------------------------


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """``(a * scale_a) @ (b * scale_b)`` of fp8 matrices, a in rows and b in columns, with a scale
    each: fp32, no dimensions. On CUDA both sizes of b are multiples of 16."""
    return torch._scaled_mm(
        a,
        b,
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )


# A tensor class with this as its ``__torch_function__`` is to ops what a Parameter is: a tensor,
# whose results are plain.
plain_torch_function = torch.nn.Parameter.__torch_function__


# --- process groups -------------------------------------------------------------------------------


def timeout_of(group: Any) -> timedelta | None:
    """How long a torch.distributed group waits for the other ranks; None if it does not say."""
    device = "cuda" if "nccl" in str(torch.distributed.get_backend(group)) else "cpu"
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", None)


# --- modules and products ------------------------------------------------------------------------


def version(x: Tensor) -> int:
    """How often a tensor was written in place; no tensor of inference mode has it."""
    return x._version


def copy_of(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with the same parameters and buffers, submodules being the module's own still. What
    is set, registered or hooked on one of the two later is not so on the other. Its bound methods
    are the copy's; what ``module.compile()`` has made, which calls the module itself, it lacks."""
    copy = type(module).__new__(type(module))
    for name, value in torch.nn.Module.__getstate__(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            value = MethodType(value.__func__, copy)
        copy.__dict__[name] = value.copy() if isinstance(value, dict) else value
    return copy


# Of a module's own containers, by their names: hooks of forward and backward, and all others.
_CONTAINERS = [name for name, x in vars(torch.nn.Module()).items() if isinstance(x, (dict, set))]
_OF_CALLS = [name for name in _CONTAINERS if "forward" in name or "backward" in name]
_MEMBERS = [name for name in _CONTAINERS if name not in _OF_CALLS]
_CALL_HOOKS = [name for name in _OF_CALLS if name.endswith("hooks")]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling a module, or the gradient of such a call, runs hooks of its own."""
    return any([getattr(module, name) for name in _CALL_HOOKS])


def copy_gradient_hooks(module: torch.nn.Module, copy: torch.nn.Module) -> None:
    """Gives the parameters of a deep copy the hooks on gradients that the module's have."""
    for mine, its in zip(module.parameters(), copy.parameters(), strict=True):
        for hook in (mine._backward_hooks or {}).values():
            its.register_hook(hook)


def has_hooks_of_any_kind(module: torch.nn.Module) -> bool:
    """The same, or whether saving or loading its state does."""
    return any(hooks for name, hooks in vars(module).items() if name.endswith("hooks"))


def has_global_hooks() -> bool:
    """Whether hooks are registered that the call of any module runs."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def children(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The submodules by name, each under all of its names, as the module itself holds them."""
    return module._modules


def share_members(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Makes what ``other`` has registered, now and later, registered on ``module`` too: parameters,
    buffers, submodules, and hooks of state dicts."""
    for name in _MEMBERS:
        module.__dict__[name] = other.__dict__[name]


def former_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What nn.DataParallel sets on a replica as attributes, in place of parameters; of any other
    module nothing."""
    return vars(module).get("_former_parameters", {})


def in_backward() -> bool:
    """Whether autograd is at work in this thread: a forward inside of it is computed again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def skipped_if_fused(module: torch.nn.Module) -> str | None:
    """What a module, or a part of it, does besides its class's forward; None if nothing."""
    for name, part in module.named_modules():
        if has_hooks(part):
            return f"hooks of {name or 'the block itself'} would not be called"
        if "forward" in vars(part):
            return f"{name or 'the block itself'} has a forward that is not its class's"
    return None


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x weight^T + bias) of x (rows, features): on CUDA one kernel, without autograd."""
    return torch._addmm_activation(bias, x, weight.t())

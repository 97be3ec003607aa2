"""Every symbol of torch that is not public, and what it gains: a new one needs its line here.

tests/unit/test_torch_internals.py holds them to one file, and says what must hold of each. Fields
of objects that no underscore marks (``node.hint``) are not counted.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from flash_cute import _torch_internals as internals

MOST = 43

GAINS = {
    # of each call of an op
    "torch._C._AutoDispatchBelowAutograd": "an op without gradients skips autograd's dispatch",
    "torch._C._AutoDispatchBelowADInplaceOrView": "as no_grad(), which takes longer",
    "torch._C._FunctionBase": "a formula without the search for transforms: 2 us",
    "torch._C._len_torch_dispatch_stack": "fast paths see modes that want to see ops",
    "_current_level": "derivatives in forward mode are refused, not lost",
    "torch._C._functorch.maybe_current_level": "fast paths leave torch.func its calls",
    "torch._C._ExcludeDispatchKeyGuard": "autocast's kernel calls the op below itself",
    "torch._C.DispatchKey": "names the kernel to go below, and that of the CPU's attention",
    "torch._C.DispatchKeySet": "the same",
    "_schema": "which arguments an op writes, and what it returns, by its schema",
    "_version": "what was written in place since is not taken for the same",
    # derivatives in torch.func, and in batches
    "torch._functorch.utils.enable_single_level_autograd_function": "formulas inside torch.func",
    "torch.autograd.function._SingleLevelFunction": "the same",
    "_set_fwd_grad_enabled": "formulas under several levels of torch.func",
    "torch._C._functorch.is_legacy_batchedtensor": "autograd.grad(is_grads_batched=True)",
    "torch._remove_batch_dim": "the same",
    "torch._add_batch_dim": "the same",
    "torch._C._current_graph_task_id": "fp8's delayed scales refuse checkpoints, not spoil them",
    # tensors without memory, and ops that a mode sees
    "torch._subclasses.fake_tensor": "the memory of a step, without the step's memory",
    "torch.utils._python_dispatch.TorchDispatchMode": "the same; what ops a block runs",
    "_indices": "the memory of sparse tensors whose entries repeat",
    "_values": "the same",
    # SDPA
    "torch._C._get_sdp_priority_order": "SDPA asks flash attention first on CUDA, in torch's order",
    "torch._C._set_sdp_priority_order": "the same, and back again",
    "torch._fused_sdp_choice": "CUDA's own order is settled before it is read",
    "torch.utils._python_dispatch._disable_current_modes": "the same inside of a mode",
    "torch.cuda._lazy_call": "the same, where CUDA has not started; a fork may follow",
    # graphs
    "_dynamo_marked_constant": "constants of graphs, without loading torch._dynamo: 1 s",
    "torch._inductor.compile_fx": "results that graphs may overwrite are not shared",
    "torch._check": "sizes that only data tell are asserted in graphs",
    "torch._assert_async": "values are asserted in graphs, without waiting for a GPU",
    "torch._guards.TracingContext": "is_compiling() before torch 2.13 where ops see fakes",
    "torch._dynamo.source.TensorProperty": "views that Inductor would misplace are refused",
    # the CPU, fp8, profilers, groups
    "torch.cpu._is_avx512_bf16_supported": "fast products in bf16; 2.10 has no public name",
    "torch._scaled_mm": "products in fp8; public since 2.10, which lacks the CPU's",
    "torch._addmm_activation": "linear and relu in one kernel on CUDA",
    "_is_profiler_enabled": "no range of a profiler that is off: microseconds a step",
    "_get_backend": "groups that are made have the timeout of the group they are made for",
    "_timeout": "the same",
    # modules
    "_modules": "submodules are replaced under each of their names",
    "_former_parameters": "fused models in nn.DataParallel",
    "_backward_hooks": "deep copies of layers keep hooks on gradients",
    "torch.nn.modules.module._has_any_global_hook": "hooks of all modules keep blocks from fusing",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_part(name: str) -> str | None:
    """Of an attribute: the name up to its last private part, and what that has if it is a module
    or a class; of an object's, the private part alone."""
    parts = re.match(r"[\w.]+", name)
    found = parts.group().split(".") if parts else []
    last = max((i for i, part in enumerate(found) if is_private(part)), default=None)
    if last is None:
        return None
    rest = [part for part in found[last + 1 : last + 2] if not part.startswith("__")]
    return ".".join(found[: last + 1] + rest) if found[0] == "torch" else found[last]


def private_names(tree: ast.Module) -> set[str]:
    """Those of torch: attributes, imports, and texts that name an attribute or a module."""
    own = {x.name for x in ast.walk(tree) if isinstance(x, (ast.FunctionDef, ast.ClassDef))}
    inner = {x.value for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
    texts = [arg for x in ast.walk(tree) if isinstance(x, ast.Call) for arg in x.args[:2]]
    texts += [x.left for x in ast.walk(tree) if isinstance(x, ast.Compare)]
    names, imported = list[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            names.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {x for x in whole if any(map(is_private, x.split(".")))}
        elif isinstance(node, ast.Constant) and node in texts and isinstance(node.value, str):
            names.append(node.value)
    found = {part for name in names if (part := private_part(name))}
    return found - own | imported


def test_each_private_symbol_has_its_gain():
    found = private_names(ast.parse(Path(internals.__file__).read_text()))
    found -= {"_for_cpu"}  # the end of a name
    assert found == set(GAINS)
    assert len(GAINS) <= MOST

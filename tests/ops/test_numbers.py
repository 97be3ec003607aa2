"""Every number and flag of every public function: other values are refused by the name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_cute
from flash_cute import check, kernels, mha, tiled
from flash_cute.compat import flash_attn_2_cuda, flash_attn_3_raw, flash_attn_interface
from flash_cute.compat.flash_attn import bert_padding
from flash_cute.compat.flash_attn import flash_attn_interface as flash_attn
from flash_cute.compat.flash_attn.layers import rotary
from flash_cute.kernels import plan_log

Q, K = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16)
QKV, KV = torch.randn(2, 9, 3, 4, 16), torch.randn(2, 9, 2, 2, 16)
HEADS_FIRST, STATISTIC = torch.randn(2, 4, 9, 16), torch.ones(2, 4, 9)
CU, USED = torch.tensor([0, 9, 18], dtype=torch.int32), torch.tensor([9, 9], dtype=torch.int32)
TABLES = torch.randn(64, 8)
PROBLEM = kernels.Problem(seqlen_q=64)

DENSE = {"q": Q, "k": K, "v": K}
ROWS = {x: y.flatten(0, 1) for x, y in DENSE.items()}
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 9, "max_seqlen_k": 9}
PACKED = {"q": ROWS["q"], "kv": KV.flatten(0, 1)} | LENGTHS
PACKED_QKV = {"qkv": QKV.flatten(0, 1), "cu_seqlens": CU, "max_seqlen": 9}
CACHE = {"q": Q, "k_cache": K, "v_cache": K, "cache_seqlens": 5}
SCORE = {
    "softmax_scale": 0.25, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
    "alibi_slopes": None,
}  # fmt: skip
BINDING = SCORE | {"is_causal": False, "p_dropout": 0.0, "return_softmax": False}
RAW = SCORE | {"causal": False, "dropout_p": 0.0}
NO_GRADIENTS = {"dq": None, "dk": None, "dv": None}
BACKWARD = {
    "dout": Q, **DENSE, "out": Q, "softmax_lse": STATISTIC, **NO_GRADIENTS,
    "deterministic": False,
}  # fmt: skip
BACKWARD_ROWS = BACKWARD | ROWS | LENGTHS | {
    "dout": ROWS["q"], "out": ROWS["q"], "softmax_lse": torch.ones(4, 18), "zero_tensors": False,
}  # fmt: skip
MHA_BACKWARD = {x: y for x, y in BACKWARD.items() if x not in NO_GRADIENTS}
MHA_ROWS = {x: y for x, y in BACKWARD_ROWS.items() if x not in NO_GRADIENTS} | {
    "dq_": None, "dk_": None, "dv_": None, "alibi_slopes_": None,
}  # fmt: skip
MHA_VARLEN = ROWS | LENGTHS | {
    "out_": None, "seqused_k": None, "block_table_": None, "alibi_slopes_": None,
}  # fmt: skip
VARLEN_BINDING = ROWS | LENGTHS | BINDING | {
    "out": None, "seqused_k": None, "leftpad_k": None, "block_table": None, "zero_tensors": False,
}  # fmt: skip
NOTHING_JOINS = dict.fromkeys(
    ("k", "v", "seqlens_k", "rotary_cos", "rotary_sin", "cache_batch_idx", "leftpad_k",
     "block_table", "out")
)  # fmt: skip
WRITTEN = {f"d{x}": torch.empty_like(y) for x, y in DENSE.items()}


def entered(manager: Callable[..., Any]) -> Callable[..., None]:
    """A function that enters a context, and leaves it."""

    def enter(**named: Any) -> None:
        with manager(**named):
            pass

    enter.__signature__ = inspect.signature(manager)  # type: ignore[attr-defined]
    return enter


Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Call] = {
    f"{module.__name__.removeprefix('flash_cute.')}.{name}": (getattr(module, name), arguments)
    for module, functions in {
        flash_cute: {
            "flash_attn_func": DENSE,
            "flash_attn_varlen_func": ROWS | LENGTHS,
            "flash_attn_kvpacked_func": {"q": Q, "kv": KV},
            "flash_attn_qkvpacked_func": {"qkv": QKV},
            "flash_attn_varlen_kvpacked_func": PACKED,
            "flash_attn_varlen_qkvpacked_func": PACKED_QKV,
            "flash_attn_with_kvcache": CACHE,
            "flash_attn_combine": {"out_partial": STATISTIC, "lse_partial": STATISTIC[..., 0]},
            "kvcache_status": {"k_cache": K, "cache_seqlens": 5},
            "quantize_fp8": DENSE,
            "rng_state": {},
            "FlashAttention": {},
            "flash_attention_forward": dict.fromkeys("QKV", HEADS_FIRST),
            "flash_attention_backward": {
                **dict.fromkeys(("Q", "K", "V", "O", "dO"), HEADS_FIRST),
                **dict.fromkeys("lm", STATISTIC),
            },
            "get_optimal_block_sizes": {"sequence_length": 64, "head_dim": 64},
            "estimate_memory_usage": {
                "batch_size": 1, "num_heads": 2, "seq_len": 64, "head_dim": 64
            },
        },
        tiled: {"kernel_of": {"Q": HEADS_FIRST}},
        mha: {
            "mha_fwd": DENSE,
            "mha_varlen_fwd": MHA_VARLEN,
            "mha_bwd": MHA_BACKWARD,
            "mha_varlen_bwd": MHA_ROWS,
        },
        kernels: {
            "Problem": {"seqlen_q": 64},
            "Gpu": {
                "name": "x", "capability": 90, "smem_optin": 1000, "sms": 10, "memory_gb_s": 10,
                "l2_bytes": 10,
            },
            "plan": {"problem": PROBLEM},
            "explain": {"problem": PROBLEM},
            "why_widened": {"problem": PROBLEM},
            "supports": {"call": PROBLEM},
            "bucket": {"problem": PROBLEM},
            "nearest": {"problem": PROBLEM, "block_m": 64, "block_n": 64},
        },
        kernels.gpus: {"as_gpu": {"gpu": "h100"}},
        flash_attn: {
            "flash_attn_func": DENSE,
            "flash_attn_varlen_func": ROWS | LENGTHS,
            "flash_attn_kvpacked_func": {"q": Q, "kv": KV},
            "flash_attn_qkvpacked_func": {"qkv": QKV},
            "flash_attn_varlen_kvpacked_func": PACKED,
            "flash_attn_varlen_qkvpacked_func": PACKED_QKV,
            "flash_attn_with_kvcache": CACHE,
            "_flash_attn_forward": DENSE | RAW | {"return_softmax": False},
            "_flash_attn_varlen_forward": ROWS | LENGTHS | RAW,
            "_flash_attn_backward": BACKWARD | RAW,
            "_flash_attn_varlen_backward": BACKWARD_ROWS | RAW,
        },
        flash_attn_2_cuda: {
            "fwd": DENSE | BINDING | {"out": None},
            "varlen_fwd": VARLEN_BINDING,
            "bwd": {x: y for x, y in (BACKWARD | BINDING).items() if x != "return_softmax"},
            "varlen_bwd": {
                x: y for x, y in (BACKWARD_ROWS | BINDING).items() if x != "return_softmax"
            },
            "fwd_kvcache": {
                x: y
                for x, y in (BINDING | NOTHING_JOINS).items()
                if x not in ("p_dropout", "return_softmax")
            }
            | {"q": Q, "kcache": K, "vcache": K, "is_rotary_interleaved": True, "num_splits": 0},
        },
        flash_attn_interface: {
            "flash_attn_func": DENSE,
            "flash_attn_varlen_func": ROWS | LENGTHS,
            "flash_attn_qkvpacked_func": {"qkv": torch.randn(2, 9, 8, 16), "num_heads_q": 4},
            "flash_attn_with_kvcache": CACHE,
        },
        flash_attn_3_raw: {
            "_flash_attn_forward": DENSE,
            "_flash_attn_backward": {
                "dout": Q, **DENSE, "out": Q, "softmax_lse": STATISTIC, **WRITTEN,
            },
        },
        bert_padding: {
            "index_put_first_axis": {
                "values": torch.ones(2, 3), "indices": torch.tensor([0, 1]), "first_axis_dim": 3,
            },
            "pad_input": {
                "hidden_states": torch.ones(2, 3), "indices": torch.tensor([0, 1]), "batch": 2,
                "seqlen": 3,
            },
        },
        rotary: {
            "apply_rotary_emb": {"x": Q, "cos": TABLES, "sin": TABLES},
            "apply_rotary_emb_qkv_": {
                "qkv": torch.randn(2, 9, 8, 16), "cos": TABLES, "sin": TABLES, "num_heads_q": 4,
            },
            "apply_rotary_emb_kv_": {"kv": KV, "cos": TABLES, "sin": TABLES},
            "RotaryEmbedding": {"dim": 16},
        },
    }.items()
    for name, arguments in functions.items()
}  # fmt: skip
CALLS |= {
    "kernels.only": (entered(kernels.only), {"num_splits": 1}),
    "check.switched": (entered(check.switched), {}),
    "plan_log.switched": (entered(plan_log.switched), {}),
    "varlen_fwd with lengths": (
        flash_attn_2_cuda.varlen_fwd, VARLEN_BINDING | {"seqused_k": USED},
    ),
    "a packed cache": (
        flash_cute.flash_attn_with_kvcache,
        CACHE | {"q": ROWS["q"], "cu_seqlens_q": CU, "max_seqlen_q": 9},
    ),
}  # fmt: skip

WRONG: dict[str, Any] = {
    "True": True, "0": 0, "-1": -1, "-2": -2, "1.5": 1.5, "-1.5": -1.5, "nan": math.nan,
    "inf": math.inf, "text": "x", "2**70": 2**70, "tensor": torch.ones(2), "None": None,
    "list": [1],
}  # fmt: skip
FLAG, NONE = {"True", "0"}, {"None"}
# What is right, by the words of the docs; by the argument, then by the function and the argument.
RIGHT: dict[str, set[str]] = {
    "max_seqlen_q": {"0"}, "max_seqlen_k": {"0"}, "max_seqlen": {"0"},
    "dropout_p": {"0"}, "p_dropout": {"0"}, "softcap": {"0", "1.5", "2**70"},
    "softmax_scale": {"0", "-1", "-2", "1.5", "-1.5", "2**70"} | NONE,
    "window_size": NONE, "window_size_left": {"0", "-1"}, "window_size_right": {"0", "-1"},
    "num_splits": {"0"}, "split_size": {"0"}, "cache_seqlens": {"0"} | NONE, "seqlen_new": {"0"},
    "sm_margin": {"0"} | NONE, "pack_gqa": {"True"} | NONE, "attention_chunk": {"0"} | NONE,
    "batch": {"0"}, "seqlen_q": {"0"}, "seqlen_k": {"0"},
    "total_q": {"0"}, "total_k": {"0"}, "page_size": {"0"}, "max_blocks": {"0"},
    "seqlen_offsets": {"0"}, "base": {"1.5", "2**70"}, "scale_base": {"1.5", "2**70"},
}  # fmt: skip
RIGHT |= {
    "flash_cute.kvcache_status.cache_seqlens": {"0", "-1", "-2"} | NONE,  # it says what is clamped
    "flash_cute.kvcache_status.k_descale": {"1.5", "2**70"},
    "flash_cute.kvcache_status.v_descale": {"1.5", "2**70"},
    "flash_cute.rng_state.device": {"0"},  # a GPU, where there is one
    "compat.flash_attn.bert_padding.pad_input.batch": set(),
    "kernels.only.num_splits": NONE, "kernels.only.pack_gqa": NONE,
    "kernels.Problem.softcap": {"True"}, "kernels.Problem.softmax_scale": {
        "0", "-1", "-2", "1.5", "-1.5", "2**70"},
    "kernels.Problem.window_size": set(), "varlen_fwd with lengths.return_softmax": {"0"},
}  # fmt: skip
# flash-attn has every negative bound unbounded, and a negative softcap off; so has torch's mha.
_NEGATIVE = {"window_size_left": {"-2"}, "window_size_right": {"-2"}}
_OFF = {"softcap": {"-1", "-2", "-1.5"}}
ELSEWHERE = {"compat": _NEGATIVE | _OFF | {"num_splits": NONE}, "mha": _NEGATIVE}
RENAMED = {"dropout_p": "p_dropout", "causal": "is_causal"}  # by what raw functions call


def is_number(parameter: inspect.Parameter, given: Any) -> bool:
    kinds = str(parameter.annotation)
    is_variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return not is_variable and any(kind in kinds for kind in ("int", "float", "bool"))


NUMBERS = [
    (call, name)
    for call, (function, given) in CALLS.items()
    for name, parameter in inspect.signature(function).parameters.items()
    if is_number(parameter, given)
]


def right(call: str, name: str, parameter: inspect.Parameter) -> set[str]:
    kinds = str(parameter.annotation)
    known = RIGHT.get(f"{call}.{name}")
    if known is None:
        known = RIGHT.get(name, FLAG if kinds.startswith("bool") else set())
    if kinds == "bool" and call.startswith("kernels.Problem"):
        known = {"True"}
    where = call.split(".")[0] if "with lengths" not in call else "compat"
    more = ELSEWHERE.get(where, {}).get(name, set())
    return known | more | (NONE if "None" in kinds and name != "num_heads_q" else set())


@pytest.mark.parametrize("call, name", NUMBERS)
def test_wrong_numbers_are_refused_by_their_name(call, name):
    function, given = CALLS[call]
    parameter = inspect.signature(function).parameters[name]
    allowed = right(call, name, parameter)
    function(**given)
    for kind, wrong in WRONG.items():
        if kind in allowed or (isinstance(wrong, torch.Tensor) and "Tensor" in str(parameter)):
            continue
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as found:
            function(**given | {name: wrong})
        names = {name, name.rstrip("_"), RENAMED.get(name, name)}
        assert any(x in str(found.value) for x in names), f"{kind}: {found.value}"


@pytest.mark.parametrize("call, name", NUMBERS)
def test_valid_numbers_are_accepted(call, name):
    """So that the table above allows no more than there is."""
    function, given = CALLS[call]
    for kind in right(call, name, inspect.signature(function).parameters[name]) - NONE:
        if (name, kind) == ("device", "0"):
            continue
        function(**given | {name: WRONG[kind]})


def test_the_table_has_every_public_function():
    """Of these modules, whose functions have numbers."""
    known = {function for function, _ in CALLS.values()}
    modules = (mha.functions, kernels.configs, kernels.gpus, kernels.plans, tiled.functions,
               flash_attn, flash_attn_2_cuda, flash_attn_interface, flash_attn_3_raw, bert_padding,
               rotary)  # fmt: skip
    public = {getattr(flash_cute, name) for name in flash_cute.__all__ if name != "autotune"}
    for module in modules:
        public |= {
            x for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__
        }
    numbered = {
        x
        for x in public
        if callable(x)
        and not (getattr(x, "__name__", "_").startswith("_") and x not in known)
        and any(is_number(p, None) for p in inspect.signature(x).parameters.values())
    }
    made_by_the_library = {kernels.KernelConfig, kernels.KeyOrder, kernels.Plan, flash_cute.Sparse}
    not_on_the_cpu = {kernels.gpu}
    others = {kernels.only, kernels.plans.is_count, rotary.apply_rotary_emb_torch,
              rotary.rotate_half, kernels.ctas_an_sm}  # fmt: skip
    assert numbered - made_by_the_library - not_on_the_cpu - others <= known


@pytest.mark.parametrize("index", [True, -1, 1.5, "x", math.nan])
def test_gpus_by_their_index(index):
    with pytest.raises((TypeError, ValueError), match="index is"):
        kernels.gpu(index)


@pytest.mark.parametrize("num_heads_q", [3, 7, 8, 0])
def test_heads_that_k_and_v_cannot_share(num_heads_q):
    qkv = torch.randn(2, 9, 8, 16)
    for call in (
        lambda: flash_attn_interface.flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q),
        lambda: rotary.apply_rotary_emb_qkv_(qkv, TABLES, TABLES, num_heads_q=num_heads_q),
        lambda: rotary.RotaryEmbedding(16)(qkv, num_heads_q=num_heads_q),
    ):
        with pytest.raises(ValueError, match=f"num_heads_q is {num_heads_q}"):
            call()


def test_rotary_positions_before_the_first_are_not_turned():
    """Values in tensors are not checked; ints below 0 are refused."""
    x, offsets = torch.randn(1, 4, 2, 16), torch.tensor([-2])
    out = rotary.apply_rotary_emb(x, TABLES, TABLES, seqlen_offsets=offsets)
    assert torch.equal(out[:, :2], x[:, :2])
    assert torch.equal(out[:, 2:], rotary.apply_rotary_emb(x[:, 2:], TABLES, TABLES))

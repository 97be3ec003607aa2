"""FlashAttention's C++ functions: every parameter against the oracle, results, buffers, errors."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from typing import Any

import pytest
import torch

import flash_cute
from flash_cute import check, mha
from flash_cute.testing import bounds, memory
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs

BF16 = torch.bfloat16
FORWARD = (
    "q k v out_ alibi_slopes_ p_dropout softmax_scale is_causal window_size_left window_size_right "
    "softcap return_softmax gen_"
)
VARLEN_FORWARD = (
    "q k v out_ cu_seqlens_q cu_seqlens_k seqused_k block_table_ alibi_slopes_ max_seqlen_q "
    "max_seqlen_k p_dropout softmax_scale zero_tensors is_causal window_size_left "
    "window_size_right softcap return_softmax gen_"
)
BACKWARD = (
    "dout q k v out softmax_lse dq_ dk_ dv_ alibi_slopes_ p_dropout softmax_scale is_causal "
    "window_size_left window_size_right softcap deterministic philox_seed philox_offset"
)
VARLEN_BACKWARD = (
    "dout q k v out softmax_lse dq_ dk_ dv_ cu_seqlens_q cu_seqlens_k alibi_slopes_ max_seqlen_q "
    "max_seqlen_k p_dropout softmax_scale zero_tensors is_causal window_size_left "
    "window_size_right softcap deterministic philox_seed philox_offset"
)
PARAMETERS = {
    "mha_fwd": FORWARD,
    "mha_varlen_fwd": VARLEN_FORWARD,
    "mha_bwd": BACKWARD,
    "mha_varlen_bwd": VARLEN_BACKWARD,
}
LENGTHS: dict[str, Any] = {"lengths_q": (33, 0, 70), "lengths_k": (65, 3, 40)}


@pytest.mark.parametrize("name", PARAMETERS)
def test_names_and_order_are_those_of_the_header(name):
    assert list(inspect.signature(getattr(mha, name)).parameters) == PARAMETERS[name].split()


def shared(inputs: Inputs) -> dict[str, Any]:
    """What forward and backward are told alike."""
    options = dict(inputs.options)
    names = {"alibi_slopes": "alibi_slopes_", "dropout_p": "p_dropout"}
    del options["rng"], options["sink"]
    lengths = {
        x: y
        for x, y in inputs.lengths.items()
        if x not in ("seqused_q", "seqused_k", "block_table")
    }
    return {names.get(x, x): y for x, y in (options | lengths).items()}


def forward(inputs: Inputs, **extra: Any) -> mha.Forward:
    """A positional call, in the header's order."""
    varlen = bool(inputs.lengths)
    names = (VARLEN_FORWARD if varlen else FORWARD).split()
    arguments: dict[str, Any] = dict.fromkeys(names) | shared(inputs)
    arguments |= {"q": inputs.q, "k": inputs.k, "v": inputs.v, "return_softmax": False}
    if varlen:
        arguments |= {"seqused_k": inputs.lengths["seqused_k"], "zero_tensors": False}
        arguments |= {"block_table_": inputs.lengths.get("block_table")}
    arguments |= extra
    assert len(arguments) == len(names)
    return (mha.mha_varlen_fwd if varlen else mha.mha_fwd)(*(arguments[x] for x in names))


def backward(inputs: Inputs, results: mha.Forward, **extra: Any) -> mha.Backward:
    varlen = bool(inputs.lengths)
    names = (VARLEN_BACKWARD if varlen else BACKWARD).split()
    out, q, k, v, lse, seed, offset, _ = results
    arguments: dict[str, Any] = dict.fromkeys(names) | shared(inputs)
    arguments |= {"dout": inputs.dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    arguments |= {"deterministic": False, "philox_seed": seed, "philox_offset": offset}
    arguments |= ({"zero_tensors": False} if varlen else {}) | extra
    assert len(arguments) == len(names)
    return (mha.mha_varlen_bwd if varlen else mha.mha_bwd)(*(arguments[x] for x in names))


def with_state(inputs: Inputs, results: mha.Forward) -> Inputs:
    """The same inputs, to be solved with the state that forward drew."""
    rng = torch.stack(results[5:7]) if inputs.options["dropout_p"] > 0 else None
    return dataclasses.replace(inputs, options=inputs.options | {"rng": rng})


def check_all(inputs: Inputs) -> None:
    """Forward and backward against the oracle."""
    results = forward(inputs)
    inputs = with_state(inputs, results)
    out, _, _, _, lse, seed, offset, softmax = results
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))
    assert seed.shape == offset.shape == () and seed.dtype == offset.dtype == torch.int64
    assert seed.device == offset.device == out.device
    assert softmax.shape == (0,) and softmax.dtype == out.dtype
    assert results[1] is inputs.q and results[2] is inputs.k and results[3] is inputs.v
    if inputs.lengths.get("seqused_k") is not None or inputs.lengths.get("block_table") is not None:
        return  # the header's backward has neither
    dq, dk, dv, softmax_d = backward(inputs, results)
    bounds.check_gradients({"q": dq, "k": dk, "v": dv}, inputs, out)
    expected = (inputs.dout.double() * out.double()).sum(-1).transpose(-1, -2)
    size = (inputs.dout.double() * out.double()).abs().sum(-1).transpose(-1, -2)
    bounds.compare("softmax_d", softmax_d, expected, 1e-5 * size + 1e-30)
    assert softmax_d.dtype == lse.dtype


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "left": {"window": (20, -1)},
    "right": {"window": (-1, 5)},
    "window": {"window": (10, 3)},
    "causal_window": {"window": (10, 3), "is_causal": True},
    "scale": {"softmax_scale": -0.3},
    "softcap": {"softcap": 3.0},
    "alibi_heads": {"alibi": "heads"},
    "alibi_batch": {"alibi": "batch", "is_causal": True},
    "dropout": {"dropout_p": 0.3},
    "dropout_of_all": {"dropout_p": 1.0},
    "grouped": {"heads": 4, "heads_k": 2},
    "dims": {"dim": 40, "dim_v": 24},
    "everything": {"softcap": 5.0, "alibi": "heads", "dropout_p": 0.2, "window": (30, 0),
                   "heads": 4, "heads_k": 1},
}  # fmt: skip
DTYPES = (BF16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(make, feature, packed):
    sizes: dict[str, Any] = {"dtype": BF16} | FEATURES[feature]
    check_all(make(VarlenCase(**LENGTHS, **sizes) if packed else Case(seqlen_k=90, **sizes)))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(make, dtype, packed):
    sizes: dict[str, Any] = {"dtype": dtype, "is_causal": True}
    check_all(make(VarlenCase(**LENGTHS, **sizes) if packed else Case(seqlen_k=90, **sizes)))


VARLEN: dict[str, dict[str, Any]] = {
    "used": {"used_k": (60, 3, 0)},
    "gaps": {"rows_before": 2, "rows_after": 7},
    "longer_max": {"max_seqlen": 200},
    "cut": {"max_seqlen": 50},
    "pages": {"page_size": 16},
    "pages_used": {"page_size": 16, "used_k": (60, 3, 0)},
}


@pytest.mark.parametrize("name", VARLEN)
def test_lengths(make, name):
    check_all(make(VarlenCase(**LENGTHS, **VARLEN[name], dtype=BF16)))


@pytest.mark.parametrize("zero_tensors", [False, True])
def test_rows_of_no_sequence_are_0(make, zero_tensors):
    case = VarlenCase(**LENGTHS, rows_before=2, rows_after=7, dtype=BF16)
    inputs = make(case)
    results = forward(inputs, zero_tensors=zero_tensors)
    grads = backward(inputs, results, zero_tensors=zero_tensors)
    for x in (results[0], *grads[:3]):
        assert not x[:2].any() and not x[-7:].any()
    assert (results[4][:, :2] == -torch.inf).all()


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_softmax(make, packed, p):
    inputs = make((VarlenCase if packed else Case)(dropout_p=p, is_causal=True, dtype=BF16))
    for out_ in (None, torch.empty_like(inputs.q)):
        results = forward(inputs, return_softmax=True, out_=out_)
        oracle = bounds.forward_oracle(with_state(inputs, results))
        bounds.check_softmax(results[7], oracle)
        bounds.check_forward(results[0], results[4], oracle)
        assert p > 0 or (results[5] == 0 and results[6] == 0)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_generators(make, device, packed):
    inputs = make((VarlenCase if packed else Case)(dropout_p=0.3, dtype=BF16))

    def drawn(seed: int) -> mha.Forward:
        return forward(inputs, gen_=torch.Generator(device=device).manual_seed(seed))

    first, second, other = drawn(1), drawn(1), drawn(2)
    bounds.check_same_bits("out", first[0], second[0])
    assert first[5:7] == second[5:7] and not torch.equal(first[0], other[0])
    torch.manual_seed(3)
    expected = inputs.attend()
    torch.manual_seed(3)
    results = forward(inputs)
    bounds.check_same_bits("out", results[0], expected)
    same = backward(inputs, results, deterministic=True)
    vectors = {"philox_seed": results[5].view(1), "philox_offset": results[6].view(1)}
    again = backward(inputs, results, deterministic=True, **vectors)
    for x, y in zip(same, again, strict=True):
        bounds.check_same_bits("gradient", x, y)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_negative_windows_are_unbounded(make, packed):
    inputs = make((VarlenCase if packed else Case)(dtype=BF16))
    expected = forward(inputs)
    grads = backward(inputs, expected, deterministic=True)
    bounds_ = {"window_size_left": -7, "window_size_right": -(2**31)}
    results = forward(inputs, **bounds_)
    bounds.check_same_bits("out", results[0], expected[0])
    again = backward(inputs, results, deterministic=True, **bounds_)
    for x, y in zip(grads, again, strict=True):
        bounds.check_same_bits("gradient", x, y)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_out_is_written_and_returned(make, device, packed):
    inputs = make((VarlenCase if packed else Case)(dim_v=40, is_causal=True, dtype=BF16))
    expected = forward(inputs)
    out = memory.GuardedTensor(expected[0].shape, BF16, device)
    results = forward(inputs, out_=out.tensor)
    assert results[0] is out.tensor
    bounds.check_same_bits("out", results[0], expected[0])
    bounds.check_same_bits("softmax_lse", results[4], expected[4])
    out.check("out")


@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "kv", "qkv"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_each_gradient_is_written_and_returned(make, device, packed, given):
    inputs = make((VarlenCase if packed else Case)(dim_v=40, is_causal=True, dtype=BF16))
    results = forward(inputs)
    expected = backward(inputs, results, deterministic=True)
    guarded = {x: memory.GuardedTensor(getattr(inputs, x).shape, BF16, device) for x in given}
    buffers = {f"d{x}_": guard.tensor for x, guard in guarded.items()}
    got = backward(inputs, results, deterministic=True, **buffers)
    for i, x in enumerate("qkv"):
        bounds.check_same_bits(f"d{x}", got[i], expected[i])
        assert x not in given or got[i] is buffers[f"d{x}_"]
    bounds.check_same_bits("softmax_d", got[3], expected[3])
    for x, guard in guarded.items():
        guard.check(x)


def test_there_is_no_autograd(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    for x in (inputs.q, inputs.k, inputs.v):
        x.requires_grad_()
    out = torch.empty_like(inputs.q)
    for given in (None, out):
        results = forward(inputs, out_=given)
        grads = backward(inputs, results, dq_=None if given is None else torch.empty_like(given))
        assert not any(x.requires_grad for x in (results[0], results[4], *grads))


def test_compiled(device):
    inputs = make_inputs(Case(dropout_p=0.3, dtype=BF16), device)

    def both(out: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = forward(inputs, out_=out)
        return (*backward(inputs, results, dk_=dk)[:3], *results[5:7])

    out, dk = torch.empty_like(inputs.q), torch.empty_like(inputs.k)
    *grads, seed, offset = torch.compile(both, fullgraph=True, backend="aot_eager")(out, dk)
    options = inputs.options | {"rng": torch.stack((seed, offset))}
    inputs = dataclasses.replace(inputs, options=options)
    oracle = bounds.forward_oracle(inputs)
    bounds.check_forward(out, oracle.softmax_lse.float(), oracle)
    bounds.check_gradients(dict(zip("qkv", grads, strict=True)), inputs, out)
    assert torch.equal(grads[1], dk)


BAD_FORWARD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q": ({"q": None}, TypeError, "q is NoneType"),
    "k": ({"k": torch.ones(2, 3, 2, 64)}, TypeError, "dtypes differ"),
    "p": ({"p_dropout": 1.5}, ValueError, "^p_dropout is 1.5"),
    "p_of_str": ({"p_dropout": "x"}, TypeError, "^p_dropout is str"),
    "scale": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
    "causal": ({"is_causal": "no"}, TypeError, "^is_causal is str"),
    "left": ({"window_size_left": 1.5}, TypeError, "^window_size_left is float"),
    "right": ({"window_size_right": None}, TypeError, "^window_size_right is None"),
    "left_too_large": (
        {"window_size_left": 2**63, "window_size_right": 3}, ValueError, "^window_size_left is 922"
    ),
    "right_too_large": ({"window_size_right": 2**63}, ValueError, "^window_size_right is 922"),
    "slopes_of_half": ({"alibi_slopes_": torch.ones(2).half()}, TypeError, "^alibi_slopes_ is tor"),
    "slopes_strided": (
        # to() would pack it
        {"alibi_slopes_": lambda device: torch.ones(2, 2, device=device)[:, 0]},
        ValueError, "^alibi_slopes_'s last"
    ),
    "slopes_with_gradient": (
        {"alibi_slopes_": torch.ones(2, requires_grad=True)}, NotImplementedError, "^alibi_slopes_"
    ),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap"),
    "softmax": ({"return_softmax": None}, TypeError, "return_softmax is NoneType"),
    "slopes": ({"alibi_slopes_": torch.ones(3)}, ValueError, "^alibi_slopes_ has shape"),
    "gen": ({"gen_": 7, "p_dropout": 0.1}, TypeError, "^gen_ is int"),
    "out": ({"out_": [1]}, TypeError, "out_ is list"),
    "out_shape": ({"out_": torch.ones(2, 64, 2, 8, dtype=BF16)}, ValueError, "out_ has shape"),
    "out_dtype": ({"out_": torch.ones(2, 64, 2, 64)}, TypeError, "out_ has dtype torch.float32"),
    "out_sparse": ({"out_": torch.ones(2, 64, 2, 64).to_sparse()}, NotImplementedError, "out_ has"),
    "out_on_meta": (
        {"out_": torch.ones(2, 64, 2, 64, dtype=BF16, device="meta")}, ValueError, "out_ is on meta"
    ),
}  # fmt: skip


def on(device: str, changes: dict[str, Any]) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        if callable(value):
            return value(device)
        is_real = isinstance(value, torch.Tensor) and value.device.type != "meta"
        return value.to(device) if is_real else value

    return {x: moved(y) for x, y in changes.items()}


@pytest.mark.parametrize("name", BAD_FORWARD)
def test_bad_forward(device, name):
    changes, error, said = BAD_FORWARD[name]
    inputs = make_inputs(Case(dtype=BF16), device)
    out = torch.full_like(inputs.q, float("nan"))
    with pytest.raises(error, match=said) as raised:
        forward(inputs, **({"out_": out} | on(device, changes)))
    assert type(raised.value) is error and out.isnan().all()


def test_tables_and_generators_go_by_their_names(device):
    inputs = make_inputs(VarlenCase(**LENGTHS, dtype=BF16), device)
    with pytest.raises(TypeError, match=r"^block_table_ is torch.int64"):
        pages = torch.zeros(1, 8, 2, 64, dtype=BF16, device=device)
        table = torch.zeros(4, 1, dtype=torch.int64, device=device)
        forward(inputs, k=pages, v=pages, block_table_=table)

    q = torch.ones(1, 8, 2, 64, dtype=BF16, device=device)
    gen_ = torch.Generator(device)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q: torch.Tensor) -> torch.Tensor:
        return mha.mha_fwd(q, q, q, p_dropout=0.1, gen_=gen_)[0]

    with pytest.raises(Exception, match="gen_ is given, which cannot be traced"):
        compiled(q)


def test_out_is_contiguous_in_memory_of_its_own(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    wide = torch.ones(2, 64, 2, 128, dtype=BF16, device=device)
    for out, said in (
        (wide[..., ::2], "out_'s last dimension"),
        (wide[:1, :1, :1, :64].expand(2, 64, 2, 64), "out_ has elements that share memory"),
        (inputs.q, "out_ shares memory with q"),
    ):
        with pytest.raises(ValueError, match=said):
            forward(inputs, out_=out)


BAD_BACKWARD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dout": ({"dout": None}, TypeError, "dout is NoneType"),
    "dout_shape": ({"dout": torch.ones(2, 3, 2, 64, dtype=BF16)}, ValueError, "dout has shape"),
    "dout_dtype": ({"dout": torch.ones(2, 64, 2, 64)}, TypeError, "dout has dtype"),
    "lse": ({"softmax_lse": torch.ones(2, 64, 2)}, ValueError, "softmax_lse has shape"),
    "lse_on_meta": (
        {"softmax_lse": torch.ones(2, 2, 64, device="meta")}, ValueError, "softmax_lse is on meta"
    ),
    "dk": ({"dk_": torch.ones(2, 3, 2, 64, dtype=BF16)}, ValueError, "dk_ has shape"),
    "dv": ({"dv_": 3}, TypeError, "dv_ is int"),
    "deterministic": ({"deterministic": "no"}, TypeError, "deterministic"),
    "seed": ({"p_dropout": 0.3, "philox_seed": None}, ValueError, "philox_seed is None"),
    "offset": ({"p_dropout": 0.3, "philox_offset": 3}, TypeError, "philox_offset is int"),
    "seed_dtype": (
        {"p_dropout": 0.3, "philox_seed": torch.ones(())}, TypeError, "philox_seed has dtype"
    ),
    "seed_shape": (
        {"p_dropout": 0.3, "philox_seed": torch.ones(2).long()}, ValueError, "philox_seed has shape"
    ),
    "offset_on_meta": (
        {"p_dropout": 0.3, "philox_offset": torch.ones((), dtype=torch.int64, device="meta")},
        ValueError, "philox_offset is on meta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_bad_backward(device, name):
    changes, error, said = BAD_BACKWARD[name]
    inputs = make_inputs(Case(dtype=BF16), device)
    results = forward(inputs)
    dq = torch.full_like(inputs.q, float("nan"))
    with pytest.raises(error, match=said) as raised:
        backward(inputs, results, **({"dq_": dq} | on(device, changes)))
    assert type(raised.value) is error and dq.isnan().all()


def test_inputs_of_backward_are_contiguous_in_memory_of_their_own(device):
    inputs = make_inputs(Case(dtype=BF16), device)
    results = forward(inputs)
    for name, x in (("dout", inputs.dout), ("out", results[0])):
        with pytest.raises(ValueError, match=f"^{name}'s last dimension"):
            backward(inputs, results, **{name: x.repeat_interleave(2, -1)[..., ::2]})
    wide = results[4].mT.contiguous().mT
    with pytest.raises(ValueError, match="softmax_lse is not contiguous"):
        backward(inputs, results, softmax_lse=wide)
    with pytest.raises(ValueError, match="dk_ shares memory with k"):
        backward(inputs, results, dk_=inputs.k)
    dq = torch.empty_like(inputs.q)
    with pytest.raises(ValueError, match="dk_ shares memory with dq_"):
        backward(inputs, results, dq_=dq, dk_=dq)


def test_checks_apply_here_too(device):
    inputs = make_inputs(VarlenCase(**LENGTHS, dtype=BF16), device)
    results = forward(inputs)
    lengths = torch.tensor([33, 0, 70, 0], dtype=torch.int32, device=device)
    q = torch.zeros(1, 8, 256, 16, dtype=BF16, device=device)
    with check.switched():
        for call in (lambda **x: forward(inputs, **x), lambda **x: backward(inputs, results, **x)):
            with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\] is 33; offsets begin with 0"):
                call(cu_seqlens_q=lengths)
        with pytest.warns(UserWarning, match="exchanged") as caught:
            mha.mha_fwd(q, q, q)
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "name", ["flash_attn_func", "rng_state", *(f"mha.{name}" for name in PARAMETERS)]
)
def test_examples_run(name):
    function: Any = flash_cute
    for part in name.split("."):
        function = getattr(function, part)
    _, example = inspect.getdoc(function).split("Example::\n")
    q, k, v = torch.randn(3, 2, 10, 4, 32).unbind()
    exec(
        textwrap.dedent(example), {"torch": torch, "flash_cute": flash_cute, "q": q, "k": k, "v": v}
    )


def test_autocast_changes_nothing(device):
    """A buffer given or not: the dtype is that of q."""
    q, k, v = (torch.randn(1, 20, 2, 16, device=device) for _ in range(3))
    args = (0.0, 0.25, False, -1, -1, 0.0, False, None)
    expected = mha.mha_fwd(q, k, v, None, None, *args)[0]
    with torch.autocast(device, dtype=torch.bfloat16):
        for out_ in (None, torch.empty_like(q)):
            bounds.check_same_bits("out", mha.mha_fwd(q, k, v, out_, None, *args)[0], expected)


def test_buffers_without_memory_share_none():
    """Tensors on meta begin nowhere; those that are given are written, or refused, by the op."""
    q = torch.empty(1, 5, 2, 8, device="meta")
    args = (None, 0.0, 0.3, False, -1, -1, 0.0, False, None)
    assert mha.mha_fwd(q, q, q, torch.empty_like(q), *args)[0].is_meta


def test_backward_under_vmap(device):
    q, k, v, dout = torch.randn(4, 3, 2, 5, 2, 8, device=device).unbind()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    out, lse = flash_cute.flash_attn_func(q[0], k[0], v[0], return_lse=True)

    def dq(dout):
        return mha.mha_bwd(
            dout, q[0], k[0], v[0], out, lse, None, None, None, None, 0.0, 8**-0.5, False, -1, -1,
            0.0, True, None, None,
        )[0]  # fmt: skip

    expected = torch.stack([dq(x) for x in dout])
    torch.testing.assert_close(torch.vmap(dq)(dout), expected)

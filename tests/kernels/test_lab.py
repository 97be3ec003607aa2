"""The laboratory's calls: what they refuse, and in which words; on CUDA, every kernel."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_cute import lab, reference
from flash_cute.lab import calls, progression
from flash_cute.lab.__main__ import main
from flash_cute.lab.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
    get_kernels_to_build,
)
from flash_cute.lab.test.utils import (
    error_statistics,
    generate_qkv,
    generate_qkvo,
    reference_forward,
)
from flash_cute.native import library
from flash_cute.testing import smoke

BF16 = torch.bfloat16
STEPS = get_kernel_progression_configs()
CONFIG = STEPS[-1]  # blocks of 128 queries and 64 keys
OPS = torch.ops.flash_cute
CALL = "(str config, Tensor q, Tensor k, Tensor v, *, Tensor(a!) out)"


@pytest.fixture
def lab_cuda(cuda):
    """CUDA, and a library that has kernels of the laboratory."""
    if not library.lab_kernels():
        pytest.skip("a library without the laboratory's kernels")
    return cuda


@pytest.fixture
def built(monkeypatch):
    """As if the progression's kernels were built."""
    monkeypatch.setattr(calls, "_BUILT", frozenset(config.kernel_name() for config in STEPS))


def test_schemas_are_pinned():
    assert str(OPS.lab_forward.default._schema) == f"flash_cute::lab_forward{CALL} -> ()"
    timed = str(OPS.lab_forward_timed.default._schema)
    assert timed == f"flash_cute::lab_forward_timed{CALL} -> float"
    assert str(OPS.lab_kernels.default._schema) == "flash_cute::lab_kernels() -> str"
    results = "(int registers, int local_bytes, int ctas_per_sm)"
    assert str(OPS.lab_usage.default._schema) == f"flash_cute::lab_usage(str config) -> {results}"


def test_tensors_of_the_cpu_are_refused():
    q, k, v = generate_qkv(1, 128, 2, 128, BF16, "cpu")
    for call in (lab.forward, lab.forward_timed):
        with pytest.raises(ValueError, match=r"q is on cpu.*CUDA.*GPU"):
            call(CONFIG, q, k, v)
    with pytest.raises(NotImplementedError, match=r"CUDA|CPU"):
        OPS.lab_forward(CONFIG.kernel_name(), q, k, v, out=torch.empty_like(q))


def cuda_tensor(*shape: int, dtype: torch.dtype = BF16, device: str = "cuda:0") -> torch.Tensor:
    return torch.empty(shape or (2, 256, 3, 128), dtype=dtype, device=device)


REFUSED = {
    "no_config": (lambda x: {"kernel_cfg": "fast"}, TypeError, "kernel_cfg is a str"),
    "no_tensor": (lambda x: {"k": [1.0]}, TypeError, "k is a list"),
    "k_on_the_cpu": (lambda x: {"k": cuda_tensor(device="cpu")}, ValueError, "k is on cpu"),
    "fp32": (lambda x: {n: cuda_tensor(dtype=torch.float32) for n in "qkv"}, TypeError,
             "q is torch.float32; the laboratory has fp16 and bf16"),
    "another_dtype": (lambda x: {n: cuda_tensor(dtype=torch.float16) for n in "qkv"}, TypeError,
                      "q is torch.float16, and kernel_cfg's dtype is BF16"),
    "dtypes_differ": (lambda x: {"v": cuda_tensor(dtype=torch.float16)}, TypeError,
                      "v is torch.float16, and kernel_cfg's"),
    "dims": (lambda x: {n: cuda_tensor(256, 3, 128) for n in "qkv"}, ValueError,
             r"q has shape \(256, 3, 128\); expected \(batch, seq_len, n_heads, d_head\)"),
    "shapes_differ": (lambda x: {"k": cuda_tensor(2, 128, 3, 128)}, ValueError,
                      r"k has shape \(2, 128, 3, 128\), and q \(2, 256, 3, 128\)"),
    "heads_differ": (lambda x: {"v": cuda_tensor(2, 256, 1, 128)}, ValueError, "v has shape"),
    "d_head": (lambda x: {n: cuda_tensor(2, 256, 3, 64) for n in "qkv"}, ValueError,
               "q has d_head 64, and kernel_cfg is for 128"),
    "B_r": (lambda x: {n: cuda_tensor(2, 192, 3, 128) for n in "qkv"}, ValueError,
            "seq_len is 192, no multiple of kernel_cfg's B_r, 128: 128 and 256 are"),
    "B_c": (lambda x: {"kernel_cfg": replace(CONFIG, B_r=64, B_c=128)}
            | {n: cuda_tensor(2, 320, 3, 128) for n in "qkv"}, ValueError,
            "seq_len is 320, no multiple of kernel_cfg's B_c, 128"),
    "o_dtype": (lambda x: {"o": cuda_tensor(dtype=torch.float16)}, TypeError, "o is torch.float16"),
    "o_shape": (lambda x: {"o": cuda_tensor(2, 256, 3, 64)}, ValueError, "o has shape"),
    "o_expanded": (lambda x: {"o": cuda_tensor(1, 256, 3, 128).expand(2, -1, -1, -1)}, ValueError,
                   "o has elements that share memory"),
    "devices": (lambda x: {"v": cuda_tensor(device="cuda:1")}, ValueError, "v is on cuda:1"),
    "last_dimension": (lambda x: {"q": cuda_tensor(2, 256, 128, 3).transpose(2, 3)}, ValueError,
                       "q has strides.*contiguous"),
    "alignment": (lambda x: {"k": torch.empty_strided((2, 256, 3, 128), (101376, 396, 132, 1),
                                                     dtype=BF16, device="cuda:0")}, ValueError,
                  "k has strides.*16-byte"),
    "gradient": (lambda x: {"q": cuda_tensor().requires_grad_()}, NotImplementedError,
                 "no backward.*flash_attn_func"),
    "not_built": (lambda x: {"kernel_cfg": replace(CONFIG, optimized_softmax=False)}, ValueError,
                  "not in this build.*get_kernels_to_build"),
    "cannot_be_built": (lambda x: {"kernel_cfg": replace(CONFIG, async_copy=False)}, ValueError,
                        "cannot be built: eager_load_blocks needs async_copy"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_each_check_has_an_error_of_its_own(built, name):
    change, error, words = REFUSED[name]
    with FakeTensorMode():
        good = {"kernel_cfg": CONFIG, "q": cuda_tensor(), "k": cuda_tensor(), "v": cuda_tensor()}
        with pytest.raises(error, match=words):
            calls.check_call(**{"o": None, **good, **change(good)})


def test_a_library_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(calls, "_BUILT", frozenset())
    with pytest.raises(ValueError, match="FLASH_CUTE_BUILD=cuda"):
        lab.usage(CONFIG)
    with pytest.raises(TypeError, match="expected a FlashForwardKernelConfig"):
        lab.usage(CONFIG.kernel_name())


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 7\.5.*8\.0"):
        calls.check_gpu(torch.device("cuda:0"))


def test_fakes_of_cuda_tensors(built):
    with FakeTensorMode():
        q, o = cuda_tensor(), cuda_tensor()
        out = lab.forward(CONFIG, q, q, q)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        assert lab.forward(CONFIG, q, q, q, o) is o
        strided = cuda_tensor(2, 3, 256, 128).transpose(1, 2)
        assert lab.forward(CONFIG, q, q, strided).is_contiguous()


@pytest.mark.parametrize("dtype", [DType.FP16, torch.bfloat16])
def test_inputs(dtype):
    q, k, v, o = generate_qkvo(2, 64, 3, 128, dtype, "cpu", seed=5)
    expected = dtype.to_torch_dtype() if isinstance(dtype, DType) else dtype
    assert {(x.shape, x.dtype) for x in (q, k, v, o)} == {((2, 64, 3, 128), expected)}
    assert o.isnan().all() and not torch.equal(q, k) and abs(float(q.float().std()) - 1) < 0.05
    again = generate_qkv(2, 64, 3, 128, dtype, "cpu", seed=5)
    assert all(map(torch.equal, again, (q, k, v)))
    assert not torch.equal(generate_qkv(2, 64, 3, 128, dtype, "cpu")[0], q)
    with pytest.raises(TypeError, match="float32"):
        generate_qkv(1, 1, 1, 64, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_statistics_find_what_is_wrong(dtype):
    q, k, v = generate_qkv(2, 96, 2, 64, dtype, "cpu")
    exact = reference.attention(q, k, v).out
    assert torch.equal(reference_forward(q, k, v), exact)
    statistics = error_statistics(exact.to(dtype), q, k, v)
    assert statistics.within_bound and 0 < statistics.of_bound < 0.6
    assert statistics.mean_abs <= statistics.rms <= statistics.max_abs
    spoilt = exact.to(dtype)
    spoilt[1, 7, 1, 3] += 0.05
    found = error_statistics(spoilt, q, k, v)
    assert not found.within_bound and found.worst == (1, 7, 1, 3)
    assert abs(found.max_abs - 0.05) < 5e-3 and found.relative > statistics.relative
    spoilt[0, 5, 0, 2] = torch.nan
    missing = error_statistics(spoilt, q, k, v)
    assert missing.of_bound == torch.inf and missing.worst == (0, 5, 0, 2)
    with pytest.raises(ValueError, match="out has shape"):
        error_statistics(exact[:1], q, k, v)


def rate(tflops: float) -> dict[str, float]:
    return {"ms": 1.0, "tflops": tflops, "spread": 0.01}


MADE_UP = {
    "gpu": "GPU", "torch": "2", "cuda": "13", "dtype": "bf16",
    "problem": {"batch": 1, "seq_len": 2, "n_heads": 3, "d_head": 4},
    "references": {progression.TORCH_FA2: rate(320.0), "torch.matmul": rate(640.0)},
    "steps": [
        {"title": title, "config": "c", "kernel": "k", **rate(tflops), "registers": 168,
         "local_bytes": spilled, "smem_bytes": 32768, "ctas_per_sm": 3, "occupancy": 0.1875,
         "error_of_bound": 0.2}
        for title, tflops, spilled in (("plain", 80.0, 0), ("", 160.0, 8))
    ],
}  # fmt: skip


def test_the_table_compares_with_what_ran():
    lines = progression.table(MADE_UP).splitlines()
    header = "| step | TFLOP/s | over the step before | of torch's FlashAttention-2 |"
    assert lines[0].startswith(header)
    assert lines[2:4] == [
        "| 1. plain | 80 |  | 25% | 12% | 168 | 32 KiB | 3 | 19% |",
        "| 2. c | 160 | +100% | 50% | 25% | 168 + 8 B spilled | 32 KiB | 3 | 19% |",
    ]
    assert "torch's FlashAttention-2 320, torch.matmul 640" in lines[-1]
    both = MADE_UP["references"] | {progression.FA2: rate(400.0), progression.PRODUCTION: rate(200)}
    again = progression.table({**MADE_UP, "references": both}).splitlines()
    assert "| of flash_cute's sm80 kernel | of flash-attn 2 |" in again[0]
    assert "| 1. plain | 80 |  | 40% | 20% |" in again[2]


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    progression.plot(MADE_UP, tmp_path / "new" / "steps.png")
    assert (tmp_path / "new" / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_lists_the_kernels(capsys):
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(c) for c in get_kernels_to_build()]


def test_the_command_refuses_what_is_not_there(monkeypatch):
    monkeypatch.setattr(library, "lab_kernels", lambda: ())
    with pytest.raises(SystemExit, match="no bf16 kernel of d_head 64"):
        main(["progression", "--d-head", "64"])
    with pytest.raises(ValueError, match="float32"):
        main(["progression", "--dtype", "float32"])


# From here on a GPU is needed.


def test_every_built_kernel_is_right(lab_cuda):
    configs = get_kernels_to_build()
    assert [config.kernel_name() for config in configs] == list(library.lab_kernels())
    shares = {str(config): progression.check_config(config) for config in configs}
    assert {name: share for name, share in shares.items() if not share <= 1.0} == {}


@pytest.mark.parametrize("config", STEPS, ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 8.0])
def test_steps_of_all_magnitudes(lab_cuda, config, scale):
    """With large scores maxima rise often, and few keys have all the weight."""
    q, k, v, o = generate_qkvo(1, 256, 2, 128, BF16, lab_cuda)
    q *= scale
    out = lab.forward(config, q, k, v, o)
    assert out is o and error_statistics(out, q, k, v).within_bound
    assert torch.equal(lab.forward(config, q, k, v), out)


@pytest.mark.parametrize("config", [STEPS[0], CONFIG], ids=str)
def test_views_streams_and_edges(lab_cuda, config):
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in generate_qkv(2, 384, 3, 128, BF16, lab_cuda)
    )
    wide = torch.full((2, 384, 3, 256), torch.nan, device=lab_cuda, dtype=BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = lab.forward(config, q, k, v, wide[..., 64:192])
    stream.synchronize()
    assert error_statistics(out, q, k, v).within_bound
    assert wide[..., :64].isnan().all() and wide[..., 192:].isnan().all()
    for shape in ((0, 256, 2, 128), (2, 0, 2, 128), (2, 256, 0, 128)):
        empty = torch.empty(shape, device=lab_cuda, dtype=BF16)
        assert lab.forward(config, empty, empty, empty).shape == shape


def test_each_technique_makes_another_kernel(lab_cuda):
    q, k, v = generate_qkv(4, 2048, 16, 128, BF16, lab_cuda)
    times = []
    for config in STEPS:
        times.append(sorted(lab.forward_timed(config, q, k, v)[1] for _ in range(15))[7])
    assert times[0] > 1.5 * times[-1]
    assert any(abs(a - b) > 0.1 * a for a, b in itertools.pairwise(times))
    assert len({lab.usage(config) for config in STEPS}) > 2


@pytest.mark.parametrize("config", [STEPS[0], CONFIG], ids=str)
def test_times_are_of_the_kernel_alone(lab_cuda, config):
    def timed(batch: int, seq_len: int) -> float:
        q, k, v = generate_qkv(batch, seq_len, 16, 128, BF16, lab_cuda)
        out, _ = lab.forward_timed(config, q, k, v)
        assert torch.equal(out, lab.forward(config, q, k, v))
        runs = sorted(lab.forward_timed(config, q, k, v)[1] for _ in range(11))
        tflops = config.attn_flop(batch, 16, seq_len) / runs[5] / 1e9
        assert 1 < tflops < 1000
        return runs[5]

    assert timed(4, 4096) > 4 * timed(4, 1024)


def test_a_first_call_does_not_time_the_loading(lab_cuda):
    q, k, v = generate_qkv(1, 256, 2, 128, BF16, lab_cuda)
    first = {str(config): lab.forward_timed(config, q, k, v)[1] for config in STEPS}
    assert max(first.values()) < 2.0, first


def test_timing_is_refused_in_a_graph(lab_cuda):
    q, k, v, o = generate_qkvo(1, 256, 2, 128, BF16, lab_cuda)
    lab.forward(CONFIG, q, k, v, o)
    expected = o.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="capture"):
            lab.forward_timed(CONFIG, q, k, v)
        lab.forward(CONFIG, q, k, v, o.fill_(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


def test_ops_check_for_themselves(lab_cuda):
    q, k, v, o = generate_qkvo(1, 256, 2, 128, BF16, lab_cuda)
    name = CONFIG.kernel_name()
    bad = {
        "no kernel lab_x": ("lab_x", q, k, v, o),
        "dtype": (name, q.half(), k, v, o),
        "k has shape": (name, q, k[:, :128], v, o),
        "B_r": (name, *(x[:, :192] for x in (q, k, v, o))),
        "out shares memory with q": (name, q, k, v, q),
        "d_head": (name, *(x[..., :64] for x in (q, k, v, o))),
        "16-byte": (name, q, k, torch.empty(q.numel() + 1, **kind(q))[1:].view(q.shape), o),
    }
    for words, (config, *qkv, out) in bad.items():
        for op in (OPS.lab_forward, OPS.lab_forward_timed):
            with pytest.raises(RuntimeError, match=re.escape(words)):
                op(config, *qkv, out=out)
    assert o.isnan().all()
    torch.library.opcheck(OPS.lab_forward.default, (name, q, k, v), {"out": o})


def kind(x: torch.Tensor) -> dict[str, object]:
    return {"device": x.device, "dtype": x.dtype}


def test_an_output_that_shares_memory_is_refused(lab_cuda):
    q, k, v = generate_qkv(1, 256, 2, 128, BF16, lab_cuda)
    for o in (q, v[:, :, :]):
        with pytest.raises(ValueError, match="o shares memory with"):
            lab.forward(CONFIG, q, k, v, o)
    with pytest.raises(ValueError, match="not in this build"):
        lab.forward(FlashForwardKernelConfig(*[DType.BF16, 128, 64, 32, 4], *[False] * 3, 0, 0, 0,
                                             False, True), q, k, v)  # fmt: skip


def test_the_progression_is_measured(lab_cuda, tmp_path, capsys):
    path, picture = tmp_path / "steps.json", tmp_path / "steps.png"
    arguments = ["--json", str(path), "--plot", str(picture), "--rounds", "1", "--batch", "1"]
    assert main(["progression", *arguments, "--seq-len", "1024"]) == 0
    result = json.loads(path.read_text())
    assert [step["config"] for step in result["steps"]] == [str(config) for config in STEPS]
    assert all(step["error_of_bound"] <= 1 and step["local_bytes"] == 0 for step in result["steps"])
    assert progression.table(result) in capsys.readouterr().out
    assert picture.exists()
    assert main(["check", "--seed", "3"]) == 0
    assert capsys.readouterr().out.count("\nok ") >= len(STEPS) - 1


def test_the_problems_for_the_sanitizer_run(lab_cuda, capsys):
    smoke.main(*library.lab_kernels()[:2])
    assert capsys.readouterr().out.endswith("2 kernels ran\n")

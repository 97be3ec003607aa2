"""Hashes of kernels and sources, and the line of CI about them."""

from __future__ import annotations

import kernel_hash
import pytest
from kernel_hash import Code
from made_up_kernels import BWD, BWD_ID, CHECKED, FWD, FWD_ID, PASS, code, elf, recorded

from flash_cute.native import library


def test_ids_are_read_from_mangled_names():
    assert kernel_hash.kernel_id(FWD) == FWD_ID
    assert kernel_hash.kernel_id(BWD) == BWD_ID
    assert kernel_hash.kernel_id(PASS) == "passes"
    config = "12KernelConfigLNS_2OpE2ELNS_4ArchE90ELNS_5DTypeE1ELNS_4TierE1ELi128ELi128ELi16ELi256"
    decode = f"_ZN10flash_cute4sm906decodeIXtl{config}ELi3ELi8ELi1ELi8ELNS_8TileKindE0ELS5_%sEEEEEv"
    id = "decode_sm90_bf16_rich_d128x128_m16_n256_s3_w8_c1_x8"
    for cache, suffix in ((1, ""), (4, "_e4m3"), (5, "_int8")):
        assert kernel_hash.kernel_id(decode % f"{cache}E") == id + suffix


def test_code_is_hashed_without_names_and_order():
    both = code(FWD=b"one", BWD=b"two")
    assert both.kernels["sm_90"].keys() == {FWD_ID, BWD_ID}
    assert code(BWD=b"two", FWD=b"one") == both
    swapped = code(BWD=b"one", FWD=b"two")
    assert swapped.sass == both.sass and swapped.kernels != both.kernels
    again = code(FWD=b"one", BWD=b"three")
    assert again.sass != both.sass
    assert kernel_hash.changed_kernels(both.kernels["sm_90"], again.kernels["sm_90"]) == [BWD_ID]


def test_code_is_instructions_and_literals_of_all_files():
    alone = {f".text.{FWD}": b"x", f".nv.constant2.{FWD}": b"y"}
    same = {**alone, f".nv.info.{FWD}": b"?", f".nv.constant0.{FWD}": b"?", ".nv.constant4": b"?"}
    one, other = (kernel_hash.code_of([("a.sm_90a.cubin", elf(x))]) for x in (alone, same))
    assert one == other and list(one.sass) == ["sm_90a"]
    for changed in ({f".nv.constant2.{FWD}": b"z"}, {".nv.constant3": b"z"}):
        name = "a.sm_90a.cubin"
        assert kernel_hash.code_of([(name, elf(alone | changed))]).sass != one.sass
    two = kernel_hash.code_of([("a.1.sm_80.cubin", elf(alone)), ("a.2.sm_90.cubin", elf(alone))])
    assert two.kernels["sm_80"] == two.kernels["sm_90"] == one.kernels["sm_90a"]


def test_kernels_of_a_built_library_have_hashes():
    if kernel_hash.cuda_tool("cuobjdump") is None:
        pytest.skip("no cuobjdump")
    hashed = kernel_hash.library_code(library.find()).kernels
    built = {*library.kernels(), *library.lab_kernels()}
    assert {id for some in hashed.values() for id in some} - {"passes"} == built


def test_a_missing_cuobjdump_is_named(monkeypatch):
    monkeypatch.setattr(kernel_hash, "cuda_tool", lambda _: None)
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-cuobjdump"):
        kernel_hash.library_code(library.find())


@pytest.mark.parametrize(
    ("gpu", "archs"),
    [((9, 0), ["sm_90", "sm_90a"]), ((8, 9), ["sm_86"]), ((8, 0), ["sm_80"]), ((10, 0), [])],
)
def test_a_gpu_runs_the_newest_code_of_its_generation(gpu, archs):
    assert kernel_hash.archs_of_gpu(["sm_80", "sm_86", "sm_90", "sm_90a"], *gpu) == archs


TREE = {
    "CMakeLists.txt": "project(x)",
    "cmake/units.cmake": "# units",
    "third_party/cutlass.cmake": "# 4.2",
    "csrc/api/fwd.cpp": 'int fwd() { return say("//"); }  // a call\n',
    "csrc/kernels/forward.h": "__global__ void forward() {}\ncudaError_t launch() { go(1); }\n",
    "csrc/kernels/mask.h": "struct Mask {};\n",
    "csrc/kernels/sm90/cost.cpp": '#include "kernels/sm90/rows.def"\nint cost() { return 1; }\n',
    "csrc/kernels/sm90/rows.def": "KERNEL(1)\n",
}


@pytest.mark.parametrize(
    ("file", "text", "host_changes"),
    [
        ("cmake/units.cmake", "# other", False),
        ("csrc/kernels/mask.h", "struct Band {};\n", False),
        ("csrc/kernels/new.h", "", False),
        ("csrc/kernels/sm90/cost.cpp", "int cost() { return 2; }\n", True),
        ("csrc/kernels/sm90/rows.def", "KERNEL(1)  // one\n", False),
        ("csrc/kernels/sm90/rows.def", "KERNEL(2)\n", True),
        ("csrc/api/fwd.cpp", 'int fwd() {\n  /* one */ return say("//"); }\n', False),
        ("csrc/api/fwd.cpp", 'int fwd() { return say("//no"); }\n', True),
        ("csrc/api/new.cpp", "int x;\n", True),
        ("csrc/kernels/forward.h", TREE["csrc/kernels/forward.h"].replace("{}", "{ f(); }"), False),
        ("csrc/kernels/forward.h", TREE["csrc/kernels/forward.h"].replace("1", "2"), True),
    ],
)
def test_hashes_of_sources(tmp_path, file, text, host_changes):
    for name, content in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    source, host = kernel_hash.source_hash(tmp_path), kernel_hash.host_hash(tmp_path)
    assert source == kernel_hash.source_hash(tmp_path)
    (tmp_path / file).write_text(text)
    assert kernel_hash.source_hash(tmp_path) != source
    assert (kernel_hash.host_hash(tmp_path) != host) == host_changes


BOTH = Code({"sm_80": "x", **CHECKED.sass}, {"sm_80": {}, **CHECKED.kernels})
SAME = "kernels are those of the last GPU check (commit abc)"
CHANGED = "kernels changed since the last GPU check (commit abc)"


@pytest.mark.parametrize(
    ("record", "now", "said"),
    [
        (None, ("s", "h", CHECKED), "no GPU check has been recorded"),
        (recorded(CHECKED), ("s", "h", CHECKED), SAME),
        (recorded(CHECKED), ("s", "h", None), SAME),
        (recorded(CHECKED, commit=None), ("s", "h", None), SAME.replace("abc", "unknown")),
        (recorded(CHECKED), ("s2", "h", CHECKED), SAME),
        (recorded(CHECKED), ("s2", "h", BOTH), SAME),
        (recorded(BOTH), ("s2", "h", CHECKED), f"{SAME}; sm_80 was not built here"),
        (recorded(CHECKED), ("s2", "h2", CHECKED), f"{CHANGED}; host code"),
        (
            recorded(CHECKED),
            ("s2", "h", code(FWD=b"1", BWD=b"5", PASS=b"3")),
            f"{CHANGED}; 1 of 3 for sm_90: {BWD_ID}",
        ),
        (
            recorded(CHECKED),
            ("s2", "h", None),
            "sources changed since the last GPU check (commit abc), and no kernel can be compared; "
            "sm_90 was not built here",
        ),
        (
            recorded(CHECKED, failures=["x"], not_memchecked=[FWD_ID]),
            ("s", "h", CHECKED),
            f"{SAME}; failures then: 1; without memcheck: 1 kernels",
        ),
    ],
)
def test_the_line_of_ci(record, now, said):
    assert kernel_hash.verdict(record, *now) == said


def test_the_line_is_printed_without_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernel_hash, "RECORD", tmp_path / "none.json")
    assert kernel_hash.main([]) == 0
    assert capsys.readouterr().out == "no GPU check has been recorded\n"

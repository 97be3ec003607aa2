"""The documentation says what is: its tables, paths, tests, links and its example."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.context_parallel import table
from flash_cute.call import validate

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
GUIDES = ["README.md", "CONTRIBUTING.md", *DOCS]
PAGES = [*GUIDES, "CHANGELOG.md", "benchmarks/README.md", "third_party/README.md"]
MADE_BY_MAKE = (".venv/", "build/")
MADE_ON_A_GPU = {"benchmarks/results/gpu_check.json"}  # may be missing as long as there was none
SUFFIXES = "py|md|toml|txt|h|cpp|cu|def|cmake|json"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(  # with the mark of one that does not run here
    r"^(?:<!-- (not in CI: [^\n]+) -->\n)?```py(?:thon|con|3)?\n(.*?)^```$", re.M | re.S
)


def code(page: str) -> list[str]:
    """What stands between single backticks in a page."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", (ROOT / page).read_text()))


def looks_like_a_path(text: str) -> bool:
    with_folder = re.fullmatch(r"\.?[\w-]+/(?:[\w.-]+/)*[\w.-]*", text)
    file_at_root = re.fullmatch(rf"[\w-]+\.(?:{SUFFIXES})", text)
    return bool(with_folder or file_at_root) and not text.startswith(MADE_BY_MAKE)


def heading_anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_support_matrix_is_current():
    command = [sys.executable, ROOT / "tools" / "support_matrix.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_largest_head_dim_is_the_table_s():
    rows = "".join(table.read_text() for table in (ROOT / "csrc").rglob("rows.def"))
    head_dims = re.findall(r"^KERNEL\((?:\w+, *){4}(\d+), *(\d+),", rows, re.MULTILINE)
    assert max(min(map(int, dims)) for dims in head_dims) == validate.CUDA_MAX_HEAD_DIM


def name_in_tables(case: str) -> str:
    """A measured case as tables call it: "bf16 b4 h32/8 q4096 k4096 d128/128 causal" is "d128, b4
    s4096 h32/8 causal"; of 64 queries "d128, b4 q64 k4096 h32/8 causal", of one "d128, b4 h32/8
    k4096"."""
    sizes = r"(bf16|fp16) (b\d+) (h\d+/\d+) q(\d+) k(\d+) (d\d+)/\d+ (full|causal)"
    if (match := re.fullmatch(sizes, case)) is None:
        return case
    dtype, batch, heads, seqlen_q, seqlen_k, dim, mask = match.groups()
    if seqlen_q == "1":
        return f"{dim}, {batch} {heads} k{seqlen_k}"
    lengths = f"s{seqlen_q}" if seqlen_q == seqlen_k else f"q{seqlen_q} k{seqlen_k}"
    return f"{'fp16 ' if dtype == 'fp16' else ''}{dim}, {batch} {lengths} {heads} {mask}"


def rates_in(results: Path) -> dict[tuple[str, str], set[str]]:
    """What a JSON of benchmarks.attention says of each (case, candidate), forward and backward; of
    other JSONs nothing."""
    if not results.exists() and results.relative_to(ROOT).as_posix() in MADE_ON_A_GPU:
        return {}
    rates: dict[tuple[str, str], set[str]] = {}
    for row in json.loads(results.read_text()).get("results", []):
        for candidate, entry in row["candidates"].items():
            rate = f"{entry['rate']:.0f}" if entry["status"] == "ok" else "-"
            rates.setdefault((name_in_tables(row["case"]), candidate), set()).add(rate)
    return rates


LARGEST_RESULTS = 2 << 20  # bytes


@pytest.mark.parametrize("page", GUIDES)
def test_measured_tables_are_those_of_their_json(page):
    """Columns that bear a candidate's name, in tables of cases below the link to a JSON."""
    rates: dict[tuple[str, str], set[str]] = {}
    header: list[str] = []
    used, compared, wrong = False, 0, []
    for line in (ROOT / page).read_text().splitlines():
        for link in re.findall(r"\(((?:\.\./)*benchmarks/results/\w+\.json)\)", line):
            if used:  # the links below a table are those of the next one
                rates, used = {}, False
            for key, values in rates_in((ROOT / page).parent / link).items():
                rates.setdefault(key, set()).update(values)
        if line.startswith("#"):
            rates = {}
        if not line.startswith("|"):
            header = []
            continue
        _, case, *_ = cells = [cell.strip() for cell in line.split("|")]
        used = True
        if not header or case == "---":
            header = header or cells
            continue
        measured = {candidate for _, candidate in rates if header[1] == "case"}
        for column, cell in zip(header, cells, strict=True):
            candidate = column.removeprefix("bursts: ").removeprefix("backward: ")
            if candidate not in measured:
                continue
            compared += 1
            if cell not in rates.get((case, candidate), {}):
                wrong.append((case, column, cell, rates.get((case, candidate))))
    assert wrong == []
    assert compared or page != "docs/performance.md"


def test_tables_of_several_gpus_are_those_of_their_json():
    page = (ROOT / "docs" / "distributed.md").read_text()
    for ranks, gpu in ((2, "h100"), (4, "h200")):
        file = ROOT / f"benchmarks/results/context_parallel_{gpu}.json"
        assert "\n".join(table(json.loads(file.read_text())["rows"], ranks)) in page


def test_every_result_on_the_page_has_a_record():
    text = "".join((ROOT / page).read_text() for page in PAGES)
    results = sorted((ROOT / "benchmarks" / "results").iterdir())
    assert [p.name for p in results if f"benchmarks/results/{p.name})" not in text] == []
    assert sum(path.stat().st_size for path in results) < LARGEST_RESULTS


def test_paths_exist():
    paths = [text for page in GUIDES for text in code(page) if looks_like_a_path(text)]
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_tests_exist():
    texts = [text for page in GUIDES for text in code(page)]
    names = [text.split("::") for text in texts if text.startswith("tests/") and "::" in text]
    assert len(names) > 30
    missing = [n for n in names if f"def {n[1]}(" not in (ROOT / n[0]).read_text()]
    assert missing == []


def test_every_variable_is_in_the_table():
    """Of those that Python and the build read from the environment."""
    read = re.compile(r"""(?:environ(?:\.get)?[(\[]|in os\.environ|ENV\{)\W*(FLASH_CUTE_\w+)""")
    files = [*ROOT.glob("**/*.py"), *ROOT.glob("cmake/*.cmake"), *ROOT.glob("third_party/*.cmake")]
    files = [file for file in files if not file.relative_to(ROOT).as_posix().startswith("build/")]
    names = set().union(*(read.findall(file.read_text()) for file in files))
    names |= {"FLASH_CUTE_BUILD", "FLASH_CUTE_CUDA_ARCHS"}  # a loop of CMake's
    table = (ROOT / "docs" / "environment.md").read_text()
    rows = set(re.findall(r"^\| `(FLASH_CUTE_\w+)`", table, re.MULTILINE))
    assert names - {"FLASH_CUTE_TIMING"} <= rows
    text = "".join(file.read_text() for file in [*files, ROOT / "cmake" / "targets.cmake"])
    assert [name for name in rows if name not in text] == []


def test_the_site_builds_without_warnings(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    pages = [page.removeprefix("docs/").removesuffix(".md") for page in DOCS]
    built = [tmp_path / page.removesuffix("index") / "index.html" for page in pages]
    assert [page for page in built if not page.is_file()] == []
    assert "flash_attention_forward" in (tmp_path / "reference" / "index.html").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page):
    folder = (ROOT / page).parent
    text = FENCE.sub("", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = folder / path if path else ROOT / page
        assert linked.exists() or target in MADE_ON_A_GPU, target
        assert not anchor or anchor in heading_anchors(linked), target


def test_example_of_the_readme_runs(capsys):
    fences = FENCE.findall((ROOT / "README.md").read_text())
    (example,) = (body for language, body in fences if language == "python")
    assert len(example.splitlines()) <= 10
    exec(example, {})
    assert "torch.Size([2, 500, 8, 64])" in capsys.readouterr().out


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_examples_of_the_guides_run(page, tmp_path, monkeypatch):
    """Each alone, as a reader copies it, but those with a mark that says why not."""
    monkeypatch.chdir(tmp_path)
    for mark, body in PYTHON.findall((ROOT / page).read_text()):
        if not mark:
            exec(body, {})


def test_marks_stand_above_few_examples():
    blocks = [block for page in PAGES for block in PYTHON.findall((ROOT / page).read_text())]
    assert len(blocks) > 25
    assert sum(bool(mark) for mark, _ in blocks) <= 3

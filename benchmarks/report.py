"""Reports: JSON, tables and plots of what was measured.

`python -m benchmarks.report F.json [--markdown] [--plot F.png]` makes them again from the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from .rivals import OURS
from .timing import Monitor

_WIDEST = 400  # columns of any table
_OURS_COLOUR = "#d1495b"
_RIVAL_COLOURS = ("#2e4057", "#66819b", "#9fb3c8", "#c9d3dd", "#7a7f87", "#b5b8bd")


def machine(device: torch.device, monitor: Monitor) -> dict[str, Any]:
    """Where the run takes place; what NVML would tell is None without it, `nvml` says why."""
    known: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "sm_count": None,
        "driver": monitor.driver,
        "power_limit_w": monitor.power_limit_w,
        "power_kind": monitor.power_kind,
        "nvml": monitor.reason or "read",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known.update(device=properties.name, sm_count=properties.multi_processor_count)
    return known


def versions(candidates: Mapping[str, str]) -> dict[str, Any]:
    """Python, torch, CUDA, cuDNN and each candidate."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **candidates,
    }


def compare(entries: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, float | None]:
    """(best rival, rate of ours / rate of the best rival); None where there is no right result."""
    rates = {n: e["rate"] for n, e in entries.items() if e["status"] == "ok"}
    ours = rates.pop(OURS, None)
    if not rates:
        return None, None
    best = max(rates, key=lambda name: rates[name])
    return best, None if ours is None else ours / rates[best]


def save(result: Mapping[str, Any], path: Path) -> None:
    """Writes the JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    text = json.dumps(result, separators=(",", ":"), allow_nan=False)  # indented it has half more
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, path)


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _names(result: Mapping[str, Any]) -> list[str]:
    """The candidates in order of appearance, ours first."""
    seen = {name: None for row in result["results"] for name in row["candidates"]}
    return sorted(seen, key=lambda name: name != OURS)


def _is_in_ms(result: Mapping[str, Any]) -> bool:
    """Whether times are shown instead of rates: on a CPU, whose peak nobody compares them with."""
    return result["machine"]["sm_count"] is None


def _cell(entry: Mapping[str, Any] | None, in_ms: bool = False) -> str:
    """The rate, or the time; of a case with a feature, its speed as a multiple of that without, in
    brackets."""
    if entry is None:
        return "-"
    if entry["status"] != "ok":
        return "n/a" if entry["status"] == "unsupported" else entry["status"]
    number = _number(entry["median_ms"] if in_ms else entry["rate"])
    return f"{number} ({entry['feature_speed']:.2f}x)" if "feature_speed" in entry else number


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _board(row: Mapping[str, Any]) -> str:
    """SM clock and power while ours ran."""
    entry = row["candidates"].get(OURS, {})
    if entry.get("clock_mhz") is None:
        return "-"
    return f"{entry['clock_mhz']:.0f} MHz, {entry['power_w']:.0f} W"


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows as text: rates, or on a CPU milliseconds, the best rival, speed of ours / of
    the best, clock and power of ours."""
    names, in_ms = _names(result), _is_in_ms(result)
    rows = [["case", "mode", "unit", *names, "best rival", "ratio", "ours at"]]
    for row in result["results"]:
        cells = [_cell(row["candidates"].get(name), in_ms) for name in names]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        unit, best = "ms" if in_ms else row["metric"], row["best_rival"] or "-"
        rows.append([row["case"], row["direction"], unit, *cells, best, ratio, _board(row)])
    return rows


def shared_words(cases: Iterable[str]) -> tuple[str, list[str]]:
    """The words that all cases have at the same place, and of each case the others."""
    split = [case.split() for case in cases]
    alike = [len(set(words)) == 1 for words in zip_longest(*split)]
    if len(split) < 2 or all(alike):
        return "", [" ".join(words) for words in split]
    shared = " ".join(word for word, is_alike in zip(split[0], alike, strict=False) if is_alike)
    rest = [[word for word, same in zip(x, alike, strict=False) if not same] for x in split]
    return shared, [" ".join(words) for words in rest]


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What the table leaves out: missing candidates, and each reason for a rate not given."""
    lines = [f"{name} is missing: {reason}" for name, reason in result["missing"].items()]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in result["results"]:
        for name, entry in row["candidates"].items():
            if entry["status"] != "ok":
                key = (name, entry["status"], entry["message"])
                reasons.setdefault(key, []).append(f"{row['case']} {row['direction']}")
    for (name, status, message), cases in reasons.items():
        where = cases[0] if len(cases) == 1 else f"{len(cases)} rows, first {cases[0]}"
        lines.append(f"{name} {status}: {message} ({where})")
    return lines


def _heading(result: Mapping[str, Any]) -> str:
    where, what, how = result["machine"], result["versions"], result["settings"]
    board = [where["device"]]
    if where["sm_count"] is not None:
        board.append(f"{where['sm_count']} SMs")
    if where["power_limit_w"] is not None:
        board.append(f"limit {where['power_limit_w']:.0f} W")
    if where["driver"] is not None:
        board.append(f"driver {where['driver']}")
    if where["nvml"] != "read" and not _is_in_ms(result):
        board.append(f"no clock, power and driver: {where['nvml']}")
    libraries = ", ".join(f"{name} {version}" for name, version in what.items() if version)
    rounds = f"{how['mode']}: medians of {how['rounds']} rounds of {how['round_ms']:.0f} ms"
    return f"{', '.join(board)}. {libraries}. {rounds}, {result['date']}."


def markdown(result: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    header, *rows = table(result)
    lines = [_heading(result), "", f"`{result['command']}`", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    if notes := remarks(result):
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def line(row: Mapping[str, Any], in_ms: bool = False) -> str:
    """One row while the run goes on."""
    entries = row["candidates"].items()
    cells = ", ".join(f"{name} {_cell(entry, in_ms)}" for name, entry in entries)
    ratio = f", {row['ratio']:.2f}x {row['best_rival']}" if row["ratio"] is not None else ""
    unit = "ms" if in_ms else row["metric"]
    return f"{row['case']} {row['direction']}: {cells} {unit}{ratio}"


def say(text: str) -> None:
    """Prints a line now, in a terminal folded between words."""
    if _is_terminal():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns, subsequent_indent="  ", break_on_hyphens=False)
    print(text, flush=True)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def show(result: Mapping[str, Any]) -> None:
    """Prints the report: in a terminal a table of the package rich if installed, else Markdown."""
    if not _is_terminal() or find_spec("rich") is None:
        print(markdown(result), end="")
        return
    from rich.console import Console
    from rich.table import Table

    def grid(title: str, header: list[str], rows: list[list[str]]) -> Table:
        made = Table(*header, title=title or None, title_justify="left")
        for cells in rows:
            made.add_row(*cells)
        return made

    console = Console()
    header, *rows = table(result)
    whole = grid("", header, rows)
    fits = console.measure(whole, options=console.options.update(width=_WIDEST)).maximum
    console.print(_heading(result), markup=False, highlight=False)
    console.print(whole if fits <= console.width else grid(*_short_table(result)))
    for note in remarks(result):
        console.print(note, markup=False, highlight=False)


def _short_table(result: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """What all rows share, then the table without it: words of the cases, and columns whose cells
    are all alike, other than a candidate's."""
    header, *rows = table(result)
    shared, cases = shared_words(row[0] for row in rows)
    rows = [[case, *row[1:]] for case, row in zip(cases, rows, strict=True)]
    said = [shared] if shared else []
    for name in ("unit", "ours at"):
        place = header.index(name)
        values = {row[place] for row in rows}
        if len(values) == 1:
            said += [f"in {value}" for value in values if value != "-"]
            header = header[:place] + header[place + 1 :]
            rows = [row[:place] + row[place + 1 :] for row in rows]
    return ", ".join(said), header, rows


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Grouped bars of every candidate's rate, or on a CPU its time: a group a case, a panel a
    direction.

    The file's ending chooses the format. Raises ModuleNotFoundError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install matplotlib") from None
    names, in_ms = _names(result), _is_in_ms(result)
    panels = {
        direction: [row for row in result["results"] if row["direction"] == direction]
        for direction in ("fwd", "bwd")
    }
    panels = {direction: rows for direction, rows in panels.items() if rows}
    tallest = max((len(rows) for rows in panels.values()), default=1)
    height = 1.4 + tallest * (0.17 * len(names) + 0.15)
    figure = Figure(figsize=(3 + 5.5 * len(panels), height), layout="constrained")
    for number, (direction, rows) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), number + 1)
        _panel(axes, rows, names, in_ms)
        shared, _ = shared_words(row["case"] for row in rows)
        words = {"fwd": "forward", "bwd": "backward"}[direction]
        axes.set_title(f"{words}, {shared}" if shared else words, loc="left", fontsize=9)
        if number and [r["case"] for r in rows] == [r["case"] for r in panels["fwd"]]:
            axes.tick_params(labelleft=False)  # the first panel names the same cases
    if panels:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(names), frameon=False)
    figure.supxlabel(_heading(result), fontsize=6, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, rows: list[dict[str, Any]], names: list[str], in_ms: bool) -> None:
    """Horizontal bars, so that the cases' names stay readable; ours carries its number."""
    value = "median_ms" if in_ms else "rate"
    step = 0.84 / len(names)
    rivals = iter(_RIVAL_COLOURS * len(names))
    for place, name in enumerate(names):
        entries = [row["candidates"].get(name, {"status": "-"}) for row in rows]
        rates = [e[value] if e["status"] == "ok" else 0.0 for e in entries]
        middles = [group - 0.42 + step * (place + 0.5) for group in range(len(rows))]
        colour = _OURS_COLOUR if name == OURS else next(rivals)
        axes.barh(middles, rates, height=0.92 * step, color=colour, label=name)
        for middle, rate, entry in zip(middles, rates, entries, strict=True):
            text = _cell(entry, in_ms)
            if name == OURS or entry["status"] != "ok":
                axes.text(rate, middle, f" {text}", va="center", fontsize=6, color=colour)
    _, cases = shared_words(row["case"] for row in rows)
    axes.set_yticks(range(len(rows)), cases, fontsize=7)
    axes.invert_yaxis()
    units = {"ms"} if in_ms else {row["metric"] for row in rows}
    axes.set_xlabel(", ".join(sorted(units)))
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str] | None = None) -> int:
    """The command that makes tables and plots from a JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON written by benchmarks.attention")
    parser.add_argument("--match", default="", help="regular expression: these cases only")
    parser.add_argument("--markdown", action="store_true", help="Markdown instead of a rich table")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    options = parser.parse_args(argv)
    result = load(options.file)
    rows = [row for row in result["results"] if re.search(options.match, row["case"])]
    result = {**result, "results": rows}
    if options.markdown:
        print(markdown(result), end="")
    elif not options.plot:
        show(result)
    if options.plot:
        plot(result, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

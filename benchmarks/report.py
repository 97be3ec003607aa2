"""Reports: JSON, tables and plots of what was measured.

`python -m benchmarks.report F.json [--markdown] [--plot F.png]` makes them again from the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .rivals import OURS
from .timing import Monitor

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


def _cell(entry: Mapping[str, Any] | None) -> str:
    """The rate; of a case with a feature, its speed as a multiple of that without, in brackets."""
    if entry is None:
        return "-"
    if entry["status"] != "ok":
        return "n/a" if entry["status"] == "unsupported" else entry["status"]
    rate = _number(entry["rate"])
    return f"{rate} ({entry['feature_speed']:.2f}x)" if "feature_speed" in entry else rate


def _number(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _board(row: Mapping[str, Any]) -> str:
    """SM clock and power while ours ran."""
    entry = row["candidates"].get(OURS, {})
    if entry.get("clock_mhz") is None:
        return "-"
    return f"{entry['clock_mhz']:.0f} MHz, {entry['power_w']:.0f} W"


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows as text: rates, the best rival, ours / best, clock and power of ours."""
    names = _names(result)
    rows = [["case", "mode", "unit", *names, "best rival", "ratio", "ours at"]]
    for row in result["results"]:
        cells = [_cell(row["candidates"].get(name)) for name in names]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        best = row["best_rival"] or "-"
        rows.append(
            [row["case"], row["direction"], row["metric"], *cells, best, ratio, _board(row)]
        )
    return rows


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
    if where["nvml"] != "read":
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


def line(row: Mapping[str, Any]) -> str:
    """One row while the run goes on."""
    cells = " ".join(f"{name} {_cell(entry)}" for name, entry in row["candidates"].items())
    ratio = "" if row["ratio"] is None else f" ({row['ratio']:.2f} of {row['best_rival']})"
    return f"{row['case']} {row['direction']}: {cells} {row['metric']}{ratio}"


def show(result: Mapping[str, Any]) -> None:
    """Prints the report: in a terminal a table of the package rich if installed, else Markdown."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        print(markdown(result), end="")
        return
    from rich.console import Console
    from rich.table import Table

    header, *rows = table(result)
    grid = Table(*header, title=_heading(result), title_justify="left")
    for cells in rows:
        grid.add_row(*cells)
    console = Console()
    console.print(grid)
    for note in remarks(result):
        console.print(note, markup=False, highlight=False)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Grouped bars of every candidate's rate, a group a case and a panel a direction.

    The file's ending chooses the format. Raises ModuleNotFoundError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install matplotlib") from None
    names = _names(result)
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
        _panel(axes, rows, names)
        axes.set_title({"fwd": "forward", "bwd": "backward"}[direction], loc="left")
        if number and [r["case"] for r in rows] == [r["case"] for r in panels["fwd"]]:
            axes.tick_params(labelleft=False)  # the first panel names the same cases
    if panels:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(names), frameon=False)
    figure.supxlabel(_heading(result), fontsize=6, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Horizontal bars, so that the cases' names stay readable; ours carries its number."""
    step = 0.84 / len(names)
    rivals = iter(_RIVAL_COLOURS * len(names))
    for place, name in enumerate(names):
        entries = [row["candidates"].get(name, {"status": "-"}) for row in rows]
        rates = [e["rate"] if e["status"] == "ok" else 0.0 for e in entries]
        middles = [group - 0.42 + step * (place + 0.5) for group in range(len(rows))]
        colour = _OURS_COLOUR if name == OURS else next(rivals)
        axes.barh(middles, rates, height=0.92 * step, color=colour, label=name)
        for middle, rate, entry in zip(middles, rates, entries, strict=True):
            text = _cell(entry)
            if name == OURS or entry["status"] != "ok":
                axes.text(rate, middle, f" {text}", va="center", fontsize=6, color=colour)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(", ".join(sorted({row["metric"] for row in rows})))
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str] | None = None) -> int:
    """The command that makes tables and plots from a JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON written by benchmarks.attention")
    parser.add_argument("--markdown", action="store_true", help="Markdown instead of a rich table")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    options = parser.parse_args(argv)
    result = load(options.file)
    if options.markdown:
        print(markdown(result), end="")
    elif not options.plot:
        show(result)
    if options.plot:
        plot(result, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

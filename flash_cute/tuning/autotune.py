"""Measure, derive rules, judge them on other shapes, and write what pays."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

from flash_cute import kernels
from flash_cute.kernels import Gpu, Problem, calibration
from flash_cute.kernels.choice import Choice
from flash_cute.kernels.plans import as_gpu, is_count
from flash_cute.native import limits
from flash_cute.tuning import rules
from flash_cute.tuning.clock import Clock, CudaClock, check_plain
from flash_cute.tuning.report import Report

_log = logging.getLogger("flash_cute")
_VALIDATION, _UNSEEN = 5 / 4, 23 / 16  # times the lengths of what is fitted
_SHORT = 64  # lengths below stay as they are


def autotune(
    problems: Sequence[Problem],
    validation: Sequence[Problem] | None = None,
    unseen: Sequence[Problem] | None = None,
    path: str | os.PathLike[str] | None = None,
    rounds: int = 9,
    clock: Clock | None = None,
    gpu: Gpu | str | None = None,
    progress: Callable[[int, int, Problem], None] | None = None,
) -> Report:
    """Measures every kernel that can do the problems, and writes a calibration file if it pays.

    Where the usual kernel of a forward has few tiles, it and its alternatives are also measured
    with the values of ``num_splits`` and ``pack_gqa`` that they can have: powers of two.

    Calls use the file after :func:`flash_cute.kernels.use_calibration`, never by themselves. While
    this runs, no call of this process uses a calibration, and :func:`flash_cute.kernels.only`
    around it holds for nothing.

    Args:
        problems: dense calls, full or causal, to which rules are fitted.
        validation: shapes that decide which rules are kept. By default the same with lengths times
            5/4, or divided by that where times leads to another bucket.
        unseen: shapes that the report is about, and that decide whether the file is written. By
            default lengths times 23/16. Shapes that stand in ``problems`` or ``validation`` are
            left out.
        path: the file; by default ``$FLASH_CUTE_CALIBRATION``, or
            ``~/.cache/flash_cute/calibration.json``. What it holds of other buckets stays.
        rounds: turns of each choice, interleaved; the median counts.
        clock: where times come from; by default :class:`flash_cute.tuning.clock.CudaClock`.
        gpu: what the times of another clock are of: a :class:`flash_cute.kernels.Gpu`, or a name in
            ``flash_cute.kernels.GPUS``.
        progress: called with problems done, their number, and the problem that is next.

    Returns:
        A :class:`flash_cute.tuning.Report`; ``print`` shows it. Where the file could not be written
        in the end, as another process keeps it locked, say, its ``not_written`` says why, and so
        does the logger ``flash_cute``.

    Raises:
        RuntimeError: there is no GPU, and no clock is given; or no kernel can do a problem.
        NotImplementedError: a problem has options that the tuner does not measure.
        ValueError: there is no problem, or something else than problems; rounds is below 1;
            ``path`` cannot be written; ``gpu`` is unknown, or does not go with ``clock``; or the
            clock gave a time that is not above 0.

    Example::

        from flash_cute import autotune, kernels

        shapes = [kernels.Problem(batch=4, heads=16, seqlen_q=n) for n in (1024, 4096)]
        print(autotune(shapes, path="calibration.json"))
        kernels.use_calibration("calibration.json")
    """
    _check_problems(problems=problems, validation=validation, unseen=unseen)
    if not is_count(rounds):
        raise ValueError(f"rounds is {rounds!r}; expected an int of at least 1")
    path = calibration.checked_path(path)
    if (clock is None) != (gpu is None):
        raise ValueError("gpu goes with clock: give both, or neither for the current GPU")
    began = time.perf_counter()
    clock = CudaClock() if clock is None else clock
    facts = kernels.gpu() if gpu is None else as_gpu(gpu)
    fitted = list(dict.fromkeys(problems))
    checks = _others(validation, fitted, _VALIDATION, gpu, ())
    judged = _others(unseen, fitted, _UNSEEN, gpu, checks)
    everything = [*fitted, *checks, *judged]
    for problem in everything:
        check_plain(problem)
    measured = []
    with calibration.set_aside(), limits.limited(""):
        for done, problem in enumerate(everything):
            if progress:
                progress(done, len(everything), problem)
            measured.append(_measure(problem, clock, gpu, rounds))
    if progress:
        progress(len(everything), len(everything), everything[-1])
    end = len(fitted) + len(checks)
    found = rules.derive(measured[: len(fitted)], measured[len(fitted) : end])
    report = Report(
        found, tuple(rules.apply(found, x) for x in measured[end:]), len(everything),
        time.perf_counter() - began, None,
    )  # fmt: skip
    if not report.pays:
        return report
    buckets = {bucket: choice.entry for bucket, choice in found.items()}
    try:
        return replace(report, path=calibration.store(facts, buckets, path))
    except (TimeoutError, ValueError) as error:  # what was measured is not lost
        _log.warning("calibration not written: %s", error)
        return replace(report, not_written=str(error))


def _check_problems(**given: Sequence[Problem] | None) -> None:
    for name, some in given.items():
        if some is None and name != "problems":
            continue
        if not (isinstance(some, Sequence) and all(isinstance(x, Problem) for x in some)):
            raise ValueError(f"{name} is {some!r}; expected a sequence of Problem")
    if not given["problems"]:
        raise ValueError("problems is empty; expected at least one Problem")


def _measure(problem: Problem, clock: Clock, gpu: Gpu | str | None, rounds: int) -> rules.Measured:
    default = kernels.plan(problem, gpu).kernel.id
    fitting = [row.id for row in kernels.explain(problem, gpu) if row.verdict != "refused"]
    # Over a cache a kernel of forward is a candidate where it is the default alone.
    ids = [i for i in fitting if i == default or i.startswith(problem.op)]
    choices = {Choice(i): Choice(i) for i in ids}  # each, and the choice that is measured for it
    if problem.op == "fwd":
        for i in _alternatives(default, ids):
            choices |= _with_numbers(problem, i, gpu)
    times = clock.measure(problem, list(dict.fromkeys(choices.values())), rounds)
    if bad := [t for some in times.values() for t in some if not 0 < t < math.inf]:
        raise ValueError(f"clock gave {bad[0]!r} for {problem}; expected milliseconds above 0")
    medians = {choice: median(times[timed]) for choice, timed in choices.items()}
    return rules.Measured(problem, kernels.bucket(problem, gpu), Choice(default), medians)


def _alternatives(default: str, ids: Sequence[str]) -> list[str]:
    """Kernels for Hopper that differ from the usual one in the rows of their tiles alone."""
    by_id = {kernel.id: kernel for kernel in kernels.kernels()}

    def kind(i: str) -> tuple[object, ...]:
        kernel = by_id[i]
        return kernel.arch, kernel.tier, kernel.head_dim, kernel.head_dim_v

    return [i for i in ids if by_id[i].arch == 90 and kind(i) == kind(default)]


def _with_numbers(problem: Problem, kernel: str, gpu: Gpu | str | None) -> dict[Choice, Choice]:
    """The kernel with each number that it can have for a forward, from 1 on in powers of two, and
    the choice that is measured for it: where it is the estimate's, the kernel alone."""
    with kernels.only(kernel):
        estimate = kernels.plan(problem, gpu)
    found: dict[Choice, Choice] = {}
    for name in ("num_splits", "pack_gqa"):
        for number in (1 << i for i in range(31)):
            choice = Choice(kernel, **{name: number})
            try:
                with kernels.only(kernel, **choice.numbers):
                    plan = kernels.plan(problem, gpu)
            except RuntimeError:  # nor can it have more
                break
            found[choice] = Choice(kernel) if plan == estimate else choice
    return found


def _others(
    given: Sequence[Problem] | None, fitted: Sequence[Problem], factor: float,
    gpu: Gpu | str | None, besides: Iterable[Problem],
) -> list[Problem]:  # fmt: skip
    shapes = [_near(x, factor, gpu) for x in fitted] if given is None else given
    known = {*fitted, *besides}
    return [x for x in dict.fromkeys(shapes) if x not in known]


def _near(problem: Problem, factor: float, gpu: Gpu | str | None) -> Problem:
    def scaled(by: float) -> Problem:
        sizes = {
            name: round(size * by)
            for name in ("seqlen_q", "seqlen_k")
            if (size := getattr(problem, name)) is not None and size >= _SHORT
        }
        return replace(problem, **sizes)

    longer, shorter = scaled(factor), scaled(1 / factor)
    here = kernels.bucket(problem, gpu)
    stays = kernels.bucket(longer, gpu) == here or kernels.bucket(shorter, gpu) != here
    return longer if stays else shorter

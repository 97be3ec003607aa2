"""The tuner: measures kernels, derives rules, validates them on other shapes, and writes them."""

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
from flash_cute.kernels.gpus import as_gpu
from flash_cute.kernels.plans import is_count
from flash_cute.native import limits
from flash_cute.tuning import rules
from flash_cute.tuning.clock import Clock, CudaClock, check_plain
from flash_cute.tuning.report import Report

_log = logging.getLogger("flash_cute")
_VALIDATION, _UNSEEN = 5 / 4, 23 / 16  # factors of the fitted problems' lengths
_SHORT = 64  # shorter lengths are not scaled


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
    """Measures all kernels that support the problems, and writes a calibration file if that pays.

    If the default kernel of a forward has few tiles, it and its alternatives are also measured with
    their possible values of ``num_splits`` and ``pack_gqa``: powers of two.

    Calls use the file only after :func:`flash_cute.kernels.use_calibration`. While this runs, no
    call of this process uses a calibration, and :func:`flash_cute.kernels.only` around it has no
    effect.

    Args:
        problems: dense calls, full or causal, to which rules are fitted.
        validation: shapes that decide which rules are kept. By default the problems with lengths
            times 5/4, or divided by it if the product is in another bucket.
        unseen: shapes of the report, which decide whether the file is written. By default lengths
            times 23/16. Shapes in ``problems`` or ``validation`` are left out.
        path: the file; by default ``$FLASH_CUTE_CALIBRATION``, or
            ``~/.cache/flash_cute/calibration.json``. Its other buckets are kept.
        rounds: turns of each choice, interleaved; the median is used.
        clock: the source of times; by default :class:`flash_cute.tuning.clock.CudaClock`.
        gpu: the GPU of another clock's times: a :class:`flash_cute.kernels.Gpu`, or a name in
            ``flash_cute.kernels.GPUS``.
        progress: called with the number of finished problems, of all problems, and the next one.

    Returns:
        A :class:`flash_cute.tuning.Report`; ``print`` shows it. If the file could not be written in
        the end, for instance because another process locked it, ``not_written`` says why, and so
        does the logger ``flash_cute``.

    Raises:
        RuntimeError: there is no GPU, and no clock is given; or no kernel supports a problem.
        NotImplementedError: a problem has options that the tuner does not measure.
        ValueError: there is no problem, or something other than problems; rounds is below 1;
            ``path`` cannot be written; ``gpu`` is unknown, or given without ``clock``; or the clock
            gave a time that is not above 0.

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
    with calibration.suspended(), limits.limit_kernels(""):
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
    except (TimeoutError, ValueError) as error:  # the report keeps the measurements
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
    # Over a cache a kernel of forward is a candidate only if it is the default.
    ids = [i for i in fitting if i == default or i.startswith(problem.op)]
    choices = {Choice(i): Choice(i) for i in ids}  # choice: the equivalent one that is measured
    if problem.op == "fwd":
        for i in _alternatives(default, ids):
            choices |= _with_numbers(problem, i, gpu)
    times = clock.measure(problem, list(dict.fromkeys(choices.values())), rounds)
    if bad := [t for some in times.values() for t in some if not 0 < t < math.inf]:
        raise ValueError(f"clock gave {bad[0]!r} for {problem}; expected milliseconds above 0")
    medians = {choice: median(times[timed]) for choice, timed in choices.items()}
    return rules.Measured(problem, kernels.bucket(problem, gpu), Choice(default), medians)


def _alternatives(default: str, ids: Sequence[str]) -> list[str]:
    """Kernels for Hopper that differ from the default one only in the rows of their tiles."""
    by_id = {kernel.id: kernel for kernel in kernels.kernels()}

    def kind(i: str) -> tuple[object, ...]:
        kernel = by_id[i]
        return kernel.arch, kernel.tier, kernel.head_dim, kernel.head_dim_v

    return [i for i in ids if by_id[i].arch == 90 and kind(i) == kind(default)]


def _with_numbers(problem: Problem, kernel: str, gpu: Gpu | str | None) -> dict[Choice, Choice]:
    """The kernel with each possible num_splits and pack_gqa for a forward, powers of two from 1 on,
    and the choice that is measured for it: the kernel alone if the numbers are its estimate."""
    with kernels.only(kernel):
        estimate = kernels.plan(problem, gpu)
    found: dict[Choice, Choice] = {}
    for name in ("num_splits", "pack_gqa"):
        for number in (1 << i for i in range(31)):
            choice = Choice(kernel, **{name: number})
            try:
                with kernels.only(kernel, **choice.numbers):
                    plan = kernels.plan(problem, gpu)
            except RuntimeError:  # larger numbers are not possible either
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

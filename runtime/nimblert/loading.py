"""`load` and `load_pool`: plan files to executables. They start a GPU before Python has imported numpy and the rest."""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module
from operator import call
from typing import TYPE_CHECKING, Any

from nimblert.errors import DeviceMismatchError, InputError, NimbleError, PlanInvalidError
from nimblert.stages import stage

if TYPE_CHECKING:
    from os import PathLike

    from nimblert.arena import Arena
    from nimblert.cpu.streams import Threads
    from nimblert.cuda import driver
    from nimblert.executable import Executable, ExecutablePool
    from nimblert.plan import Device, Plan
    from nimblert.plan.container import Source
    from nimblert.plan.records import Limits
    from nimblert.plan.signatures import FileOrBytes, Trust

_HEAD_NBYTES = 4096
_TARGET_FIELD = 4
"""The slot of Plan.target in schema/plan.fbs."""


def load(
    plan: "Plan | Source",
    *,
    program: str | None = None,
    device: int = 0,
    arena: "Arena | None" = None,
    threads: "Threads | None" = None,
    poison: bool = False,
    copy: bool = False,
    warm: bool = False,
    limits: "Limits | None" = None,
    target: str | None = None,
    trusted_keys: "Sequence[FileOrBytes] | None" = None,
    signature: "FileOrBytes | None" = None,
    weights: "str | PathLike[str] | None" = None,
) -> "Executable":
    """Load a plan on this machine: a `Plan`, the path of a plan file, or the bytes of one.

    The file is mapped, and a CPU plan uses its weights from there: it may be replaced while the executable lives, but
    not overwritten in place or truncated.

    - ``program``: the name of the only one to load, where the others will not be called.
    - ``device``: the ordinal of the GPU.
    - ``target``: "cuda" or "cpu". A fat plan (`nimblec merge`) is loaded from the first of its parts that runs on this
      machine, those for GPUs first; this forces one of a target, and another ``device`` than 0 one for that GPU.
      `Executable.choice` says which it is, and why.
    - ``arena``: scratch memory that plans share which run one after the other.
    - ``threads``: the number of threads that a CPU plan computes with, the caller's included. By default one for each
      core that the process may use. A list of processors also pins the threads; the first is the caller's, which is
      not moved.
    - ``poison``: fill memory that nothing should read with 0xFF bytes.
    - ``copy``: read the file into memory first, so that later changes to it do not matter.
    - ``warm``: load every program now, instead of each on its first call (`Context.warm`).
    - ``limits``: what the plan may ask of this machine, by default `Limits()`; one beyond them is refused before
      anything is allocated for it.
    - ``trusted_keys``: public Ed25519 keys in OpenSSH or PEM form, by path or as bytes. Unless one of them has signed
      the file (`nimblec sign`), it is refused before anything of it is parsed. It is read into memory, as with
      ``copy``. ``signature`` is the signature's file or bytes, by default the file PLAN.sig.
    - ``weights``: for a plan of `nimblec compile --strip-weights`, the file that holds its weights. They are compared
      with the digests in the plan, and used like those in a plan.

    Raises PlanError for a file that cannot be read or a plan that is damaged, contradicts itself or is beyond
    ``limits``, and its subclass PlanSignatureError for a file that no trusted key has signed; DeviceMismatchError where
    this machine cannot run it; CudaError where a call of CUDA fails, as for lack of memory; and InputError for an
    invalid argument.
    """
    with ExitStack() as started:
        if trusted_keys is None and signature is None and target != "cpu" and _is_for_gpu(plan):
            from nimblert.cuda import driver

            # The GPU takes longer to start than the imports and checks below.
            started.enter_context(driver.starting(device))
        with stage("import"):
            from nimblert.plan import Plan, Target, container
            from nimblert.plan.records import DEFAULT_LIMITS, Limits

        limits = DEFAULT_LIMITS if limits is None else limits
        if not isinstance(limits, Limits):
            raise InputError(f"limits: got {type(limits).__name__}, expected a nimblert.Limits")
        make = partial(_made, device=device, arena=arena, threads=threads, poison=poison, warm=warm, limits=limits)
        trust = _trust(trusted_keys, signature)
        if isinstance(plan, Plan) and plan.target is Target.FAT and trust is None:
            plan = plan.stored()
        if isinstance(plan, Plan):
            if trust is not None:
                raise InputError(
                    "trusted_keys: the plan is a Plan, which was parsed before: give its file, or its bytes"
                )
            _check_target(plan, target)
            return make(checked(plan, program, limits, weights, copy=copy))

        with stage("decode"):
            image, path = container.open_image(plan, copy=copy, trust=trust), container.name(plan)
            decoded = container.decoded(image, path, limits)
        choice, shared = "", None
        if decoded.target is Target.FAT:
            from nimblert import fitting
            from nimblert.plan import parts

            shared = decoded
            index, choice = fitting.choose(shared, target, device)
            decoded = parts.read(shared, index, path, limits)
            image, path = shared.parts[index].file, parts.name(path, index)
        _check_target(decoded, target)
        make = partial(make, choice=choice)
        # A signature covers the weights by their digests: later changes of their file must not matter either.
        check = partial(checked, decoded, program, limits, weights, copy=copy or trust is not None, shared=shared)
        verify_digest = partial(container.verify_digest, image, path, decoded)
        if decoded.target is Target.CPU:
            verify_digest()
            return make(check())
        return _on_gpu(decoded.device, device, verify_digest, check, make)


def _is_for_gpu(plan: "Plan | Source") -> bool:
    """Return whether the head of a plan file names the CUDA target; all of the file is checked later."""
    if not isinstance(plan, str | os.PathLike):
        return False
    try:
        with open(plan, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            head = file.read(_HEAD_NBYTES)
        (root,) = struct.unpack_from("<I", head)
        (distance,) = struct.unpack_from("<i", head, root)
        (place,) = struct.unpack_from("<H", head, root - distance + 4 + 2 * _TARGET_FIELD)
        # An absent field has the first value of the enum, CUDA.
        return head[4:8] == b"NPLN" and (not place or head[root + place] == 0)
    except (OSError, ValueError, struct.error, IndexError):
        return False


def _on_gpu(
    needed: "Device",
    ordinal: int,
    verify_digest: Callable[[], object],
    check: "Callable[[], Plan]",
    make: "Callable[..., Executable]",
) -> "Executable":
    """Load a plan while threads check it: nothing is allocated before it is ``check``ed.

    No code is loaded before the digest is verified, which takes longest where the file is large.
    """
    # CPU plans load without this import.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool, ExitStack() as started:
        # Futures in variables would form cycles with their errors, and keep a refused file mapped.
        digests = pool.map(call, [verify_digest])
        with stage("import numpy and the rest"):
            # `make` needs both. Threads that import side by side take longer.
            for module in ("nimblert.executable", "nimblert.cuda.backend"):
                import_module(module)
        checks = pool.map(call, [check])
        try:
            started.enter_context(closing(_start_device(needed, ordinal)))
            selected = next(checks)
        except NimbleError:
            # Damage is reported before the contradictions that it makes, and both before a fault of the machine.
            tuple(digests)
            tuple(checks)
            raise
        return make(selected, verify_digest=partial(next, digests))


def _trust(trusted_keys: "Sequence[FileOrBytes] | None", signature: "FileOrBytes | None") -> "Trust | None":
    if trusted_keys is None and signature is None:
        return None
    from nimblert.plan.signatures import Trust

    return Trust(() if trusted_keys is None else trusted_keys, signature)


@stage("check")
def checked(
    plan: "Plan",
    program: str | None,
    limits: "Limits",
    weights: "str | PathLike[str] | None" = None,
    *,
    copy: bool = False,
    shared: "Plan | None" = None,
) -> "Plan":
    """Return the plan with the program to load, or all, and with its ``weights`` where it was stripped of them.

    ``shared`` is the fat plan that the plan is a part of.
    Raises PlanInvalidError unless it is valid, InputError.
    """
    from nimblert.check import hazards, verify

    if shared is not None:
        from nimblert.plan import parts

        plan = parts.filled(plan, shared)
    if plan.is_stripped or weights is not None:
        from nimblert.plan import external

        plan = external.filled(plan, weights, copy=copy)
    verify.check(plan, limits)
    selected = _select(plan, program)
    for loaded in (*selected.programs, *selected.refits):
        if unordered := tuple(hazards.hazards(loaded, limits, target=plan.target, bodies=plan.bodies)):
            raise PlanInvalidError(unordered)
    return selected


def _select(plan: "Plan", name: str | None) -> "Plan":
    """Return the plan with the program called ``name`` alone, or as it is."""
    if name is None:
        return plan
    from dataclasses import replace

    for program in plan.programs:
        if program.name == name:
            return replace(plan, programs=(program,))
    raise InputError(f"program {name!r}: not found, the plan has {[p.name for p in plan.programs]}")


def _check_target(plan: "Plan", target: str | None) -> None:
    if target is None:
        return
    from nimblert import fitting

    if fitting.is_excluded(plan.target, target):
        raise InputError(f"target: got {target!r}, and the plan is for {plan.target.name.lower()} alone")


def _start_device(needed: "Device", ordinal: int) -> "driver.Context":
    """Start the GPU; the context keeps it running. Raises DeviceMismatchError unless plans for ``needed`` run there."""
    from nimblert.cuda import driver  # each target imports only what it runs on

    with stage("import the bindings"):
        driver.bindings()
    with stage("wait for the GPU"):
        driver.initialise()
        driver.check_device(needed, driver.describe(ordinal))
        return driver.Context(ordinal)


def _made(plan: "Plan", *, warm: bool, choice: str = "", **options: Any) -> "Executable":
    from nimblert.executable import Executable

    executable = Executable(plan, **options)
    executable.choice = choice
    if warm:
        try:
            executable.warm()
        except BaseException:
            executable.close()
            raise
    return executable


def load_pool(plan: "Plan | Source", *, devices: Sequence[int] | None = None, **options: Any) -> "ExecutablePool":
    """Load a plan on the GPUs with the ordinals ``devices``, or on all that can run it; `load` has the ``options``.

    A plan for the CPU, which uses all cores by itself, is loaded once. Raises InputError for a plan with state, and
    what `load` raises where one of the given devices, or no device at all, can run the plan.
    """
    from nimblert.executable import ExecutablePool
    from nimblert.plan import Target
    from nimblert.plan.records import is_integer

    if not (devices is None or (isinstance(devices, Sequence) and devices and all(map(is_integer, devices)))):
        raise InputError(f"devices: got {devices!r}, expected ordinals of GPUs")
    with ExitStack() as loaded:
        found: list[Executable] = []
        for device in _ordinals() if devices is None else devices:
            try:
                found.append(loaded.enter_context(load(plan, device=int(device), **options)))
                if found[0].plan.target is Target.CUDA:
                    options["target"] = "cuda"  # a fat plan's part for the CPU stands beside no GPU
            except DeviceMismatchError:
                if devices is not None:
                    raise
            if found and found[0].plan.target is Target.CPU:
                break
        # Where no device can run the plan, this load raises the error of the first one.
        pool = ExecutablePool(found or [load(plan, **options)])
        loaded.pop_all()
    return pool


def _ordinals() -> Iterator[int]:
    """Yield the ordinals of all GPUs: the first one before CUDA starts, which a plan for the CPU does without."""
    yield 0
    from nimblert.cuda import driver

    driver.initialise()
    yield from range(1, driver.count())

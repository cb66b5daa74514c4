"""Merge plans of one model for several machines into one file; `nimblert.plan.parts` reads it."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike

from nimblec.base.installation import VERSION
from nimblec.plan import encoder, interface
from nimblert.check.verify import read_plan
from nimblert.errors import InputError
from nimblert.plan import Device, Part, Plan, Target, Weight
from nimblert.plan.parts import describe

_LEAST_SHARED_NBYTES = 4096
"""A reference to a smaller weight saves too little, once it is aligned."""

_ALIGNMENT = 256


def merge(paths: Sequence[str | PathLike[str]], output: str | PathLike[str]) -> Plan:
    """Write the plans at ``paths`` to one file, which holds weights of several of them once, and return it.

    A plan that shares no weights with others stays as it is, byte for byte. Raises InputError where the plans differ in
    their interfaces, two run on the same machines, or one was stripped of its weights; nothing is written then.
    """
    plans = [read_plan(path) for path in paths]
    _check(plans, paths)
    fat = merged(plans)
    encoder.write(fat, output)
    return fat


def merged(plans: Sequence[Plan]) -> Plan:
    """Return a fat plan of plans that were read from files; whether they belong together is not checked."""
    large = [[weight for weight in plan.weights if weight.data.nbytes >= _LEAST_SHARED_NBYTES] for plan in plans]
    digests = [{id(weight): hashlib.sha256(weight.data).digest() for weight in weights} for weights in large]
    counts = Counter(digest for of_plan in digests for digest in set(of_plan.values()))
    shared: dict[bytes, Weight] = {}
    parts = []
    for plan, of_plan in zip(plans, digests, strict=True):
        # A weight that several plans have is a reference to its bytes.
        found = [(weight, of_plan.get(id(weight), b"")) for weight in plan.weights]
        weights = [replace(w, data=memoryview(b""), sha256=digest) if counts[digest] > 1 else w for w, digest in found]
        shared |= {new.sha256: old for new, old in zip(weights, plan.weights, strict=True) if new.sha256}
        is_whole = not any(weight.sha256 for weight in weights)
        file = plan.stored() if is_whole else memoryview(encoder.encode_file(replace(plan, weights=tuple(weights))))
        parts.append(Part(target=plan.target, device=plan.device, file=file))
    held, nbytes = _placed(shared.items())
    return Plan(
        producer=f"nimblec {VERSION}",
        versions=(),
        target=Target.FAT,
        device=Device(name=""),
        modules=(),
        kernels=(),
        weights_nbytes=nbytes,
        weights=held,
        state_nbytes=0,
        state=(),
        programs=(),
        parts=tuple(parts),
    )


def _placed(shared: Iterable[tuple[bytes, Weight]]) -> tuple[tuple[Weight, ...], int]:
    """Return the shared weights at places of their own, and the end of the last one."""
    held, end = [], 0
    for digest, weight in shared:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        nbytes = weight.data.nbytes
        # As bytes: plans may share the bytes and differ in shapes.
        held.append(Weight(name=digest.hex(), dtype="uint8", shape=(nbytes,), offset=start, data=weight.data.cast("B")))
        end = start + nbytes
    return tuple(held), end


def _check(plans: Sequence[Plan], paths: Sequence[str | PathLike[str]]) -> None:
    first, *others = zip(map(str, paths), plans, strict=True)
    if not others:
        raise InputError(f"{first[0]}: is the only plan, expected two at least")
    machines: dict[tuple[object, ...], str] = {}
    for path, plan in (first, *others):
        if plan.is_stripped:
            raise InputError(f"{path}: does not hold its weights: merge plans that do")
        machine = (plan.target, plan.device.compute_capability, plan.device.driver_version)
        if machine in machines:
            what = describe(plan.target, plan.device)
            raise InputError(f"{machines[machine]} and {path} are both for {what}: leave one out")
        machines[machine] = path
    expected = interface.of_plan(first[1])
    for path, plan in others:
        found = interface.of_plan(plan)
        for what in dict.fromkeys((*expected, *found)):
            if expected.get(what) != found.get(what):
                one, other = (facts.get(what, "none") for facts in (expected, found))
                raise InputError(f"{first[0]} and {path} differ in {what}: {one}, and {other}")

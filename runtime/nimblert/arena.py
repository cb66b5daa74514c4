"""Arena: scratch memory that contexts of several plans use in turn."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from nimblert.errors import InputError
from nimblert.plan import Plan, Target
from nimblert.plan.records import is_integer

if TYPE_CHECKING:
    from nimblert.plan.container import Source


class Arena:
    """Scratch memory for plans of one target that run one after the other, as large as the largest of them needs.

    Nothing in it outlives a run: inputs, outputs, weights and state have memory of their own. `nimblert.load` and
    `Executable.context` take it. Close it after the contexts that use it: their later runs raise InputError.
    """

    def __init__(self, nbytes: int, *, target: str = "cuda", device: int = 0) -> None:
        """Allocate ``nbytes`` on GPU ``device`` ("cuda") or on the host ("cpu"). Raises InputError."""
        targets = {kind.name.lower(): kind for kind in Target}
        if target not in targets:
            raise InputError(f"target {target!r}: expected one of {sorted(targets)}")
        if not is_integer(nbytes) or nbytes < 0:
            raise InputError(f"arena: got {nbytes!r} bytes, expected a whole number of at least 0")
        self.nbytes = int(nbytes)
        self.target = targets[target]
        self.device = device
        self._lock = threading.Lock()
        self.stepping: object = None
        """The context whose run by steps is half done, if any."""
        self.memory: Any = None
        """An array of bytes, or a `nimblert.cuda.working.DeviceArena`."""
        if self.target is Target.CPU:
            from nimblert.cpu.host_memory import allocate

            self.memory = allocate(self.nbytes)
        else:
            from nimblert.cuda.working import DeviceArena

            self.memory = DeviceArena(self.nbytes, device)

    @classmethod
    def for_plans(cls, *plans: "Plan | Source", device: int = 0) -> Self:
        """Return an arena as large as the largest of these plans needs. Raises InputError, PlanError."""
        from nimblert.check.verify import read_plan

        parsed = [plan if isinstance(plan, Plan) else read_plan(plan) for plan in plans]
        targets = {plan.target for plan in parsed}
        if len(targets) != 1:
            raise InputError("an arena takes one plan or several, all of one target")
        return cls(max(plan.arena_nbytes for plan in parsed), target=targets.pop().name.lower(), device=device)

    def check(self, plan: Plan, device: int) -> None:
        """Raise InputError where a plan on this device cannot use it."""
        self.check_open()
        if (self.target, self.device) != (plan.target, device):
            here, there = (
                f"{t.name.lower()} device {n}" for t, n in ((self.target, self.device), (plan.target, device))
            )
            raise InputError(f"the arena is on {here}, the plan runs on {there}")
        if self.nbytes < plan.arena_nbytes:
            raise InputError(
                f"the arena has {self.nbytes} bytes, the plan needs {plan.arena_nbytes}: make it for this plan, too"
            )

    def check_open(self) -> None:
        """Raise InputError once it is closed."""
        if self.memory is None:
            raise InputError("the arena is closed: make another one, and load the plan into it")

    @contextmanager
    def used_by(self, context: object) -> Iterator[None]:
        """Hold the arena for a run of this context. Raises InputError during another one's, and once it is closed."""
        if not self._lock.acquire(blocking=False):
            raise _in_use()
        try:
            self.check_open()
            if self.stepping not in {None, context}:
                raise _in_use()
            yield
        finally:
            self._lock.release()

    def end_steps(self, context: object) -> None:
        """Note that no run by steps of this context is half done any more."""
        if self.stepping is context:
            self.stepping = None

    def close(self) -> None:
        """Free the memory; calling it twice is harmless."""
        if self.memory is not None and self.target is not Target.CPU:
            self.memory.close()
        self.memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_use() -> InputError:
    return InputError("the arena is in use by another context: run one after the other")

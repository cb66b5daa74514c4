"""Choose tilings of our own kernels by timing them; times are remembered between compilations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from typing import Generic, Protocol, Self, TypeVar

import torch

from nimblec.kernels.choosing import Choice, Timer, choose, rank
from nimblec.kernels.compiling import Job, compile_all
from nimblec.kernels.launching import Trigger
from nimblec.kernels.timing import GraphTimer

THEIRS = "framework"
HOPPER = (9, 0)
"""The first with programmatic dependent launch."""

Call = Callable[[int], object]


class Times(Protocol):
    """Measured nanoseconds by key, as `nimblec.timing_cache.TimingCache` keeps them between compilations."""

    def __contains__(self, key: str) -> bool:
        """Whether a time is known."""

    def __getitem__(self, key: str) -> int:
        """The time."""

    def __setitem__(self, key: str, duration_ns: int) -> None:
        """Note a time."""


class Asked(Protocol):
    """A request for one launch."""

    @property
    def signature(self) -> str:
        """What tells requests apart."""


class Cut(Protocol):
    """A tiling."""

    @property
    def numbers(self) -> list[int]:
        """What an op takes as its tiling."""


Request = TypeVar("Request", bound=Asked)
Tiling = TypeVar("Tiling", bound=Cut)


class TilingSelector(Generic[Request, Tiling]):
    """Equal requests are timed once; ``choices`` tells what came out. Its kinds say how to make the calls."""

    def __init__(
        self,
        timer: Timer,
        *,
        screen: Timer | None = None,
        times: Times | None = None,
        machine: str = "",
        trigger: Trigger = "late",
        compile_jobs: Callable[[Sequence[Job]], None] = compile_all,
    ) -> None:
        """``screen`` is a quicker timer to sort candidates out with, ``times`` what is known of ``machine``."""
        self._timer = timer
        self._screen = screen
        self._times: Times = {} if times is None else times
        self._machine = machine
        self._compile = compile_jobs
        self.trigger = trigger
        self.choices: dict[str, Choice] = {}

    @classmethod
    def prepared(cls, requests: Iterable[Request], template: str, times: Times | None, trigger: Trigger) -> Self:
        """A selector that times on this GPU, the candidates of ``requests`` compiled."""
        timer = GraphTimer()
        selector = cls(timer, screen=timer.screen(), times=times, machine=machine(template), trigger=trigger)
        selector.prepare(requests)
        return selector

    def tilings(self, request: Request) -> Sequence[Tiling]:
        """The candidates, the most promising first."""
        raise NotImplementedError

    def job(self, request: Request, tiling: Tiling) -> Job:
        """What our call launches."""
        raise NotImplementedError

    def theirs(self, request: Request) -> Call | None:
        """The framework's call; None where ours are compared with each other alone."""
        raise NotImplementedError

    def ours(self, request: Request, tiling: Tiling) -> Call:
        """Our call."""
        raise NotImplementedError

    def prepare(self, requests: Iterable[Request]) -> None:
        """Compile all that will be launched side by side: what is chosen already, or else all candidates."""
        jobs = []
        for key, request in {request.signature: request for request in requests}.items():
            named = self._named(request)
            known = self._known(key, named)
            jobs += [self.job(request, named[name]) for name in named if known is None or name == known.best]
        if jobs:
            self._compile(jobs)

    def __call__(self, request: Request) -> Tiling | None:
        """The fastest tiling; None where the framework's call is as fast."""
        key, named = request.signature, self._named(request)
        if key not in self.choices:
            self.choices[key] = self._known(key, named) or self._measured(key, request, named)
        return named.get(self.choices[key].best)

    def _named(self, request: Request) -> dict[str, Tiling]:
        return {"x".join(map(str, tiling.numbers)): tiling for tiling in self.tilings(request)}

    def _known(self, key: str, named: Iterable[str]) -> Choice | None:
        sides = {side: self._side(key, side) for side in (THEIRS, *named)}
        times = {side: self._times[at] / 1000 for side, at in sides.items() if at in self._times}
        return rank(times) if len(times) > 1 else None

    def _measured(self, key: str, request: Request, named: Mapping[str, Tiling]) -> Choice:
        theirs = self.theirs(request)
        sides: dict[str, Call] = {} if theirs is None else {THEIRS: theirs}
        sides |= {name: self.ours(request, tiling) for name, tiling in named.items()}
        choice = choose(sides, self._timer, screen=self._screen)
        for side, microseconds in choice.microseconds.items():
            self._times[self._side(key, side)] = round(1000 * microseconds)
        return choice

    def _side(self, key: str, side: str) -> str:
        return sha256(repr((self._machine, self.trigger, key, side)).encode()).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """As Triton has it: "float16"."""
    return str(dtype).removeprefix("torch.")


def machine(template: str) -> str:
    """What times hang on beside the request: the device, the libraries, the code of a template."""
    from triton import __version__ as triton_version

    code = files("nimblec.kernels").joinpath(f"{template}_template.py").read_bytes()
    versions = torch.__version__, triton_version, torch.backends.cudnn.version()
    return repr((torch.cuda.get_device_name(), *versions, sha256(code).hexdigest()))

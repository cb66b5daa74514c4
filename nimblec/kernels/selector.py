"""Choose tilings by timing calls; times are kept between compilations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.resources import files
from itertools import chain
from typing import Generic, Protocol, TypeVar

import torch
from torch import fx

from nimblec.kernels.call import Call, Pool
from nimblec.kernels.choosing import Choice, Timer, Times, choose, key_of, rank
from nimblec.kernels.compiling import Compile, Job, compile_all, compiler
from nimblec.kernels.gpu import GPU, Trigger
from nimblec.kernels.tilings import NumberedTiling

FRAMEWORK = "framework"

Timed = Callable[[int], object]
"""A call that takes the number of the copy of its weights."""


class HasSignature(Protocol):
    """A request for one launch."""

    @property
    def signature(self) -> str:
        """A text that is equal for equal requests."""


Request = TypeVar("Request", bound=HasSignature)
Tiling = TypeVar("Tiling", bound=NumberedTiling)
Choose = Callable[[Request], Tiling | None]
"""Chooses the tiling of a request; None where the framework's calls stay."""


def _nothing(_module: fx.GraphModule, _compile_jobs: Compile) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[Request, Tiling]):
    """A kind of kernels, and how it is put into a graph.

    ``requests`` finds what one launch could compute, ``tilings`` lists its candidates, the most promising first, and
    ``call`` describes the launch. ``use`` replaces the requests that a function gives a tiling for, and keeps dtype,
    shape and strides of every result. ``templates`` are the modules whose code the times depend on; ``reason`` explains
    the family's place in the order. ``framework`` makes the framework's call to compare with, or returns None where
    there is none to time: a generated kernel cannot be timed alone. ``prepare`` rewrites the graph to allow more
    requests.
    """

    name: str
    requests: Callable[[fx.GraphModule], Iterable[Request]]
    tilings: Callable[[Request, GPU], Sequence[Tiling]]
    call: Callable[[Request, Tiling, Trigger], Call]
    use: Callable[[fx.GraphModule, "Choose[Request, Tiling]", Trigger], None]
    templates: Sequence[str]
    reason: str
    framework: Callable[[Request, Pool, int], Timed | None] = lambda *_: None
    prepare: Callable[[fx.GraphModule, Compile], None] = _nothing

    def select(self, module: fx.GraphModule, gpu: GPU, times: Times | None = None) -> None:
        """Put the kernels in wherever they are faster on ``gpu``, the current one.

        Known times are not measured again. Does nothing on a GPU without programmatic dependent launch.
        """
        if not gpu.has_programmatic_launch:
            return
        self.prepare(module, partial(compile_all, gpu=gpu))
        found = list(self.requests(module))
        if not found:
            return
        from nimblec.kernels.timing import GraphTimer, WeightPool

        timer, started = GraphTimer(gpu), compiler()
        selector = Selector(
            self,
            gpu,
            timer,
            WeightPool(gpu),
            length=timer.length,
            screen=timer.screen(),
            times=times,
            fingerprint=timing_fingerprint(self.templates),
            compile_jobs=partial(started.begin, gpu=gpu),
            finish_jobs=partial(started.finish, gpu=gpu),
        )
        selector.prepare(found)
        self.use(module, selector, gpu.trigger)
        selector.finish()

    def use_first(self, module: fx.GraphModule, gpu: GPU, times: Times | None = None) -> None:
        """Put the kernels in wherever they apply, without the GPU.

        Each has the tiling that is the fastest by ``times`` of such a GPU, or the most promising one.
        """
        self.prepare(module, lambda _: None)
        given: Times = {} if times is None else times
        fingerprints = [timing_fingerprint(self.templates, name) for name in gpu.names] if given else []

        def choose(request: Request) -> Tiling | None:
            named = self.named(request, gpu)
            for fingerprint in fingerprints:
                keys = {name: _key(fingerprint, gpu, request.signature, name) for name in named}
                known = {name: given[key] for name, key in keys.items() if key in given}
                if known:
                    return named[min(known, key=known.__getitem__)]
            return next(iter(named.values()), None)

        self.use(module, choose, gpu.trigger)

    def named(self, request: Request, gpu: GPU) -> dict[str, Tiling]:
        """Return the candidates of a request by name, the most promising first."""
        return {tiling.name: tiling for tiling in self.tilings(request, gpu)}


class Selector(Generic[Request, Tiling]):
    """Chooses tilings for a family's ``use``; equal requests are timed once. ``choices`` holds the results."""

    def __init__(
        self,
        family: Family[Request, Tiling],
        gpu: GPU,
        timer: Timer,
        pool: Pool,
        *,
        length: int,
        screen: Timer | None = None,
        times: Times | None = None,
        fingerprint: str = "",
        compile_jobs: Compile,
        finish_jobs: Compile = lambda _: None,
    ) -> None:
        """Take a ``timer`` of calls that take the number, below ``length``, of a copy of their weights in ``pool``.

        ``screen`` is a quicker timer that narrows the candidates down; ``times`` are those known, by ``fingerprint``.
        ``compile_jobs`` begins to compile, ``finish_jobs`` waits for it.
        """
        self._family = family
        self._gpu = gpu
        self._timer = timer
        self._pool = pool
        self._length = length
        self._screen = screen
        self._times: Times = {} if times is None else times
        self._fingerprint = fingerprint
        self._compile = compile_jobs
        self._finish = finish_jobs
        self._jobs: dict[str, list[Job]] = {}
        self._tilings: dict[str, dict[str, Tiling]] = {}
        self.choices: dict[str, Choice] = {}

    def prepare(self, requests: Iterable[Request]) -> None:
        """Begin to compile all kernels that will be launched: those chosen already, else all candidates."""
        for key, request in {request.signature: request for request in requests}.items():
            named = self._named(request)
            known = self._known(key, named)
            wanted = named if known is None else {known.best} & named.keys()
            self._jobs[key] = [self._call(request, named[name]).job() for name in wanted]
        if jobs := list(chain.from_iterable(self._jobs.values())):
            self._compile(jobs)

    def finish(self) -> None:
        """Wait until all that was begun is compiled."""
        self._finish(list(chain.from_iterable(self._jobs.values())))

    def __call__(self, request: Request) -> Tiling | None:
        """Return the fastest tiling; None where the framework's call stays."""
        key, named = request.signature, self._named(request)
        if key not in self.choices:
            self.choices[key] = self._known(key, named) or self._measured(key, request, named)
        return named.get(self.choices[key].best)

    def _call(self, request: Request, tiling: Tiling) -> Call:
        return self._family.call(request, tiling, self._gpu.trigger)

    def _named(self, request: Request) -> dict[str, Tiling]:
        if request.signature not in self._tilings:
            self._tilings[request.signature] = self._family.named(request, self._gpu)
        return self._tilings[request.signature]

    def _known(self, key: str, named: Iterable[str]) -> Choice | None:
        sides = {side: self._side(key, side) for side in (FRAMEWORK, *named)}
        times = {side: self._times[at] / 1000 for side, at in sides.items() if at in self._times}
        return rank(times) if len(times) > 1 else None

    def _measured(self, key: str, request: Request, named: dict[str, Tiling]) -> Choice:
        # Kernels of other requests are compiled meanwhile.
        self._finish(self._jobs.get(key, []))
        framework = self._family.framework(request, self._pool, self._length)
        sides: dict[str, Timed] = {} if framework is None else {FRAMEWORK: framework}
        for name, tiling in named.items():
            sides[name] = self._call(request, tiling).timed(self._pool, self._length)
        choice = choose(sides, self._timer, screen=self._screen)
        for side, microseconds in choice.microseconds.items():
            self._times[self._side(key, side)] = round(1000 * microseconds)
        torch.cuda.empty_cache()  # the capture process keeps all memory that was freed until then
        # The stored times are in nanoseconds: choose by them, as the next compilation will.
        return self._known(key, named) or choice

    def _side(self, key: str, side: str) -> str:
        return _key(self._fingerprint, self._gpu, key, side)


def _key(fingerprint: str, gpu: GPU, signature: str, side: str) -> str:
    """Return the key of the time of a request's tiling, or of the framework's call."""
    return key_of((fingerprint, gpu.trigger, signature, side))


def timing_fingerprint(templates: Iterable[str], device: str | None = None) -> str:
    """Hash what times depend on besides the request: the device, library versions, the templates' code.

    ``device`` is a name, of the current one where it is None.
    """
    from triton import __version__ as triton_version
    from triton import knobs

    code = sha256()
    for name in ("nimblec.kernels.device", *templates):
        package, _, module = name.rpartition(".")
        code.update(files(package).joinpath(f"{module}.py").read_bytes())
    versions = torch.__version__, triton_version, knobs.nvidia.ptxas.version, torch.backends.cudnn.version()
    return repr((device or torch.cuda.get_device_name(), *versions, code.hexdigest()))

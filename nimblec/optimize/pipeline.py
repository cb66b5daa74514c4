"""Passes over a graph in their order, with what each needs before it and the reason for its place."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from nimblec.graph import control
from nimblec.graph.outputs import output_strides
from nimblec.graph.rewriter import copied, views
from nimblec.pytorch.flat import flattened
from nimblec.pytorch.model import TorchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The target of a rewrite and its options.

    ``device`` is "cuda" or "cpu". ``dtype`` is the half precision to compute in where the graph is in float32;
    None keeps its own. ``use`` puts a family of kernels into a graph; with ``fp8``, products may be of e4m3. Without
    ``at_any_cost``, regions are generated only where they save a launch.
    """

    device: str = "cuda"
    dtype: torch.dtype | None = None
    use: Callable[[Any, fx.GraphModule], object] | None = None
    fp8: bool = False
    at_any_cost: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A rewrite of a graph, in place.

    ``needs`` are the rewrites that must have run before, and ``reason`` says why it has its place. ``takes``
    names the arguments of ``run`` besides the graph: fields of the `Setting`, "strides", the outputs' strides
    when the pipeline began, or "args", those of the model's call.
    """

    run: Callable[..., object]
    reason: str
    needs: tuple[Callable[..., object], ...] = ()
    takes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the rewrite."""
        return name_of(self.run)

    @property
    def summary(self) -> str:
        """The first sentence of the rewrite's docstring."""
        return " ".join((self.run.__doc__ or "").partition("\n\n")[0].split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Passes with one purpose, which run where ``when`` holds."""

    name: str
    passes: tuple[Pass, ...]
    when: Callable[[Setting], bool] = lambda _: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A pass that has run: how many calls other than views the graph had before and after it."""

    phase: str
    name: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.phase}: {self.name}: {self.before} calls -> {self.after}"


Report = Callable[[Step], None]


class Pipeline:
    """Phases in their order.

    Raises ValueError where a pass stands before one that it needs.
    """

    def __init__(self, *phases: Phase) -> None:
        self.phases = phases
        check_order(self.passes)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """All passes in their order."""
        return tuple(chain.from_iterable(phase.passes for phase in self.phases))

    def __call__(
        self, graph: fx.GraphModule, setting: Setting, report: Report | None = None, args: Sequence[Any] = ()
    ) -> fx.GraphModule:
        """Return a rewritten copy of a flat graph of pure calls; ``report`` is called for each pass that has run.

        The bodies of its loops and branches are rewritten alike, each by itself.
        """
        module = copied(graph)
        for node, target in control.calls(module):
            node.target = target.with_bodies(lambda body: self(body, setting))
        given = {f.name: getattr(setting, f.name) for f in fields(setting)}
        given |= {"strides": output_strides(graph), "args": args}
        for phase in self.phases:
            if phase.when(setting):
                for each in phase.passes:
                    before = calls(module) if report else 0
                    each.run(module, **{name: given[name] for name in each.takes})
                    if report:
                        report(Step(phase=phase.name, name=each.name, before=before, after=calls(module)))
        return module


def check_order(passes: Iterable[Pass]) -> None:
    """Raise ValueError where a pass stands before one that it needs."""
    done: set[Callable[..., object]] = set()
    for each in passes:
        for need in each.needs:
            if need not in done:
                raise ValueError(f"{each.name} stands before {name_of(need)}, which it needs: {each.reason}")
        done.add(each.run)


def calls(module: fx.GraphModule) -> int:
    """Count the calls of a graph that are not views, and so may launch kernels."""
    return sum(
        node.op == "call_function" and node.target is not operator.getitem and views(node) is None
        for node in module.graph.nodes
    )


def name_of(rewrite: Callable[..., object]) -> str:
    """Return the name of a rewrite."""
    return str(getattr(rewrite, "__name__", rewrite))


class Runs:
    """Runs sequences of pipelines on one model; pipelines that several of them begin with are run once."""

    def __init__(self, model: TorchModel, setting: Setting, report: Report | None = None) -> None:
        self._model = model
        self._setting = setting
        self._report = report
        self._made: dict[tuple[Pipeline, ...], TorchModel] = {}

    def __call__(self, *pipelines: Pipeline) -> TorchModel:
        """Return the model after these pipelines.

        Raises TraceError or UnsupportedModelError where the model cannot be a graph of pure calls.
        """
        if pipelines not in self._made:
            self._made[pipelines] = self._run(pipelines)
        return self._made[pipelines]

    def _run(self, pipelines: tuple[Pipeline, ...]) -> TorchModel:
        if not pipelines:
            return flattened(self._model)
        model = self(*pipelines[:-1])
        return replace(model, module=pipelines[-1](model.module, self._setting, self._report, model.args))

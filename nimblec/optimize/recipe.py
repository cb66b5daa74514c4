"""Pipelines run one after another on a model."""

from dataclasses import replace

from nimblec.optimize.pipeline import Pipeline, Report, Setting, check_order
from nimblec.pytorch.flat import flattened
from nimblec.pytorch.model import TorchModel


class Recipe:
    """A name and a sequence of pipelines, each of which takes the graph of the one before it.

    Raises ValueError where a pass stands before one that it needs.
    """

    def __init__(self, name: str, *pipelines: Pipeline) -> None:
        self.name = name
        self.pipelines = pipelines
        check_order(each for pipeline in pipelines for each in pipeline.passes)


class Runs:
    """Runs recipes on one model; pipelines that several of them begin with are run once."""

    def __init__(self, model: TorchModel, setting: Setting, report: Report | None = None) -> None:
        self._model = model
        self._setting = setting
        self._report = report
        self._made: dict[tuple[Pipeline, ...], TorchModel] = {}

    def __call__(self, *pipelines: Pipeline) -> TorchModel:
        """The model after these pipelines.

        Raises TraceError or UnsupportedModelError where the model cannot be a graph of pure calls.
        """
        if pipelines not in self._made:
            self._made[pipelines] = self._run(pipelines)
        return self._made[pipelines]

    def with_setting(self, setting: Setting, *, kept: tuple[Pipeline, ...]) -> "Runs":
        """Runs with another setting, of which those of ``kept`` are as they are here. They report nothing."""
        other = Runs(self._model, setting)
        other._made = {kept[:count]: self(*kept[:count]) for count in range(len(kept) + 1)}
        return other

    def has_run(self, *pipelines: Pipeline) -> bool:
        """Whether these pipelines have run without an error."""
        return pipelines in self._made

    def _run(self, pipelines: tuple[Pipeline, ...]) -> TorchModel:
        if not pipelines:
            return flattened(self._model)
        model = self(*pipelines[:-1])
        return replace(model, module=pipelines[-1](model.module, self._setting, self._report))

"""Take samples/digits.onnx through every stage of a compilation for the CPU, and print the results.

Usage: ``python docs/walkthrough.py`` prints all sections, ``--write`` puts them into how-it-works.md, each into the
block of its name. The output has no times, addresses or digests: it is the same on every machine with the same ONNX
Runtime and the same layout of convolutions.
"""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import passes
import plan_bytes
import refusals
from onnxruntime import InferenceSession
from plan_bytes import Lines, columns

from nimblec.base.ir import BufferKind, Graph
from nimblec.cpu import capture
from nimblec.cpu.stretches import Joiner
from nimblec.inspect import verification
from nimblec.inspect.inspection import pointer_text
from nimblec.onnx_import import model_file
from nimblec.plan import encoder
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.interface import shape_text
from nimblec.plan.lean import LeanProcess
from nimblec.plan.planning import Measured, choose_schedule
from nimblec.schedule import streams
from nimblec.schedule.dependencies import dependencies
from nimblert import golden
from nimblert.check.verify import parse_plan
from nimblert.cpu.backend import CpuLoaded
from nimblert.cpu.host_memory import HostMemory, HostWeights, HostWorking
from nimblert.cpu.onnx_session import nchwc_block_size, onnxruntime, session_options
from nimblert.loading import load
from nimblert.plan import (
    Device,
    Launch,
    Plan,
    Pointer,
    Region,
    Target,
    container,
)

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "how-it-works.md"
MODEL = ROOT / "samples" / "digits.onnx"


class EqualTimer:
    """A substitute for `nimblec.cpu.timing.CpuTimer`: every command takes 1 us, which makes the text reproducible."""

    max_streams = 2
    least_gain = 0.02

    def command_durations(self, plan: Plan) -> Measured[Sequence[int]]:
        """1,000 ns for each command."""
        return Measured([1000] * len(plan.programs[0].commands))

    def duration(self, plan: Plan) -> Measured[int]:
        """The sum of the commands, in ns."""
        return Measured(1000 * len(plan.programs[0].commands))


def read() -> tuple[onnx.ModelProto, Lines]:
    """The front end: the file, checked, its shapes static."""
    model = capture.read(MODEL)

    def lines() -> Lines:
        opsets = ", ".join(f"opset {entry.version} of {entry.domain or 'ai.onnx'}" for entry in model.opset_import)
        yield f"{MODEL.name}: {len(model.graph.node)} nodes, {opsets}"
        yield from (f"input {t.name}: {shape_text(t.dtype, _static(t))}" for t in model_file.inputs(model))
        yield from (f"output {t.name}" for t in model_file.outputs(model))
        yield f"operators: {' '.join(node.op_type for node in model.graph.node)}"

    return model, lines()


def _static(tensor: model_file.ModelTensor) -> tuple[int, ...]:
    assert tensor.shape is not None
    return tuple(size for size in tensor.shape if size is not None)


def optimise(graph: Graph) -> Lines:
    """The nodes after ONNX Runtime's optimiser, each a task of the graph."""
    names = [b.name for b in graph.buffers]
    rows: list[Sequence[object]] = [("node", "operator", "reads", "gives")]
    for number, task in enumerate(graph.tasks):
        reads = [names[a.buffer] for a in task.reads if graph.buffers[a.buffer].kind is not BufferKind.CONSTANT]
        (written,) = (graph.buffers[a.buffer] for a in task.writes)
        gives = f"{written.name} {shape_text(written.dtype, written.shape)}"
        rows.append((number, graph.ops[task.op].name.removeprefix("com.microsoft."), ", ".join(reads), gives))
    yield from columns(rows)


def lowering(plan: Plan) -> Lines:
    """The only launch, its parameters and their pointers."""
    program = plan.programs[0]
    (launch,) = program.commands
    assert isinstance(launch, Launch)
    kernel = plan.kernels[launch.kernel]
    module = plan.modules[kernel.module]
    yield f"command 0: launch on stream {launch.stream}, op {program.ops[launch.op].name}"
    yield f"kernel {launch.kernel}: {kernel.symbol}, a model of {module.code.nbytes} bytes, origin {module.origin!r}"
    yield f"params: {launch.params.hex(' ', 8)[:33]} ..."
    rows: list[Sequence[object]] = [("at byte", "kind", "name", "type", "points to")]
    for parameter, relocation in zip(kernel.parameters, launch.relocations, strict=True):
        kind = parameter.kind.name.lower()
        where = pointer_text(relocation.pointer)
        rows.append((parameter.offset, kind, parameter.name, shape_text(parameter.dtype, parameter.shape), where))
    yield from columns(rows)


def stretches(plan: Plan) -> Lines:
    """The nodes of each launch, and the values that are in no memory of the plan."""
    program = plan.programs[0]
    for index, command in enumerate(program.commands):
        assert isinstance(command, Launch)
        model = onnx.load_model_from_string(bytes(plan.modules[plan.kernels[command.kernel].module].code))
        nodes = model.graph.node
        ops = [op.name for op in program.ops[command.op + 1 : command.op + 1 + len(nodes)]]
        assert ops == [f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes]
        yield f"launch {index}: {program.ops[command.op].name}"
        rows: list[Sequence[object]] = [("node", "operator", "reads", "computes")]
        rows += [(n.name, n.op_type, " ".join(n.input), " ".join(n.output)) for n in nodes]
        yield from columns(rows)
        yield f"parameters: {' '.join(p.name for p in plan.kernels[command.kernel].parameters)}"
        yield f"between nodes: {' '.join(value.name for value in model.graph.value_info)}"
    yield f"arena: {program.arena_nbytes} bytes"


def loaded(plan: Plan) -> Lines:
    """The memory and sessions of a loaded plan whose file is mapped."""
    program = plan.programs[0]
    regions = HostMemory(program, HostWeights(plan), HostWorking(plan), poison=True)
    in_place = 0
    for weight in plan.weights:
        used = regions.range(Pointer(region=Region.WEIGHTS, offset=weight.offset), weight.data.nbytes)
        in_place += used.ctypes.data == np.frombuffer(weight.data, np.uint8).ctypes.data
    yield f"weights: {in_place} of {len(plan.weights)} are used where the file is mapped"
    yield f"arena: {program.arena_nbytes:,} bytes"
    yield from (f"input[{i}]: {nbytes} bytes" for i, nbytes in enumerate(program.input_nbytes))
    yield from (f"output[{i}]: {nbytes} bytes" for i, nbytes in enumerate(program.output_nbytes))
    loaded = CpuLoaded(plan)
    with closing(loaded.backend(program, loaded.working())):
        launches = sum(isinstance(command, Launch) for command in program.commands)
        yield f"launches: {launches}, sessions: {len(loaded.sessions)}"


def runs(plan: Plan, path: Path) -> Lines:
    """Runs on two images, and the check of the golden record."""
    program = plan.programs[0]
    with load(path, poison=True) as executable:
        for digit in (7, 3):
            result = executable.run({"image": np.load(ROOT / "samples" / f"digit_{digit}.npy")})
            certain = float(result["probabilities"].max())
            yield f"digit_{digit}.npy: digit {result['digit'].tolist()}, probability {certain:.2f}"
        record = program.golden
        assert record is not None
        outputs = tuple(executable.run(golden.draw_inputs(program, record.seed)).values())
    for tensor, comparison in zip(program.outputs, golden.check(record, outputs), strict=True):
        yield f"golden record, seed {record.seed}: {tensor.name} is {comparison}"
    with LeanProcess(plan.target) as lean:
        yield f"lean process: {lean.differing_output(path, run_s=0) or 'no output differs'}"


def verified(path: Path) -> Lines:
    """The output of `nimblec verify`."""
    for result in verification.verify(path):
        for sentence in result.sentences:
            yield f"{result.result.value:<8} {result.name}: {sentence}"


def sections(folder: Path) -> Iterator[tuple[str, Lines]]:
    """Every section by name, in order; each stage works on the result of the one before."""
    yield "machine", iter([f"ONNX Runtime {onnxruntime().__version__}, blocks of {nchwc_block_size()} channels"])
    model, lines = read()
    yield "read", lines
    graph = capture.capture(MODEL)
    yield "optimise", optimise(graph)
    yield "graph", passes.tasks(graph)
    yield "dependencies", passes.order(graph)
    branches = passes.branching()
    yield "branches", passes.tasks(branches)
    yield "reduction", passes.order(branches)
    yield "streams", passes.chains(branches)
    yield "events", passes.commands_of_branches(branches)
    provenance = Provenance(target=Target.CPU, device=Device(name="cpu"), versions=())
    plan = assemble([choose_schedule(graph, provenance, EqualTimer(), join=Joiner().join)], provenance)
    yield "stretches", stretches(plan)
    yield "memory", passes.arena(graph, streams.serial(dependencies(graph)))
    yield "concurrency", passes.arenas(branches)
    yield "lowering", lowering(plan)
    plan = with_golden(plan, model)
    path = folder / "digits.plan"
    encoder.write(plan, path)
    image = container.open_image(path)
    yield "file", plan_bytes.file_map(plan, image)
    yield "head", plan_bytes.head(image)
    yield "trailer", plan_bytes.trailer(image)
    if shutil.which("flatc"):
        yield "flatc", plan_bytes.flatc(path, folder)
    yield "load", loaded(parse_plan(image, path))
    yield "run", runs(plan, path)
    yield "verify", verified(path)
    yield "refusals", refusals.refused(path, folder)


def with_golden(plan: Plan, model: onnx.ModelProto) -> Plan:
    """The plan with the outputs of ONNX Runtime on seeded inputs as its golden record."""
    program = plan.programs[0]
    session = InferenceSession(model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"])
    outputs = session.run(None, golden.draw_inputs(program, 0))
    return replace(plan, programs=(replace(program, golden=golden.record(0, outputs, 0.0)),))


def rewritten(document: str, texts: Mapping[str, str]) -> str:
    """``document`` with each block "```text NAME" replaced by the section of that name."""

    def replaced(block: re.Match[str]) -> str:
        return f"```text {block[1]}\n{texts.get(block[1], block[2])}```"

    return re.sub(r"```text (\w+)\n(.*?)```", replaced, document, flags=re.DOTALL)


def main(arguments: Sequence[str]) -> None:
    """Print the sections, or write them into the document."""
    with tempfile.TemporaryDirectory() as folder:
        texts = {name: "".join(f"{line}\n" for line in lines) for name, lines in sections(Path(folder))}
    if "--write" in arguments:
        DOCUMENT.write_text(rewritten(DOCUMENT.read_text(), texts))
        return
    for name, text in texts.items():
        print(f"== {name}\n{text}")


if __name__ == "__main__":
    main(sys.argv[1:])

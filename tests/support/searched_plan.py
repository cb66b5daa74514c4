"""A plan of the size of NASNet-A large's: 1,000 launches in cells of branches, with the names that libraries give."""

from dataclasses import replace
from random import Random

from plans import H200, VERSIONS

from nimblec.base.ir import Access, Buffer, BufferKind, Graph, KernelWork, Op, Task, TensorView
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.planning import choose_schedule
from nimblert.plan import Kernel, Launch, Module, Plan, Target

_CELLS, _BRANCHES = 20, 5
_WIDEST_NBYTES = 1 << 22
_RELU = (
    "_ZN2at6native29vectorized_elementwise_kernelILi8EZZZNS0_49_GLOBAL__N__9b6d2c0f_{}_activation_relu_cu_a1b2c3d418launc"
    "h_clamp_scalarERNS_18TensorIteratorBaseEN3c106ScalarES6_NS0_6detail11ClampLimitsEENKUlvE_clEvENKUlvE7_clEvEUlNS4_4Ha"
)
_DEPTHWISE = (
    "_ZN2at6native51_GLOBAL__N__f2a9c1de_{}_DepthwiseConv2d_cu_5d0f2e3b32conv_depthwise2d_forward_kernelILi5EN3c104HalfEi"
    "EEvNS_27GenericPackedTensorAccessorIKT0_Lm4ENS_17RestrictPtrTraitsEiEE"
)
_POINTWISE = (
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x{}x64_warpgroupsize1x1x1_g1_execute_segment"
    "_k_off_kernel__5x_cudnn"
)
_NORM = "_ZN5cudnn2bn24bn_fw_inf_1C11_kernel_NCHWI6__halffLb1ELi{}EEEvT0_S3_18cudnnTensorStructPKT_S4_PS5_PKS3_S9_S9_"
_STEPS = {
    "relu": ("aten.relu_.default", _RELU),
    "depthwise": ("aten.convolution.default", _DEPTHWISE),
    "pointwise": ("aten.convolution.default", _POINTWISE),
    "bn_sep": ("aten._native_batch_norm_legit_no_training.default", _NORM),
}
"""The op of each step of a separable convolution, and the symbol of its kernel."""


class _Network:
    """The tasks of a network so far. A value is the number of its buffer; each launch is an op of its own."""

    def __init__(self) -> None:
        self.random = Random(0)  # noqa: S311 - of a test
        self.symbols: dict[str, int] = {}
        self.ops: list[Op] = []
        self.tasks: list[Task] = []
        self.buffers: list[Buffer] = []

    def value(self, kind: BufferKind, nbytes: int, name: str = "") -> int:
        """Add a buffer of float16 numbers; constants have random ones."""
        data = memoryview(self.random.randbytes(nbytes)) if kind is BufferKind.CONSTANT else None
        shape = (nbytes // 2,)
        self.buffers.append(Buffer(kind=kind, nbytes=nbytes, name=name, dtype="float16", shape=shape, data=data))
        return len(self.buffers) - 1

    def launch(self, op: str, source: str, symbol: str, written: int, *read: int) -> int:
        """Add a launch that reads values and writes another, and return that."""
        number = self.symbols.setdefault(symbol, len(self.symbols))
        self.ops.append(Op(name=op, source=source))
        reads, writes = (
            tuple(Access(buffer=buffer, offset=0, nbytes=self.buffers[buffer].nbytes) for buffer in buffers)
            for buffers in (read, [written])
        )
        work = KernelWork(kernel=number, params=b"", references=(), grid=(len(self.tasks) + 1, 1, 1), block=(128, 1, 1))
        self.tasks.append(Task(op=len(self.ops) - 1, work=work, reads=reads, writes=writes))
        return written

    def separable(self, where: str, value: int, nbytes: int) -> int:
        """Add relu, two convolutions and a batch norm."""
        for part, (op, symbol) in _STEPS.items():
            weights = [] if part == "relu" else [self.value(BufferKind.CONSTANT, 672, f"{where}.{part}.weight")]
            written = self.value(BufferKind.TEMPORARY, nbytes)
            kernel = symbol.format(self.random.choice((16, 32, 64, 128)))
            value = self.launch(op, f"{where}.{part}", kernel, written, value, *weights)
        return value


def searched_plan() -> Plan:
    """Return the plan in its widest schedule; its kernels have no code that a GPU could load."""
    network = _Network()
    before = now = image = network.value(BufferKind.INPUT, 3 * 331 * 331 * 2)
    for cell in range(_CELLS):
        nbytes = _WIDEST_NBYTES >> cell // 7
        ends = []
        for branch in range(_BRANCHES):
            for side, value in (("left", now), ("right", before)):
                where = f"cell_{cell}.comb_iter_{branch}_{side}.separable"
                ends.append(network.separable(f"{where}_1", value, nbytes))
            if branch % 2:
                ends[-1] = network.separable(f"{where}_2", ends[-1], nbytes)
        written = network.value(BufferKind.TEMPORARY, nbytes * len(ends))
        before, now = now, network.launch("aten.cat.default", f"cell_{cell}", "CatArrayBatchedCopy", written, *ends)
    logits = network.value(BufferKind.OUTPUT, 2000)
    network.launch("aten.addmm.default", "last_linear", "gemm", logits, now)
    views = [
        TensorView(name=name, dtype="float16", shape=(count,), strides=(1,), buffer=buffer)
        for name, count, buffer in (("image", 3 * 331 * 331, image), ("logits", 1000, logits))
    ]
    graph = Graph(
        modules=(Module(origin="cudnn", code=memoryview(b"\x7fELF" + bytes(100))),),
        kernels=tuple(Kernel(module=0, symbol=symbol, parameters=()) for symbol in network.symbols),
        buffers=tuple(network.buffers),
        ops=tuple(network.ops),
        tasks=tuple(network.tasks),
        inputs=tuple(views[:1]),
        outputs=tuple(views[1:]),
    )
    provenance = Provenance(target=Target.CUDA, device=H200, versions=VERSIONS)
    plan = assemble([choose_schedule(graph, provenance, None)], provenance)
    (program,) = plan.programs
    commands = (
        replace(command, duration_ns=network.random.randrange(1500, 30_000)) if isinstance(command, Launch) else command
        for command in program.commands
    )
    return replace(plan, programs=(replace(program, commands=tuple(commands)),))

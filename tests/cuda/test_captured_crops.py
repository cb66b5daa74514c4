"""Sizes of cropped outputs in the graph of a capture; no GPU is needed for that."""

from types import SimpleNamespace
from typing import Any

import pytest

from nimblec.base.ir import Access, Buffer, BufferKind, CropWork, Task, TensorView
from nimblec.cuda.capture import tasks


def test_crops_come_after_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "node_handles", lambda _: [])
    monkeypatch.setattr(tasks, "triggers", lambda *_: ())
    capture: Any = SimpleNamespace(handle=0, ops=(), regions=())
    held = tuple(Buffer(kind=kind, nbytes=8) for kind in (BufferKind.OUTPUT, BufferKind.TEMPORARY))
    buffers: Any = SimpleNamespace(buffers=lambda _: held, byte_at=None)
    unused: Any = SimpleNamespace()
    view = TensorView(name="y", dtype="uint8", shape=(8,), strides=(1,), buffer=0)
    crop = CropWork(output=0, sizes=Access(buffer=1, offset=0, nbytes=8))
    graph = tasks.build_graph(
        capture, capture, code=unused, relocator=unused, buffers=buffers, inputs=(), outputs=(view,), crops=[crop]
    )
    assert graph.tasks == (Task(op=0, work=crop, reads=(crop.sizes,), writes=()),)
    assert (graph.ops[0].name, graph.ops[0].source) == ("crop", "y")

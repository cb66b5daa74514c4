"""Non-maximum suppression: boxes of high scores, without those that overlap better ones."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.graph.record_control import run_loop
from nimblec.onnx_ops.counted import Counted, non_zero, range_of
from nimblec.onnx_ops.table import Refused, op


@op("NonMaxSuppression", since=10)
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    max_output_boxes_per_class: Tensor | None = None,
    iou_threshold: Tensor | None = None,
    score_threshold: Tensor | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor | Counted:
    if boxes.dim() != 3 or scores.dim() != 3 or boxes.shape != (scores.shape[0], scores.shape[2], 4):
        raise Refused(f"boxes of shape {tuple(boxes.shape)} do not fit scores of shape {tuple(scores.shape)}")
    given = max_output_boxes_per_class, iou_threshold, score_threshold
    dtypes = torch.int64, boxes.dtype, scores.dtype
    limit, iou, least = (
        torch.zeros((), dtype=dtype) if value is None else value.reshape(())
        for value, dtype in zip(given, dtypes, strict=True)
    )
    known = range_of(limit)
    most = max(0, min(scores.shape[2], scores.shape[2] if known is None else int(known.most)))
    if most == 0 or 0 in scores.shape:
        return torch.zeros((0, 3), dtype=torch.int64)
    none = torch.full((), -torch.inf, dtype=scores.dtype)
    alive = scores if score_threshold is None else torch.where(scores > least, scores, none)
    lower, upper, areas = _corners(boxes, is_center=bool(center_point_box))

    def step(_: object, slots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Keep the best box of each class, and leave those out that overlap it."""
        number, alive, chosen = slots
        best = torch.argmax(alive, 2)
        found = torch.where(alive.gather(2, best.unsqueeze(2)) > none, best.unsqueeze(2), torch.tensor(-1))
        corner = best.unsqueeze(2).expand(*best.shape, 2)
        shared = torch.ones((), dtype=boxes.dtype)
        begins, ends = lower.gather(1, corner), upper.gather(1, corner)
        for side in (0, 1):
            begin = torch.maximum(lower.select(2, side).unsqueeze(1), begins.select(2, side).unsqueeze(2))
            end = torch.minimum(upper.select(2, side).unsqueeze(1), ends.select(2, side).unsqueeze(2))
            shared = shared * (end - begin).clamp(min=0)
        union = areas.unsqueeze(1) + areas.gather(1, best).unsqueeze(2) - shared
        gone = (shared / union > iou) | (torch.arange(alive.shape[2]) == best.unsqueeze(2))
        alive = torch.where(gone, none, alive)
        chosen = chosen.index_copy(2, number.reshape(1), found)
        return (alive > none).any() & (number + 1 < limit), [number + 1, alive, chosen]

    chosen = torch.full((*scores.shape[:2], most), -1)
    start = (alive > none).any() & (limit > 0)
    is_known = not any(isinstance(value, FakeTensor) for value in (boxes, start, iou))
    *_, chosen = run_loop(start, [torch.tensor(0), alive, chosen], step, limit=most, is_known=is_known)
    if is_known:
        places = torch.nonzero(chosen >= 0)
        return torch.cat([places[:, :2], chosen[chosen >= 0].unsqueeze(1)], 1)
    rows = non_zero(chosen >= 0)
    batch, category, place = rows.values.unbind(0)
    index = torch.index_select(chosen.reshape(-1), 0, (batch * chosen.shape[1] + category) * most + place)
    return Counted(torch.stack([batch, category, index], 1), {0: rows.counts[1]})


def _corners(boxes: Tensor, *, is_center: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lower and upper corners of boxes, and their areas, which is rounded as in ONNX Runtime."""
    first, second = boxes.split(2, 2)
    if is_center:
        lower, upper, size = first - second / 2, first + second / 2, second
    else:
        lower, upper = torch.minimum(first, second), torch.maximum(first, second)
        size = upper - lower
    return lower, upper, size.select(2, 0) * size.select(2, 1)

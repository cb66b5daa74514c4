"""Counts of n-grams."""

from collections import defaultdict

import torch
from torch import Tensor

from nimblec.onnx_ops.table import Floats, Ints, Refused, op


def _grams(counts: Ints, pool: Ints) -> dict[int, list[tuple[int, ...]]]:
    """Return the n-grams of the pool by their length; their order is that of ``ngram_indexes``."""
    grams: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    ends = (*counts[1:], len(pool))
    for n, (start, end) in enumerate(zip(counts, ends, strict=True), 1):
        grams[n] = [pool[i : i + n] for i in range(start, end - n + 1, n)]
    return grams


@op("TfIdfVectorizer", since=9)
def tf_idf(
    x: Tensor,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Ints,
    ngram_indexes: Ints,
    pool_int64s: Ints | None = None,
    weights: Floats | None = None,
) -> Tensor:
    if mode not in ("TF", "IDF", "TFIDF"):
        raise Refused(f"attribute 'mode' is {mode!r}; expected TF, IDF or TFIDF")
    if pool_int64s is None:
        raise Refused("attribute 'pool_strings' is not supported")
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    width = max(ngram_indexes) + 1
    counts = torch.zeros((rows.shape[0], width), dtype=torch.float32)
    first = 0
    for n, grams in _grams(ngram_counts, pool_int64s).items():
        columns = torch.tensor(ngram_indexes[first : first + len(grams)], dtype=torch.int64)
        first += len(grams)
        if not grams or not min_gram_length <= n <= max_gram_length:
            continue
        for distance in range(1, 2 if n == 1 else max_skip_count + 2):
            places = rows.shape[1] - distance * (n - 1)
            if places > 0:
                hits = _count(rows, torch.tensor(grams), distance, places)
                counts = torch.index_add(counts, 1, columns, hits)
    if mode == "IDF":
        counts = (counts > 0).to(torch.float32)
    if mode != "TF" and weights is not None:
        counts = counts * torch.tensor(weights, dtype=torch.float32)
    return counts.reshape(width) if x.dim() < 2 else counts


def _count(rows: Tensor, grams: Tensor, distance: int, places: int) -> Tensor:
    """Count in each row the places where each n-gram stands, its items ``distance`` apart."""
    n = grams.shape[1]
    windows = torch.stack([rows.narrow(1, i * distance, places) for i in range(n)], -1)
    equal = windows.unsqueeze(2) == grams.to(rows.dtype)
    return equal.all(-1).sum(1).to(torch.float32)

"""Tasks as they are read off a capture."""

from graphs import access, kernel

from nimblec.cuda.tasks import _reading_pieces_where_they_count


def test_reads_are_in_pieces_only_where_several_ops_write() -> None:
    halves = access(0, 0, 32), access(0, 64, 32)
    others = access(1, 0, 16), access(1, 32, 16)
    tasks = [
        kernel((), (access(0, 0, 32), access(0, 64, 32)), op=0),
        kernel((), (access(0, 32, 32), access(0, 96, 32)), op=1),
        kernel((), (access(1, 0, 16), access(1, 32, 16)), op=2),
        kernel((), (access(1, 16, 16),), op=2),
        kernel((*others, *halves, access(2, 4, 4), access(2, 0, 2)), (), op=3),
    ]
    *first, last = _reading_pieces_where_they_count(tasks)
    assert first == tasks[:-1]
    assert last.reads == (access(1, 0, 48), *halves, access(2, 0, 8))

"""The contents of a cubin with names in place of indices and offsets: a simple reader to check `cut` against.

It shares no code with ``nimblec.cuda.capture``.
"""

import struct
from typing import Any

ALLOC, EXEC, LINKED = 0x2, 0x4, 0x40
NOBITS = 8
FIELDS = ("name", "type", "flags", "addr", "offset", "size", "link", "info", "align", "entsize")


def sections(cubin: bytes) -> list[dict[str, Any]]:
    """Return the sections as dicts: name, type, flags, offset, size, link, info, align, content."""
    shoff, shnum, shstrndx = struct.unpack_from("<Q12xHH", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 60)
    rows = []
    for index in range(shnum):
        fields = struct.unpack_from("<IIQQQQIIQQ", cubin, shoff + 64 * index)
        row = dict(zip(FIELDS, fields, strict=True))
        row["content"] = b"" if row["type"] == NOBITS else cubin[row["offset"] : row["offset"] + row["size"]]
        rows.append(row)
    names = rows[shstrndx]["content"]
    for row in rows:
        row["name"] = text_at(names, row["name"])
    return rows


def text_at(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def symbols(cubin: bytes) -> list[tuple[Any, ...]]:
    """Return (name, info, other, name of its section, value, size) of every symbol."""
    rows = sections(cubin)
    table = next(row for row in rows if row["type"] == 2)
    names = rows[table["link"]]["content"]
    return [
        (text_at(names, name), info, other, rows[shndx]["name"] if shndx < 0xFF00 else shndx, value, size)
        for name, info, other, shndx, value, size in struct.iter_unpack("<IBBHQQ", table["content"])
    ]


def kernels(cubin: bytes) -> set[str]:
    return {row[0] for row in symbols(cubin) if row[1] & 15 == 2 and row[2] & 0x10}


def section_meaning(cubin: bytes, row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the contents of a section, with names in place of indices."""
    rows, names = sections(cubin), symbols(cubin)
    body: Any = row["content"]
    if row["type"] in {4, 9}:
        layout = "<QIIq" if row["type"] == 4 else "<QII"
        body = [(entry[0], entry[1], names[entry[2]], *entry[3:]) for entry in struct.iter_unpack(layout, body)]
    elif row["type"] == 0x70000000:
        body = list(records(body, names, described=not row["flags"] & LINKED))
    elif row["type"] == 0x70000001:
        body = [(names[caller], names[callee] if callee >= 0 else callee) for caller, callee in
                struct.iter_unpack("<Ii", body)]  # fmt: skip
    elif row["type"] == 0x70000002:
        strings = rows[rows[row["link"]]["link"]]["content"]
        body = [(names[symbol], text_at(strings, at)) for symbol, at in struct.iter_unpack("<II", body)]
    info: Any = row["info"]
    if row["flags"] & LINKED:
        info = rows[info]["name"]
    elif row["flags"] & EXEC:
        info = (info >> 24, names[info & 0xFFFFFF])
    size = row["size"] if row["type"] == NOBITS else None
    return (row["name"], row["type"], row["flags"], rows[row["link"]]["name"], info, row["align"], size, body)


def records(content: bytes, names: list[tuple[Any, ...]], *, described: bool) -> Any:
    at = 0
    while at < len(content):
        kind, attribute, value = struct.unpack_from("<BBH", content, at)
        at += 4
        if kind != 4:
            yield attribute, value
            continue
        words: list[Any] = list(struct.unpack_from(f"<{value // 4}I", content, at))
        at += value
        if described or attribute == 0x0A:
            words[0] = names[words[0]]
        elif attribute == 0x0F:
            words = [names[word] for word in words]
        yield attribute, *words


def meaning(cubin: bytes, keep: set[str]) -> dict[str, Any]:
    """Return the contents of ``cubin`` for the kernels ``keep``, and those that belong to no kernel."""
    others = kernels(cubin) - keep

    def is_foreign(entry: Any) -> bool:
        return isinstance(entry, tuple) and any(
            isinstance(part, tuple) and len(part) == 6 and of_other(str(part[3])) for part in entry
        )

    def of_other(section: str) -> bool:
        return any(section.endswith("." + name) for name in others)

    told: dict[str, Any] = {}
    for row in sections(cubin):
        if row["type"] in {0, 2, 3} or "debug" in row["name"] or of_other(row["name"]):
            continue
        *head, body = section_meaning(cubin, row)
        if isinstance(body, list):
            body = [entry for entry in body if not is_foreign(entry)]
        told[row["name"]] = (*head, body)
    told["symbols"] = [s for s in symbols(cubin) if not of_other(str(s[3])) and "debug" not in str(s[3])]
    return told

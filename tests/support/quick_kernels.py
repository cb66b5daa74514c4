"""Inductor's scalar kernels for the CPU, compiled with the part of its header that they use.

Compiling takes less than half as long, most of which is reading the header. Kernels that use more of it, and other
versions of torch where that part is not found, are compiled as they are for users.
"""

import fcntl
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock

import torch
from torch._inductor import cpp_builder

_PREFIX = "torch/csrc/inductor/cpp_prefix.h"
_REPLACED = (f"#include <{_PREFIX}>", "#include <sstream>")
"""Lines of generated code that the small header replaces."""

_START = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <ATen/NumericUtils.h>
#include <c10/util/TypeCast.h>
#include <c10/util/generic_math.h>
#define TORCH_CHECK(holds, ...) do { if (!(holds)) throw std::runtime_error(#__VA_ARGS__); } while (false)
"""
_USED = (
    "inductor_cpu_integer_div_error_flag",
    "inductor_cpu_note_integer_div_by_zero",
    "inductor_cpu_throw_if_integer_div_error",
    "max_propagate_nan",
    "min_propagate_nan",
)
"""Definitions that are copied from the full header, if it has them."""

_WORTH_PRECOMPILING = 3
"""Kernels that need the full header: it takes longer to precompile than to read as often."""

_turn = Lock()


@cache
def install(folder: Path) -> None:
    """Make Inductor compile with the small header, which is precompiled in ``folder`` once for all processes."""
    run = getattr(cpp_builder, "run_compile_cmd", None)
    prefix = Path(torch.__file__).parent / "include" / _PREFIX
    if run is None or not prefix.exists():
        return
    header = _START + "\n".join(_definitions(prefix.read_text()))
    full_headers: set[str] = set()
    others: list[str] = []

    def run_quickly(cmd_line: str, cwd: str) -> None:
        command = shlex.split(cmd_line)
        if "c++-header" in command:
            full_headers.add(cmd_line)
            return
        if _compiles(command, header, folder, cwd):
            return
        others.append(cmd_line)
        if len(others) > _WORTH_PRECOMPILING:
            with _alone(folder):
                for needed in [line for line in full_headers if not Path(_output(shlex.split(line))).exists()]:
                    run(needed, cwd)
        run(cmd_line, cwd)

    cpp_builder.run_compile_cmd = run_quickly


def _definitions(prefix: str) -> list[str]:
    """The texts of the used definitions, each of which ends with a line that is not indented."""
    found = [
        re.search(rf"(?m)^(?:template <.*>\n)?inline .*\b{name}(?: =.*;|\((?:.*\n)+?\}})$", prefix) for name in _USED
    ]
    return [match[0] for match in found if match]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other thread or process of the tests makes a header."""
    with _turn, (folder / "headers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _output(command: list[str]) -> str:
    return command[command.index("-o") + 1]


def _compiles(command: list[str], header: str, folder: Path, cwd: str) -> bool:
    """Whether the command makes a library of a kernel, and the header was enough to make it."""
    sources = [Path(word) for word in command if word.endswith(".cpp")]
    if len(sources) != 1 or "-shared" not in command:
        return False
    text = sources[0].read_text()
    if _REPLACED[0] not in text:
        return False
    for line in _REPLACED:
        text = text.replace(line, "")
    with_flags = (command[0], *_flags(command))
    with _alone(folder):
        small = _precompiled(with_flags, header, folder)
    linker = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
    quick = [*with_flags, "-include", str(small), *linker, "-shared", "-x", "c++", "-", "-o", _output(command)]
    made = subprocess.run(quick, cwd=cwd, input=text, text=True, capture_output=True, check=False)
    return made.returncode == 0


def _flags(command: list[str]) -> list[str]:
    """The flags of a command that decide what its code computes, with the standard that has the smallest headers."""
    words = list(command[1:])
    flags = []
    while words:
        word = words.pop(0)
        if word in ("-D", "-include", "-o"):
            value = words.pop(0)
            flags += [word, value] if word == "-D" else []
        elif word.startswith(("-O", "-D", "-f", "-m", "-I")):
            flags.append(word)
    return [*flags, "-std=c++17"]


@cache
def _precompiled(with_flags: tuple[str, ...], header: str, folder: Path) -> Path:
    """The path of the header, beside which lies what the compiler made of it; nothing can include one with errors."""
    path = folder / f"{sha256(repr((with_flags, header)).encode()).hexdigest()[:16]}.h"
    if not path.exists():
        path.write_text(header)
        command = [*with_flags, "-x", "c++-header", str(path), "-o", f"{path}.gch"]
        subprocess.run(command, capture_output=True, check=False)
    return path

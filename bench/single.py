"""Run one program of bench/ and print its output as JSON, for bench.all.

Usage: python -m bench.single NAME [ARGUMENT ...]. Prints an object of "printed", the lines, and "seconds".
"""

import json
import subprocess
import sys
import time


def main(arguments: list[str]) -> int:
    """Run the program; returns its exit status."""
    name, *rest = arguments
    begin = time.perf_counter()
    command = [sys.executable, "-m", f"bench.{name}", *rest]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(json.dumps({"printed": done.stdout.splitlines(), "seconds": time.perf_counter() - begin}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

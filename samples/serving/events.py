"""Serve a plan of `nimblec.generate`: tokens are sent while the loop that makes them runs, as server-sent events.

Usage: ``python samples/serving/events.py gpt2.plan [PORT]``; then

    curl -N localhost:8000 -d '{"ids": [464, 3290], "count": 40}'

The loop writes its tokens to an array that this program reads; on a GPU it is in page-locked memory. One text is
generated at a time.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain

import numpy as np

import nimblert

POLL_S = 0.001
"""The time between two looks at the array."""


class Server(HTTPServer):
    """A server of one plan for one sequence at a time."""

    def __init__(self, plan: str, port: int) -> None:
        self.model, self.threads = nimblert.load(plan), ThreadPoolExecutor(1)
        name = self.model.entry("generate").outputs[0].name
        self.made = self.model.empty_output(name, entry="generate")
        self.model.bind(name, self.made, entry="generate")
        super().__init__(("127.0.0.1", port), Handler)

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[list[int]]:
        """Yield ``count`` tokens after a prompt, some at a time; fewer where the text ends or the caches are full.

        Raises ValueError for a prompt that no entry takes.
        """
        sizes = sorted(int(name.removeprefix("prefill_")) for name in self.model.entries if "_" in name)
        size = next((size for size in sizes if len(prompt) <= size), None)
        if size is None or not prompt:
            raise ValueError(f"ids: {len(prompt)} tokens, expected 1 to {sizes[-1]}")
        ids = np.zeros((1, size), np.int64)
        ids[0, : len(prompt)] = prompt
        first = self.model(ids, np.array([len(prompt)]), entry=f"prefill_{size}")
        yield np.asarray(first).tolist()
        left = count - 1
        while left > 0:
            before = left
            for tokens in self.generated(left):
                yield tokens
                left -= len(tokens)
            if left == before:
                return

    def generated(self, count: int) -> Iterator[list[int]]:
        """Yield the tokens of one run of the loop, which makes at most ``count``, as they come."""
        self.made[:] = -1
        run = self.threads.submit(self.model, np.array(count), entry="generate")
        sent, is_over = 0, False
        while not is_over:
            is_over = run.done()
            ready = int((self.made[0] >= 0).sum())
            if ready > sent:
                yield self.made[0, sent:ready].tolist()
                sent = ready
            elif not is_over:
                time.sleep(POLL_S)
        run.result()


class Handler(BaseHTTPRequestHandler):
    """Answers a request for a text."""

    server: Server

    def do_POST(self) -> None:
        """Send tokens as events, or status 400 and a sentence."""
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            events = self.server.tokens(list(map(int, request["ids"])), int(request["count"]))
            first = next(events)
        except (KeyError, TypeError, ValueError, nimblert.InputError) as exc:
            self.send_error(400, str(exc))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for tokens in chain([first], events):
            self.wfile.write(f"data: {json.dumps(tokens)}\n\n".encode())


if __name__ == "__main__":
    Server(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8000).serve_forever()

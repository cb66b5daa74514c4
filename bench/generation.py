"""Whole generations in one launch, beside transformers' static cache under torch.compile.

    python -m bench.generation -o bench/results/gpu/generation.json
    python -m bench.generation --show bench/results/gpu/generation.json

Models have the shapes of GPT-2 and of a Llama of 1.1 billion parameters, with random weights; batch 1, a prompt of 16
tokens, then 128 greedy ones. Each system has a process of its own; they measure one at a time (bench/turns.py). A
figure is the lowest of some whole calls, without the prompt. "one by one" are calls of a single token each.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import environment
from bench.tables import number, table
from bench.turns import Turn, measured

MODELS = ("gpt2:fp32", "gpt2:bf16", "llama:fp32", "llama:bf16")
SYSTEMS = ("nimblec", "transformers")
_PROMPT, _TOKENS, _REPEATS = 16, 128, 5


def build(model: str) -> Any:
    """Return a causal language model of transformers with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from samples.text import tiny_llama

    torch.manual_seed(0)
    name, _, dtype = model.partition(":")
    made = GPT2LMHeadModel(GPT2Config()) if name == "gpt2" else tiny_llama()
    return made.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).eval()


def _lowest_ms(call: Callable[[], object], before: Callable[[], object], repeats: int = _REPEATS) -> float:
    times = []
    for _ in range(repeats):
        before()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def _static(model: Any, ids: torch.Tensor) -> Callable[[int], np.ndarray]:
    """Return transformers' generation with a static cache, whose steps it compiles itself."""

    def generate(tokens: int) -> np.ndarray:
        how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "cache_implementation": "static"}
        found: torch.Tensor = model.generate(ids, max_new_tokens=tokens, **how)
        return found[0, _PROMPT:].cpu().numpy()

    return generate


def _compared(tokens: np.ndarray, greedy: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return how many tokens are equal to greedy ones, and how far eager's logit of the next is below its highest.

    The distance is in units of the last place of the highest.
    """
    equal = int((tokens == greedy.sequences[0, _PROMPT:].cpu().numpy()).cumprod().sum())
    if equal == len(tokens):
        return {"equal_to_greedy": equal}
    logits = greedy.logits[equal][0].double().cpu().numpy()
    highest = logits.max()
    unit = torch.finfo(dtype).eps * 2.0 ** np.floor(np.log2(abs(highest)))
    return {"equal_to_greedy": equal, "units_below": float((highest - logits[tokens[equal]]) / unit)}


def measure(name: str, system: str, level: int) -> None:
    """Report the times of a system; nimblec's with how many tokens are equal to those of eager greedy search."""
    turn, model = Turn(wait=True), build(name)
    ids = torch.randint(0, model.config.vocab_size, (1, _PROMPT))
    if system == "transformers":
        generate = _static(model.cuda(), ids.cuda())
        for _ in range(3):
            generate(_TOKENS + 1)
        turn.begin()
        whole = _lowest_ms(lambda: generate(_TOKENS + 1), before=torch.cuda.synchronize)
        turn.report(whole_ms=whole - _lowest_ms(lambda: generate(1), before=torch.cuda.synchronize))
        turn.end()
        return
    import nimblec
    import nimblert

    made = nimblec.generate(model, prompts=(_PROMPT,), max_new_tokens=_TOKENS)
    plan = nimblec.compile(made, target="cuda", level=level, plan_cache=None)
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}
    with torch.no_grad():
        greedy = model.cuda().generate(ids.cuda(), max_new_tokens=_TOKENS + 1, output_logits=True, **how)
    with nimblert.load(plan) as exe:

        def prefill() -> Any:
            return exe(ids.numpy(), np.array([_PROMPT]), entry="prefill_16")

        def generate_by(step: int) -> None:
            for _ in range(0, _TOKENS, step):
                exe(np.array(step), entry="generate")

        first = prefill()
        tokens, _ = exe(np.array(_TOKENS), entry="generate")
        compared = _compared(np.concatenate([np.ravel(first), np.ravel(tokens)]), greedy, model.dtype)
        turn.begin()
        turn.report(
            whole_ms=_lowest_ms(lambda: generate_by(_TOKENS), prefill),
            one_by_one_ms=_lowest_ms(lambda: generate_by(1), prefill),
            **compared,
        )
        turn.end()


def show(figures: dict[str, Any]) -> list[str]:
    """Return the table of milliseconds for 128 tokens."""
    rows = []
    for name in MODELS:
        ours, theirs = (figures["figures"].get(f"{name}/{system}", {}) for system in SYSTEMS)
        if not ours:
            continue
        times = ours.get("whole_ms"), ours.get("one_by_one_ms"), theirs.get("whole_ms")
        ratio = times[0] and times[2] and times[2] / times[0]
        equal, below = str(ours["equal_to_greedy"]), number(ours.get("units_below"), 0)
        rows.append([name, *(number(t, 1) for t in times), number(ratio, 2), equal, below])
    columns = ("nimblec", "one by one", "transformers", "ratio", "equal of 129", "next below, ulp")
    return table(["ms for 128 tokens", *columns], rows)


def main(arguments: Sequence[str]) -> None:
    """Measure every model in both systems, and write and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--level", type=int, default=2, choices=(0, 1, 2))
    parser.add_argument("--limit-s", type=float, default=3600, help="time after which no figure is waited for")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of these figures")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.show:
        print("\n".join(show(json.loads(options.show.read_text()))))
        return
    if options.one:
        name, system = options.one
        measure(name, system, options.level)
        return
    machine = environment.describe()
    pairs = [(model, system) for model in options.models or MODELS for system in SYSTEMS]
    results = measured("bench.generation", ("--level", str(options.level)), pairs, limit_s=options.limit_s)
    found = {"/".join(pair): result for pair, result in results.items() if "failed" not in result}
    figures = {"machine": machine, "level": options.level, "figures": found}
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(show(figures)))


if __name__ == "__main__":
    main(sys.argv[1:])

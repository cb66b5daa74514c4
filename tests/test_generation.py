"""Whole generations in one call: prefill entries and a loop of tokens, equal to the module's own, on the CPU target."""

import json
import threading
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nimblec
import nimblert
from nimblec.pytorch.generation import Sampling
from nimblert.executable import Executable
from nimblert.plan import Memcpy, While
from samples.serving.events import Server

VOCABULARY, LENGTH = 40, 24


class Decoder(nn.Module):
    """Two layers of attention over a cache of `LENGTH` positions."""

    def __init__(self, batch: int = 2, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.into = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.Linear(width, VOCABULARY)
        for layer in range(2):
            for name in ("keys", "values"):
                self.register_buffer(f"{name}{layer}", torch.zeros(batch, heads, LENGTH, width // heads))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Map tokens and positions (batch x steps) to logits (batch x steps x vocabulary)."""
        x = self.token(ids) + self.place(positions)
        mask = torch.arange(LENGTH) <= positions[:, None, :, None]
        for layer, into in enumerate(self.into):
            q, k, v = into(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            keys, values = getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")
            at = positions[:, None, :, None].expand(k.shape)
            keys.scatter_(2, at, k)
            values.scatter_(2, at, v)
            attended = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + attended.transpose(1, 2).flatten(2)
        scores: Tensor = self.out(x)
        return scores


def decoder(batch: int = 2) -> Decoder:
    torch.manual_seed(3)
    return Decoder(batch).eval()


def greedy(prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    """Generate without a cache: all tokens are read again for each new one."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            scores = decoder(1)(torch.tensor([tokens]), torch.arange(len(tokens))[None])
        tokens.append(int(scores[0, -1].argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


def compiled(
    model: nn.Module, *, target: Literal["cpu", "cuda"] = "cpu", level: int | None = None, **options: Any
) -> Executable:
    entries = nimblec.generate(model, prompts=(4, 8), max_new_tokens=16, **options)
    how = {"target": target, "level": level, "reproducible": level != 2}
    return nimblert.load(nimblec.compile(entries, plan_cache=None, **how))


PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5])


def begin(executable: Executable, prompts: Any = PROMPTS) -> list[int]:
    """Prefill, and return the first new tokens."""
    ids = np.zeros((len(prompts), 8), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    first: list[int] = np.asarray(executable(ids, lengths, entry="prefill_8")).tolist()
    return first


def test_sequences_of_different_lengths_get_the_tokens_of_each_alone_in_one_call() -> None:
    with compiled(decoder(), batch=2) as executable:
        assert tuple(executable.entries) == ("prefill_4", "prefill_8", "generate")
        commands = [c for p in executable.plan.programs if p.entry == "generate" for c in p.commands]
        assert sum(isinstance(command, While) for command in commands) == 1
        first = begin(executable)
        made, count = executable(np.array(9), entry="generate")
        assert count == 9
        tokens = [[token, *row[:9].tolist()] for token, row in zip(first, made, strict=True)]
        assert tokens == [greedy(prompt, 10) for prompt in PROMPTS]
        more, count = executable(np.array(3), entry="generate")
        assert [row[:3].tolist() for row in more] == [greedy(prompt, 13)[10:] for prompt in PROMPTS]
        assert count == 3


def test_a_generation_ends_at_the_last_end_and_where_the_caches_are_full() -> None:
    eos = greedy(PROMPTS[0], 4)[3]
    with compiled(decoder(1), batch=1, eos=eos) as executable:
        first = begin(executable, PROMPTS[:1])
        made, count = executable(np.array(16), entry="generate")
        assert [*first, *made[0, : int(count)].tolist()] == greedy(PROMPTS[0], 16, eos)
        assert executable(np.array(5), entry="generate")[1] == 0, "the sequence has ended"
    with compiled(decoder(1), batch=1) as executable:
        begin(executable, PROMPTS[1:])
        counts = [int(executable(np.array(100), entry="generate")[1]) for _ in range(3)]
        assert counts == [16, 2, 0], "of 24 positions 6 hold the prompt"


def test_caches_are_written_in_place() -> None:
    with compiled(decoder(), batch=2) as executable:
        plan = executable.plan
    largest = max(weight.data.nbytes for weight in plan.state)
    copies = [c.nbytes for p in (*plan.programs, *plan.bodies) for c in p.commands if isinstance(c, Memcpy)]
    assert largest < 32 << 10 or max(copies) < largest


def test_drawn_tokens_repeat_with_the_seed_and_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]]).expand(2000, -1)
    chosen = Sampling(temperature=2.0).choose(logits, torch.tensor(7), torch.tensor(0))
    wanted = torch.softmax(logits[0] / 2, -1)
    assert torch.allclose(torch.bincount(chosen, minlength=5) / 2000, wanted, atol=0.04)
    assert set(Sampling(temperature=2.0, top_k=2).choose(logits, torch.tensor(7), torch.tensor(0)).tolist()) == {0, 1}
    likeliest = Sampling(temperature=1.0, top_p=0.5).choose(logits, torch.tensor(7), torch.tensor(0))
    assert set(likeliest.tolist()) == {0}
    with compiled(decoder(), batch=2, temperature=1.5, top_k=30, top_p=0.95, seed=11) as executable:
        runs = []
        for _ in range(2):
            executable.reset()
            runs.append((begin(executable), executable(np.array(12), entry="generate")[0].tolist()))
        assert runs[0] == runs[1]
        executable.reset()
        executable.state["shared.seed"] = np.array(12)
        assert (begin(executable), executable(np.array(12), entry="generate")[0].tolist()) != runs[0]


@pytest.mark.parametrize(
    ("target", "level"), [("cpu", None), *(pytest.param("cuda", level, marks=pytest.mark.gpu) for level in (1, 2))]
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers_generate_what_the_library_does(
    kind: str, target: Literal["cpu", "cuda"], level: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=64)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=VOCABULARY, **sizes)
        model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 5:]
    with compiled(model, batch=1, target=target, level=level) as executable:
        first = begin(executable, prompt.tolist())
        made, _ = executable(np.array(11), entry="generate")
    assert [*first, *made[0, :11].tolist()] == wanted.tolist()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"prompts": ()}, r"prompts: \(\), expected lengths of at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens, batch: 0, 1, expected at least 1"),
        ({"top_p": 0.0}, "temperature, top_k, top_p: 0.0, 0, 0.0, expected"),
    ],
)
def test_arguments_out_of_range_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(nimblec.ArgumentError, match=sentence):
        nimblec.generate(decoder(), **given)


def test_a_token_out_of_range_is_an_error_that_changes_nothing() -> None:
    with compiled(decoder(), batch=2) as executable:
        before = {name: np.asarray(executable.state[name]) for name in executable.state}
        with pytest.raises(nimblert.InputError, match="failed on these inputs"):
            begin(executable, ([3, 1, 99], [1]))
        assert all(np.array_equal(before[name], executable.state[name]) for name in before)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sample_sends_tokens_while_the_loop_runs(tmp_path: Path, target: Literal["cpu", "cuda"]) -> None:
    torch.manual_seed(3)
    model = Decoder(1, width=768).eval()
    entries = nimblec.generate(model, prompts=(4, 8), max_new_tokens=16)
    nimblec.compile(entries, target=target, plan_cache=None, reproducible=True).save(tmp_path / "m.plan")
    server = Server(str(tmp_path / "m.plan"), 0)
    with server.model:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        events = urlopen(url, json.dumps({"ids": PROMPTS[0], "count": 12}).encode()).read().decode()
        sent = [json.loads(event.removeprefix("data: ")) for event in events.strip().split("\n\n")]
        assert len(sent[0]) == 1
        # A GPU makes all 11 tokens of the loop within about a millisecond.
        assert len(sent) > (2 if target == "cpu" else 1), "the loop, one run of the plan, makes 11 of the 12 tokens"
        first = begin(server.model, PROMPTS[:1])
        made, count = server.model(np.array(11), entry="generate")
        assert count == 11
        assert [token for tokens in sent for token in tokens] == [*first, *made[0, :11].tolist()]
        with pytest.raises(HTTPError, match="ids: 9 tokens, expected 1 to 8"):
            urlopen(url, json.dumps({"ids": [1] * 9, "count": 2}).encode())
        server.shutdown()
    server.server_close()

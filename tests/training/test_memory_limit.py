"""A training step in less memory: activations are computed again, and nothing else changes."""

import numpy as np
import torch
from torch import nn

import nimblec
import nimblert
from nimblert.plan import Plan, Program

BATCH = torch.linspace(-1, 1, 64 * 32).reshape(64, 32).cos(), torch.arange(64) % 10


def step() -> object:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return nimblec.training_step(model, nn.functional.cross_entropy, optimizer, BATCH)


def trained(plan: Plan) -> dict[str, np.ndarray]:
    """The losses of five steps, and the state after them."""
    with nimblert.load(plan, poison=True) as executable:
        images, labels = (tensor.numpy() for tensor in BATCH)
        losses = [np.asarray(executable(images, labels, entry="train")) for _ in range(5)]
        return {"losses": np.stack(losses), **{name: np.array(value) for name, value in executable.state.items()}}


def train_program(plan: Plan) -> Program:
    return next(program for program in plan.programs if program.entry == "train")


def test_two_thirds_of_the_memory_gives_the_same_bits() -> None:
    plain = nimblec.compile(step(), target="cpu")
    before = train_program(plain)
    limit = before.arena_nbytes * 2 // 3
    small = nimblec.compile(step(), target="cpu", memory_limit=limit)
    after = train_program(small)
    assert after.arena_nbytes <= limit
    assert len(before.commands) < len(after.commands) < 1.5 * len(before.commands)
    assert after.schedule is not None
    assert after.schedule.policy.startswith("recompute-")
    expected, found = trained(plain), trained(small)
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not np.array_equal(value, found[name])] == []

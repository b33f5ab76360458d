"""PPO (Schulman et al., 2017) learns to balance poles on carts. The carts go on from update to
update, so their state is a part of the run.

python -m examples.rl run.pm      # kill it at any moment, and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import pmstore
import pmstore.torch

CARTS, HORIZON, LIMIT = 16, 64, 200


class CartPoles:
    """Sixteen carts side by side (Barto, Sutton, Anderson, 1983). A pole that falls begins anew."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.state = self.rng.uniform(-0.05, 0.05, (CARTS, 4))
        self.age = np.zeros(CARTS, int)

    def step(self, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pushes each cart. Returns: which poles are over, and the age that each had."""
        _, speed, angle, spin = self.state.T
        push = (np.where(right, 10.0, -10.0) + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (
            2 / 3 - 0.05 / 1.1 * np.cos(angle) ** 2
        )
        change = np.stack([speed, push - 0.05 / 1.1 * turn * np.cos(angle), spin, turn], 1)
        self.state, self.age = self.state + 0.02 * change, self.age + 1
        fallen = (abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > 0.21)
        over, age = fallen | (self.age == LIMIT), self.age
        fresh = self.rng.uniform(-0.05, 0.05, (CARTS, 4))
        self.state, self.age = np.where(over[:, None], fresh, self.state), np.where(over, 0, age)
        return over, age

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "age": self.age, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.state, self.age = np.array(kept["state"]), np.array(kept["age"])
        self.rng.bit_generator.state = kept["rng"]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, seen: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        return Categorical(logits=self.actor(seen)), self.critic(seen).squeeze(-1)


def train(path: str, updates: int = 60) -> float:
    """Goes on from the last committed update, to so many in all. Returns: for how many steps a
    pole was balanced lately; the most is 200."""
    torch.manual_seed(0)
    policy, carts = Policy(), CartPoles()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(
            store, model=policy, optimizer=optimizer, stateful={"carts": carts}
        )
        print(f"goes on after update {run.step}" if run.resumed else "a new run", flush=True)
        for _ in run.steps(updates):
            seen, actions, old, values, over, ages = rollout(policy, carts)
            gains, gain = torch.zeros(HORIZON, CARTS), torch.zeros(CARTS)
            for t in reversed(range(HORIZON)):
                going = 1 - over[t]
                gain = 1 + 0.99 * values[t + 1] * going - values[t] + 0.95 * 0.99 * going * gain
                gains[t] = gain
            wanted = gains + values[:-1]
            for chosen in torch.randperm(HORIZON * CARTS).repeat(4).split(256):
                said, value = policy(seen.flatten(0, 1)[chosen])
                ratio = (said.log_prob(actions.flatten()[chosen]) - old.flatten()[chosen]).exp()
                better = gains.flatten()[chosen]
                better = (better - better.mean()) / better.std()
                clipped = torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
                loss = nn.functional.mse_loss(value, wanted.flatten()[chosen]) / 50 - clipped
                optimizer.zero_grad()
                (loss - 0.01 * said.entropy().mean()).backward()
                optimizer.step()
            if ages:
                run.log(balanced=float(np.mean(ages)))
        balanced = float(run.history("balanced")[1][-5:].mean())
        print(f"update {run.step} committed, balanced for {balanced:.0f} steps of {LIMIT}")
    return balanced


@torch.no_grad()
def rollout(policy: Policy, carts: CartPoles) -> tuple[Any, ...]:
    seen, actions, chances, values, overs, ages = [], [], [], [], [], []
    for t in range(HORIZON + 1):
        now = torch.tensor(carts.state, dtype=torch.float32)
        said, value = policy(now)
        values.append(value)
        if t < HORIZON:
            action = said.sample()
            over, age = carts.step(action.numpy() == 1)
            seen.append(now)
            actions.append(action)
            chances.append(said.log_prob(action))
            overs.append(torch.tensor(over, dtype=torch.float32))
            ages += age[over].tolist()
    return *map(torch.stack, (seen, actions, chances, values, overs)), ages


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "rl.pm")

"""A small GPT learns to write one character after another. Its text is the language reference that
Python's `help()` shows.

python -m examples.transformer run.pm      # kill it at any moment, and start it again
"""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import pmstore
import pmstore.torch

CONTEXT, WIDTH, HEADS = 32, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters: int, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)], nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, letters, bias=False)
        self.head.weight = self.token.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        place = self.place(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(self.token(tokens) + place))


def train(path: str, steps: int = 600) -> float:
    """Goes on from the last committed step, to so many in all. Returns: the mean loss of the last
    fifty steps, in nats a character."""
    torch.manual_seed(0)
    text = "".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text[:200_000]])
    model = GPT(len(letters))
    for embedding in (model.token, model.place):
        nn.init.normal_(embedding.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=30)
    with pmstore.open(path) as store:
        run = pmstore.torch.attach(store, model=model, optimizer=optimizer, lr_scheduler=warm_up)
        print(f"goes on after step {run.step}" if run.resumed else "a new run", flush=True)
        for _ in run.steps(steps):
            begins = torch.randint(len(data) - CONTEXT, (16, 1))  # the same after a resume
            piece = data[begins + torch.arange(CONTEXT + 1)]
            loss = F.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            run.log(loss=loss)
        lately = float(run.history("loss")[1][-50:].mean())
        print(f"step {run.step} committed, {lately:.2f} nats a character")
    return lately


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "transformer.pm")

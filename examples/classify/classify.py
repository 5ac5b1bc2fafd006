"""What kind of text is it? Encoders over its bytes, with dense and with adaptive sparse attention (README.md)."""

import argparse
import sys
import time

import heddle.nn
import texts
import torch
from torch import nn
from torch.nn import functional


class Dense(nn.Module):
    """Layers over all keys, and a norm: what ASAMEncoder is without its patterns."""

    def __init__(self, config, layers):
        super().__init__()
        make = lambda: heddle.nn.EfficientASAMLayer(
            config.dim, config.num_heads, dropout=config.dropout, use_local_attention=False
        )
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x, lengths):
        for layer in self.layers:
            x, _ = layer(x, lengths=lengths)
        return self.norm(x)


class Adaptive(nn.Module):
    def __init__(self, config, layers):
        super().__init__()
        self.encoder = heddle.nn.ASAMEncoder(config, layers)
        self.infos = []

    def forward(self, x, lengths):
        x, self.infos = self.encoder(x, lengths=lengths, return_info=True)
        return x


class Classifier(nn.Module):
    """Bytes [B, T] to logits of kinds: the mean over a text of what an encoder makes of it."""

    def __init__(self, encoder, dim, kinds):
        super().__init__()
        self.bytes = nn.Embedding(256, dim)
        self.neighbours = nn.Conv1d(dim, dim, 5, padding=2)  # so that a byte knows the few around it
        self.encoder, self.head = encoder, nn.Linear(dim, kinds)

    def forward(self, x, lengths):
        x = self.bytes(x)
        x = x + self.neighbours(x.transpose(1, 2)).transpose(1, 2)
        used = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        return self.head((self.encoder(x, lengths) * used).sum(1) / lengths[:, None])


def train(model, pieces, *, steps, batch, rate, seed):
    """Losses, and seconds of a step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    generator = torch.Generator().manual_seed(seed)
    losses, begun = [], time.perf_counter()
    for _ in range(steps):
        x, lengths, y = pieces.batch(batch, generator)
        loss = functional.cross_entropy(model.train()(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - begun) / steps


@torch.no_grad()
def test(model, pieces, batch):
    """The share that is right, seconds of a batch, and of the pairs those that are attended."""
    right, ratios, begun = 0, [], time.perf_counter()
    rounds = range(0, len(pieces.y), batch)
    for at in rounds:
        part = slice(at, at + batch)
        right += (model.eval()(pieces.x[part].long(), pieces.lengths[part]).argmax(-1) == pieces.y[part]).sum().item()
        ratios += [info["sparse_ratio"].item() for info in getattr(model.encoder, "infos", [])]
    return (
        right / len(pieces.y),
        (time.perf_counter() - begun) / len(rounds),
        sum(ratios) / len(ratios) if ratios else 1.0,
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096, help="bytes of a text")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--files", type=int, default=200, help="of each kind")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    for name in ("context", "steps", "batch", "files", "layers"):
        if getattr(wanted, name) < 1:
            parser.error(f"--{name} is {getattr(wanted, name)}: it must be at least 1")
    kinds, train_on, test_on = texts.gather(wanted.context, wanted.files)
    print(
        f"{len(train_on.y)} texts to train on, {len(test_on.y)} to test on, of {wanted.context} bytes: {', '.join(kinds)}\n"
    )
    small = {"dim": 64, "num_heads": 4, "dim_head": 16, "dropout": 0.0}
    config = heddle.nn.ASAMConfig
    encoders = {
        "dense": lambda: Dense(config(**small), wanted.layers),
        "adaptive": lambda: Adaptive(config(**small), wanted.layers),
        "local, no gate": lambda: Adaptive(
            config(**small, pattern_type="local", use_adaptive_gate=False), wanted.layers
        ),
    }
    print(f"{'attention':16} {'loss':>16} {'right':>7} {'pairs':>7} {'training step':>15} {'batch of answers':>17}")
    for name, make in encoders.items():
        torch.manual_seed(wanted.seed)
        model = Classifier(make(), small["dim"], len(kinds))
        losses, step = train(model, train_on, steps=wanted.steps, batch=wanted.batch, rate=2e-3, seed=wanted.seed)
        right, answer, pairs = test(model, test_on, wanted.batch)
        loss = f"{losses[0]:.3f} -> {losses[-1]:.3f}"
        print(f"{name:16} {loss:>16} {right:7.1%} {pairs:7.1%} {step * 1e3:12.0f} ms {answer * 1e3:14.0f} ms")
        if not right > 1.2 / len(kinds):
            sys.exit(
                f"classify.py: {name}: {right:.1%} are right, which is no more than a guess: train with more --steps"
            )


if __name__ == "__main__":
    main()

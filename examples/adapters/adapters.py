"""Fine-tuning with low-rank adapters over weights in 4 bits, beside fine-tuning of all weights (README.md)."""

import argparse
import copy
import hashlib
import math
import sys
from pathlib import Path

import heddle.nn
import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

import data  # noqa: E402

from model import Model, Shape  # noqa: E402

SHAPE = Shape(layers=2, heads=4, head_size=32, context=128)


class Adapted(nn.Module):
    """y = W x + b a x: W stays as it is, a and b train (LoRA: Hu et al., arXiv 2106.09685, its alpha being the rank). b begins at
    zero, and so does what the adapter adds."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + functional.linear(functional.linear(x, self.a), self.b)


def adapt(model, format, rank):
    """Quantises the model's linear layers, freezes all that it has, and puts an adapter over each layer; in place. Gradients reach
    the adapters through the layers in 4 bits."""
    names = list(heddle.nn.linear_layers(model))
    heddle.nn.quantize_model(model, format)
    model.requires_grad_(False)
    for name in names:
        layer = model.get_submodule(name)
        layer.drop_plain()  # the packed weights serve the forward and the backward
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(layer, rank))
    return model


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def digest(model):
    """A hash of every byte of the state but what trains."""
    training = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = hashlib.sha256()
    for name, x in model.state_dict().items():
        if name not in training and isinstance(x, torch.Tensor):
            found.update(x.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def bytes_of(model, optimizer):
    """{"weights", "gradients", "optimizer"}: bytes of the model's tensors, of gradients, and of what AdamW remembers."""
    held = sum(module.held_bytes for module in model.modules() if isinstance(module, heddle.nn.Linear))
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return {
        "weights": held + sum(parameter.nbytes for parameter in model.parameters()),
        "gradients": sum(parameter.grad.nbytes for parameter in trainable(model)),
        "optimizer": sum(x.nbytes for x in states),
    }


def loss_of(model, inputs, targets):
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(model, text, *, steps, rate, seed, batch=8):
    """Trains what has gradients; returns the loss of each step, and the optimizer."""
    optimizer = torch.optim.AdamW(trainable(model), lr=rate, weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, *data.batch(text, batch, SHAPE.context, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def held_out_loss(model, text):
    with torch.no_grad():
        return loss_of(model, *data.batch(text, 32, SHAPE.context, torch.Generator().manual_seed(0))).item()


def texts():
    """(sources of Python, licences, a licence kept apart): uint8 each."""
    licences = [path for path in data.files() if path.parent == data.LICENCES]
    if len(licences) < 2:
        sys.exit(f"adapters.py: {data.LICENCES} has {len(licences)} licences: they are what is learnt, on Debian")
    read = lambda paths: torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    return data.gather(limit=100).train, read(licences[:-1]), read(licences[-1:])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default="nvfp4", help="of the frozen weights")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument(
        "--pretrain", type=int, default=150, metavar="STEPS", help="of all weights, on sources of Python"
    )
    parser.add_argument("--steps", type=int, default=100, help="of fine-tuning, on licences")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    for name in ("rank", "pretrain", "steps"):
        if getattr(wanted, name) < 1:
            parser.error(f"--{name} is {getattr(wanted, name)}: it must be at least 1")
    torch.manual_seed(wanted.seed)
    sources, licences, apart = texts()
    model = Model(SHAPE, attention="heddle")
    losses, _ = train(model, sources, steps=wanted.pretrain, rate=3e-3, seed=wanted.seed)
    print(
        f"pretrained on sources: loss {losses[0]:.3f} -> {losses[-1]:.3f}; of licences {held_out_loss(model, apart):.3f}"
    )

    full, adapted = copy.deepcopy(model), adapt(copy.deepcopy(model), wanted.format, wanted.rank)
    before = digest(adapted)
    print(f"\n{'':24} {'trained':>8} {'loss of licences':>18} {'weights':>9} {'gradients':>9} {'optimizer':>9}  bytes")
    for name, tuned, rate in (("all weights, float32", full, 1e-3), (f"adapters over {wanted.format}", adapted, 5e-3)):
        begun = held_out_loss(tuned, apart)
        _, optimizer = train(tuned, licences, steps=wanted.steps, rate=rate, seed=wanted.seed + 1)
        ended = held_out_loss(tuned, apart)
        count, memory = sum(x.numel() for x in trainable(tuned)), bytes_of(tuned, optimizer)
        columns = " ".join(f"{memory[kind]:9}" for kind in ("weights", "gradients", "optimizer"))
        print(f"{name:24} {count:8} {f'{begun:.3f} -> {ended:.3f}':>18} {columns}")
        if not ended < begun:
            sys.exit(f"adapters.py: the loss did not fall: {begun} before, {ended} after")
    if digest(adapted) != before:
        sys.exit("adapters.py: fine-tuning changed frozen weights")
    print(f"\nfrozen weights before and after the adapters were trained: sha256 {before[:16]}, the same")


if __name__ == "__main__":
    main()

"""Trains a small causal language model on real text, with Heddle's attention and with torch's: same seed, same batches.

  python examples/train/train.py --attention both --precision bf16
  python examples/train/train.py --attention all --precision all --checkpointing both --out train.json
  python examples/train/train.py --device cpu --layers 2 --context 128 --batch 4 --steps 20

`both` is heddle and torch; `all` adds torch's unfused computation, whose distance from torch's own kernel is the noise that
Heddle's distance is compared with. Runs that are in --out already are replaced, others kept; report.py reads the file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import pathlib
import statistics
import time

import results
import torch
from data import batch, gather

from bench import gpu_timing
from model import BYTES, DENSE, GATED, Model, Shape

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
VALIDATION_BATCHES = 4
WARM_UP = 20  # steps in which the learning rate grows
LOG_EVERY = 10  # steps between two lines, unless --log-every says otherwise


@dataclasses.dataclass(frozen=True)
class Settings:
    attention: str = "heddle"
    precision: str = "fp32"
    checkpointing: bool = False
    device: str = "cuda"
    shape: Shape = Shape()
    batch: int = 8
    steps: int = 200
    seed: int = 1
    rate: float = 6e-4

    @property
    def name(self):
        return f"{self.attention} {self.precision}{' checkpointing' if self.checkpointing else ''}"


def learning_rate(step, settings):
    """Up in WARM_UP steps, then down to a tenth along half a cosine."""
    if step < WARM_UP:
        return settings.rate * (step + 1) / WARM_UP
    share = (step - WARM_UP) / max(1, settings.steps - WARM_UP)
    return settings.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


class Trainer:
    def __init__(self, settings):
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.model = Model(settings.shape, settings.attention, settings.checkpointing).to(settings.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), settings.rate, (0.9, 0.95), weight_decay=0.1)
        # Small gradients would vanish in float16: they are scaled, and a step in which one overflows is left out.
        self.scaler = torch.amp.GradScaler(settings.device, enabled=settings.precision == "fp16")

    def loss(self, inputs, targets):
        dtype = PRECISIONS[self.settings.precision]
        with contextlib.nullcontext() if dtype is None else torch.autocast(self.settings.device, dtype):
            return torch.nn.functional.cross_entropy(self.model(inputs).view(-1, BYTES), targets.reshape(-1))

    def step(self, number, inputs, targets):
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.settings)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(inputs, targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def train(settings, corpus, log_every=0, after=None):
    """One run: its losses, its speed after the first steps, its peak memory. A line every log_every steps; 0: none.

    after: is called with the trainer and a batch for validation, without gradients, once the model has learnt.
    """
    trainer, device = Trainer(settings), settings.device
    on_gpu = device == "cuda"

    def draw(text, generator):
        inputs, targets = batch(text, settings.batch, settings.shape.context, generator)
        return inputs.to(device), targets.to(device)

    def clock():
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    generator = torch.Generator().manual_seed(settings.seed)
    losses, first = [], min(10, settings.steps // 2)
    # The steps that count, in as many rounds as every benchmark has; the figure is their median.
    marks = [first + (settings.steps - first) * part // gpu_timing.ROUNDS for part in range(gpu_timing.ROUNDS + 1)]
    clocks = {}
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    logged, since = 0, clock()
    for number in range(settings.steps):
        if number in marks:
            clocks[number] = clock()
        losses.append(trainer.step(number, *draw(corpus.train, generator)))
        if log_every and ((number + 1) % log_every == 0 or number + 1 == settings.steps):
            now, done = clock(), number + 1
            tokens = (done - logged) * settings.batch * settings.shape.context
            print(
                f"{settings.name:26} step {done} of {settings.steps}: loss {losses[-1].item():.4f}, "
                f"{tokens / (now - since):.0f} tokens/s",
                flush=True,
            )
            logged, since = done, now
    clocks[settings.steps] = clock()
    numbers = sorted(clocks)  # a round of no step is none
    seconds = [(clocks[b] - clocks[a]) / (b - a) for a, b in zip(numbers, numbers[1:])]  # of a step
    generator.manual_seed(0)  # the same pieces for every run
    with torch.no_grad():
        validation = torch.stack([trainer.loss(*draw(corpus.validation, generator)) for _ in range(VALIDATION_BATCHES)])
        if after:
            after(trainer, *draw(corpus.validation, generator))
    return {
        "name": settings.name,
        **{key: value for key, value in dataclasses.asdict(settings).items() if key != "shape"},
        **dataclasses.asdict(settings.shape),
        "losses": torch.stack(losses).double().tolist(),
        "validation_loss": validation.double().mean().item(),
        "tokens_per_second": settings.batch * settings.shape.context / statistics.median(seconds),
        "spread": gpu_timing.spread(seconds),
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
        "scale": trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=[*DENSE, *GATED, "both", "all"], default="both")
    parser.add_argument("--precision", choices=[*PRECISIONS, "all"], default="bf16")
    parser.add_argument(
        "--checkpointing",
        choices=["off", "on", "both"],
        default="off",
        help="compute activations again in the backward",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (
        ("layers", 6),
        ("heads", 8),
        ("head-size", 64),
        ("context", 2048),
        ("batch", 8),
        ("steps", 200),
        ("seed", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument(
        "--log-every",
        type=int,
        default=LOG_EVERY,
        help=f"a line every so many steps; 0: when a run ends alone; default {LOG_EVERY}",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="torch.use_deterministic_algorithms: a repeat has the same bits"
    )
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of runs, for report.py")
    given = parser.parse_args(arguments)
    torch.use_deterministic_algorithms(given.deterministic)
    corpus = gather()
    print(corpus)
    shape = Shape(given.layers, given.heads, given.head_size, given.context)
    attentions = {"both": ["heddle", "torch"], "all": list(DENSE)}.get(given.attention, [given.attention])
    for precision in PRECISIONS if given.precision == "all" else [given.precision]:
        for checkpointing in {"off": [False], "on": [True], "both": [False, True]}[given.checkpointing]:
            for attention in attentions:
                run = train(
                    Settings(
                        attention, precision, checkpointing, given.device, shape, given.batch, given.steps, given.seed
                    ),
                    corpus,
                    given.log_every,
                )
                memory = "" if run["peak_mib"] is None else f", {run['peak_mib']:.0f} MiB"
                print(
                    f"{run['name']:26} loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}, validation {run['validation_loss']:.4f}; "
                    f"{run['tokens_per_second']:.0f} tokens/s{memory}", flush=True
                )  # fmt: skip
                if given.out:
                    results.add(given.out, "runs", [run], corpus)


if __name__ == "__main__":
    main()

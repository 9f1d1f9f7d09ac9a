"""Healthy trainings of many kinds, each small: ``python healthy_models.py NAME --steps 300``; ``JOBS`` names them."""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

WIDTH = 64


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.GELU()]
    return nn.Sequential(*layers[:-1])


TEACHER = mlp(WIDTH, WIDTH, 10)


def batches(steps: int, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(steps):
        x = torch.randn(size, WIDTH)
        with torch.no_grad():
            y = TEACHER(x).argmax(-1)
        yield x, y


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, clip: float | None = 1.0) -> None:
    for x, y in batches(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


# -- One rank ---------------------------------------------------------------------------------------------------------


def plain(steps: int) -> None:
    model = mlp(WIDTH, 128, 128, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)
    for x, y in batches(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def bf16(steps: int) -> None:
    model = mlp(WIDTH, 128, 128, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def fp16_with_skips(steps: int) -> None:
    """The scale is far too high at first and grows every 10 steps, so that steps are skipped again and again."""
    model = mlp(WIDTH, 128, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=10)
    for x, y in batches(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def gan(steps: int) -> None:
    """Two models and two optimizers; the discriminator takes two steps for each of the generator's."""
    generator, critic = mlp(16, 64, 64, 2), mlp(2, 64, 64, 1)
    of_g, of_d = (torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.99)) for model in (generator, critic))
    for _ in range(steps):
        for _ in range(2):
            real = torch.randn(64, 2) * 0.3 + 1
            fake = generator(torch.randn(64, 16)).detach()
            of_d.zero_grad()
            (functional.softplus(-critic(real)).mean() + functional.softplus(critic(fake)).mean()).backward()
            of_d.step()
        of_g.zero_grad()
        functional.softplus(-critic(generator(torch.randn(64, 16)))).mean().backward()
        of_g.step()


def frozen_layers(steps: int) -> None:
    model = mlp(WIDTH, 128, 128, 10)
    model[0].requires_grad_(False)
    classify(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]), steps)


def unfrozen_later(steps: int) -> None:
    """The first layers join after a third of the run."""
    model = mlp(WIDTH, 128, 128, 10)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    classify(model, optimizer, steps // 3)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-4})
    classify(model, optimizer, steps - steps // 3)


class Mixture(nn.Module):
    """Eight experts of which the router chooses one for each sample; some are hardly ever chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(mlp(WIDTH, 32, 10) for _ in range(8))
        with torch.no_grad():
            self.router.bias.copy_(torch.linspace(3, -6, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros(len(x), 10)
        for number, block in enumerate(self.blocks):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, block(x[rows]) * weights[rows, number, None])
        return out


def experts(steps: int) -> None:
    model = Mixture()
    classify(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(WIDTH, 128, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def checkpointing(steps: int) -> None:
    model = Checkpointed()
    classify(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps)


def growing_cache(steps: int) -> None:
    """A cache of batches that fills in the first half of the run: 100 MB, and then no more."""
    model = mlp(WIDTH, 128, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cache: dict[int, Tensor] = {}
    for number, (x, y) in enumerate(batches(steps)):
        if number < steps // 2:
            cache[number] = torch.randn(700, 256)
        optimizer.zero_grad()
        functional.cross_entropy(model(x + cache[number % len(cache)].mean()), y).backward()
        optimizer.step()


def accumulation(steps: int) -> None:
    """Four backward passes for each step, of very different batches."""
    model = mlp(WIDTH, 128, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = batches(4 * steps)
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(4):
            x, y = next(source)
            (functional.cross_entropy(model(x * (1 + part)), y) / 4).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def lbfgs(steps: int) -> None:
    model = mlp(WIDTH, 32, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for x, y in batches(steps // 2, 128):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


class Language(nn.Module):
    """A tied embedding and head, an LSTM between them, padding, and a mask of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH, padding_idx=0)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(self.embed(tokens))[0])
        banned = torch.zeros(100)
        banned[0] = -math.inf
        return logits + banned


def sentences(longest: int = 24) -> Tensor:
    """Ascending tokens from a random start, padded to the longest of the batch."""
    lengths = torch.randint(4, longest, (16, 1))
    start = torch.randint(1, 90, (16, 1))
    tokens = (start + torch.arange(int(lengths.max()))) % 98 + 1
    return tokens.masked_fill(torch.arange(tokens.shape[1]) >= lengths, 0)


def tied_rnn_padded(steps: int) -> None:
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens = sentences()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def longer_sequences(steps: int) -> None:
    """Sequences become six times as long at half of the run, and the loss is a sum."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(steps):
        tokens = sentences(8 if number < steps // 2 else 48)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def ema_copy(steps: int) -> None:
    """A copy follows the model by a moving average, and its parameters never get a gradient."""
    model = mlp(WIDTH, 128, 10)
    follower = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(steps):
        optimizer.zero_grad()
        with torch.no_grad():
            target = follower(x).softmax(-1)
        out = model(x)
        (
            functional.cross_entropy(out, y)
            + 0.1 * functional.kl_div(out.log_softmax(-1), target, reduction="batchmean")
        ).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(follower.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)


def sparse_embedding(steps: int) -> None:
    embed, head = nn.EmbeddingBag(5000, 32, sparse=True), mlp(32, 64, 10)
    model = nn.Sequential(embed, head)
    sparse = torch.optim.SparseAdam(list(embed.parameters()), lr=1e-2)
    dense = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for _ in range(steps):
        words = torch.randint(0, 5000, (32, 8))
        sparse.zero_grad()
        dense.zero_grad()
        functional.cross_entropy(model(words), words[:, 0] % 10).backward()
        sparse.step()
        dense.step()


class LowRank(nn.Module):
    """A frozen layer with a trained addition that begins at zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def lora(steps: int) -> None:
    model = nn.Sequential(
        LowRank(nn.Linear(WIDTH, 128)), nn.GELU(), LowRank(nn.Linear(128, 128)), nn.GELU(), LowRank(nn.Linear(128, 10))
    )
    classify(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3), steps)


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(WIDTH, 128, 128)
        self.kinds, self.sizes = nn.Linear(128, 10), nn.Linear(128, 1)

    def forward(self, x: Tensor, *, kinds: bool) -> Tensor:
        return self.kinds(self.trunk(x)) if kinds else self.sizes(self.trunk(x))


def two_tasks(steps: int) -> None:
    """Two heads that take turns, with losses of different size; a second one joins after a third of the run."""
    model = TwoTasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        if number % 2 and number > steps // 3:
            functional.mse_loss(model(x, kinds=False)[:, 0], 30 * x.sum(-1)).backward()
        else:
            functional.cross_entropy(model(x, kinds=True), y).backward()
        optimizer.step()


def unused_head(steps: int) -> None:
    """A head that nothing uses: this one really has unused parameters."""
    model = TwoTasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x, kinds=True), y).backward()
        optimizer.step()


# -- Several ranks ----------------------------------------------------------------------------------------------------


def ddp_batchnorm(steps: int) -> None:
    """Each rank keeps its own running statistics, and other dropout masks."""
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    classify(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3), steps)


def ddp_last_batch(steps: int) -> None:
    """A real loader with a smaller last batch, which evaluates after each epoch."""
    data = torch.utils.data.TensorDataset(torch.randn(500, WIDTH), torch.randint(0, 10, (500,)))
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(mlp(WIDTH, 128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(steps // len(loader)):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            model(data.tensors[0][:64])


def ddp_padded(steps: int) -> None:
    """Each rank has sequences of its own lengths, and scales the loss by the number of tokens."""
    model = nn.parallel.DistributedDataParallel(Language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        tokens = sentences()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0, reduction="sum")
        (loss / 150).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def fsdp2(steps: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = mlp(WIDTH, 128, 128, 10)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    classify(model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps)


def tensor_parallel(steps: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(
        nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
    )
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(5)  # ranks that share the parts of one model get the same batches
    classify(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), steps, clip=None)


ALONE: tuple[Callable[[int], None], ...] = (
    *(plain, bf16, fp16_with_skips, gan, frozen_layers, unfrozen_later, experts, checkpointing, growing_cache),
    *(accumulation, lbfgs, tied_rnn_padded, longer_sequences, ema_copy, sparse_embedding, lora, two_tasks, unused_head),
)
TOGETHER: tuple[Callable[[int], None], ...] = (ddp_batchnorm, ddp_last_batch, ddp_padded, fsdp2, tensor_parallel)
JOBS = {job.__name__: job for job in (*ALONE, *TOGETHER)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    TEACHER.load_state_dict(mlp(WIDTH, WIDTH, 10).state_dict())
    several = JOBS[args.job] in TOGETHER
    if several:
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(int(os.environ["RANK"]))
    JOBS[args.job](args.steps)
    if several:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

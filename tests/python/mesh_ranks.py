"""Runs attention over processes of a device mesh, parameters sharded by FSDP2 over all of it: what test_distributed_mesh.py asks.

usage: mesh_ranks.py RESULTS.json
"""

import sys

import distributed_ranks
import heddle
import heddle.distributed as hd
import torch
from distributed_ranks import DEVICE, SECONDS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HEADS, KV_HEADS, SIZE = 4, 2, 8
LENGTH = 37


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, (HEADS + 2 * KV_HEADS) * SIZE)
        self.out = torch.nn.Linear(HEADS * SIZE, 16)

    def forward(self, x, attention):
        q, k, v = self.qkv(x).unflatten(-1, (-1, SIZE)).split((HEADS, KV_HEADS, KV_HEADS), -2)
        return x + self.out(attention(q, k, v).flatten(-2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x, attention):
        for layer in self.layers:
            x = layer(x, attention)
        return self.head(x)


def check_fsdp(scheme, rank, ranks):
    """Two steps of training: each is one process's. A batch to each rank along "dp", its rows spread along "cp"."""
    batches = max(1, ranks // 2)
    torch.manual_seed(5)
    whole, model = Model(), Model()
    model.load_state_dict(whole.state_dict())
    x, target = torch.randn(batches, LENGTH, 16), torch.randn(batches, LENGTH, 3)
    tokens = batches * LENGTH

    mesh = init_device_mesh(DEVICE, (batches, ranks // batches), mesh_dim_names=("dp", "cp"))
    plan = hd.plan(LENGTH, mesh["cp"].size(), heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE, causal="top_left")
    of_dp, of_cp = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)

    def attend(q, k, v):
        return hd.attention(q, k, v, plan=plan, group=mesh["cp"].get_group(), scheme=scheme, timeout=SECONDS)

    def attend_all(q, k, v):
        return heddle.attention(q, k, v, causal="top_left")

    steps = [torch.optim.SGD(parameters, 0.5) for parameters in (whole.parameters(), model.parameters())]
    mine = [hd.shard(part[of_dp : of_dp + 1], plan, of_cp) for part in (x, target)]
    for _ in range(2):
        right = whole(x, attend_all)
        (right - target).square().sum().div(tokens).backward()
        out = model(mine[0], attend)
        own = right[of_dp : of_dp + 1, plan.rows_of_rank(of_cp)]
        assert torch.allclose(out, own, atol=1e-5), (out - own).abs().max()
        # FSDP takes the mean over ranks of what the loss is a sum of.
        (out - mine[1]).square().sum().mul(ranks / tokens).backward()
        for (name, single), spread in zip(whole.named_parameters(), model.parameters()):
            found = spread.grad.full_tensor()
            assert not (found - single.grad).abs().max() > 1e-5 * single.grad.abs().max(), name
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    for (name, single), spread in zip(whole.named_parameters(), model.parameters()):
        assert torch.allclose(spread.full_tensor(), single, atol=1e-5), name


def worlds():
    return {"4": (4, {f"fsdp_{scheme}": (check_fsdp, (scheme,)) for scheme in ("gather", "ring", "ulysses")})}


if __name__ == "__main__":
    distributed_ranks.main(sys.argv[1], worlds())

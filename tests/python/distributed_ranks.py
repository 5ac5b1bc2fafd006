"""Runs attention over processes, and writes what each case came to: what test_distributed.py asks. Processes are forked from this
one, which has imported everything and started no thread: none of them waits for imports.

usage: distributed_ranks.py RESULTS.json
"""

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import heddle
import heddle.distributed as hd
import torch
import torch.distributed as dist
from ranks_kit import Counted, chunked_at_once, copies_over_gloo, rest_late

SECONDS = 60  # of an exchange; what is lost is found sooner
DEVICE = os.environ.get("HEDDLE_RANKS_DEVICE", "cpu")  # "cuda": rank r has GPU r (cuda_ranks.py)


# With which keys come in two exchanges wherever anything is to be computed during the second; else calls as small come in one.
_SPLIT = hd.Costs(link_latency=0, link_bandwidth=1e18)


@dataclass
class Case:
    """One problem, by several schemes: rows of the whole, [B, S, H, D], and what plan() and attention() are told of it."""

    name: str
    rows: int
    plan: dict
    batch: int = 1
    heads: tuple = (4, 2)
    sizes: tuple = (16, 24)
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    sink: bool = False
    alibi: bool = False
    bias: tuple = ()  # its batch and heads
    bias_dtype: torch.dtype = torch.float32
    extreme: bool = False  # in some rows the bias is the lowest float32 everywhere
    packed: bool = False


def cases():
    documents = [0, 1, 1, 14, 75, 90, 101]
    return [
        Case("full", 53, dict(order="contiguous"), batch=2),
        Case("causal_zigzag", 61, dict(causal="top_left"), batch=2),
        Case("causal_striped_sink", 61, dict(causal="bottom_right", order="striped"), sink=True),
        Case("window_sink_softcap", 77, dict(causal="top_left", window=(13, 0), order="contiguous"), sink=True, options=dict(softcap=4.0)),
        Case("alibi", 50, dict(causal="top_left"), batch=2, alibi=True),
        Case("bfloat16_one_kv_head", 83, dict(causal="top_left"), heads=(6, 1), dtype=torch.bfloat16, options=dict(scale=0.3)),
        Case("documents_packed_sink", 101, dict(causal="top_left", cu_seqlens=documents, order="per_document"), sink=True, packed=True),
        Case("documents_balanced", 101, dict(causal="top_left", cu_seqlens=documents, order="balanced"), packed=True),
        Case("documents_batch", 101, dict(window=(9, 4), cu_seqlens=documents), batch=2),
        Case("areas_sink", 60, dict(areas=[(0, 60, 0, 20), (20, 50, 20, 50, "top_left", (8, None))]), sink=True),
        Case("cut_groups_sink_alibi", 45, dict(causal="top_left"), heads=(9, 3), sink=True, alibi=True),
        Case("bias_of_heads", 61, dict(causal="top_left"), batch=2, bias=(1, 4)),
        Case("bias_of_all_sink", 47, dict(window=(20, 3), order="contiguous"), batch=2, bias=(2, 1), sink=True, dtype=torch.float16, bias_dtype=torch.float16),
        Case("bias_extreme", 61, dict(causal="top_left"), bias=(1, 1), extreme=True),
        Case("bias_window_zigzag", 77, dict(causal="top_left", window=(13, 0)), bias=(1, 4)),
        Case("bias_balanced", 90, dict(causal="top_left", window=(30, 0), order="balanced"), bias=(1, 1)),
        Case("fewer_rows_than_ranks", 1, dict(causal="top_left"), sink=True),
    ]  # fmt: skip


def attends(case):
    """[S, S], by the definitions."""
    row, key = torch.arange(case.rows)[:, None], torch.arange(case.rows)[None, :]
    given = dict(case.plan)
    ends = given.get("cu_seqlens", [0, case.rows])
    areas = given.get("areas") or [
        (a, b, a, b, given.get("causal", "none"), given.get("window", (-1, -1))) for a, b in zip(ends, ends[1:])
    ]
    out = torch.zeros(case.rows, case.rows, dtype=torch.bool)
    for q_begin, q_end, key_begin, key_end, *more in areas:
        causal, (left, right) = (*more, "none", (-1, -1))[:2] if len(more) != 1 else (more[0], (-1, -1))
        off = 0 if causal == "top_left" else (key_end - key_begin) - (q_end - q_begin)
        distance = (key - key_begin) - (row - q_begin) - off
        inside = (q_begin <= row) & (row < q_end) & (key_begin <= key) & (key < key_end)
        if causal != "none":
            inside &= distance <= 0
        if left is not None and left >= 0:
            inside &= distance >= -left
        if right is not None and right >= 0:
            inside &= distance <= right
        out |= inside
    return out


def plain(case, mask, q, k, v, sink, slopes, bias=None):
    """out and lse, in the dtype of what it is given."""
    group = case.heads[0] // case.heads[1]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * case.options.get("scale", case.sizes[0] ** -0.5)
    if cap := case.options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        at = torch.arange(case.rows)
        scores = scores - slopes.to(q.dtype)[:, None, None] * (at[:, None] - at).abs().to(q.device)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None])[..., : case.rows]
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def gradients(out, lse, d_o, d_lse, wanted):
    """Of what has a lse: rows without keys have no gradient through it."""
    loss = (out * d_o.to(out.dtype)).sum() + torch.where(lse.isinf(), 0, lse * d_lse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, [x for x in wanted if x is not None])


def schemes_of(case, ranks):
    """Two ranks and three do gather and ring; all of them do one of the others in turn, by a hash, and four ranks two. All do all where
    HEDDLE_EVERY_SCHEME says so (scripts/test_ranks.sh)."""
    if case.bias:
        return ["gather", "needed"] if case.extreme else ["gather", "ring", "needed"]  # docs/partial.md: merged rows
    if "HEDDLE_EVERY_SCHEME" in os.environ:
        return ["gather", "ring", "needed", "ulysses", "2d"]
    turn = zlib.crc32(f"{case.name} {ranks}".encode())
    others = ["needed", "ulysses"] if ranks in (2, 3) else ["needed", "ulysses", "2d"]
    chosen = [others[(turn + n) % len(others)] for n in range(2 if ranks == 4 else 1)]
    return ["gather", "ring", *chosen] if ranks in (2, 3) else chosen


def check_case(case, rank, ranks):
    torch.manual_seed(3)
    (heads, kv_heads), (size, size_v) = case.heads, case.sizes
    shape = (case.batch, case.rows)
    q, k, v = (torch.randn(*shape, h, d) for h, d in ((heads, size), (kv_heads, size), (kv_heads, size_v)))
    q, k, v = (x.to(DEVICE, case.dtype).requires_grad_() for x in (q, k, v))
    d_o, d_lse = torch.randn(*shape, heads, size_v).to(DEVICE, case.dtype), torch.randn(case.batch, heads, case.rows)
    d_lse = d_lse.to(DEVICE)
    sink = torch.randn(heads).to(DEVICE).requires_grad_() if case.sink else None
    bias = torch.randn(*case.bias, case.rows, case.rows).to(DEVICE) if case.bias else None
    if case.extreme:
        bias[..., 3::7, :] = torch.finfo(torch.float32).min
    if bias is not None:
        bias = (
            bias.masked_fill(torch.rand_like(bias) < 0.2, -torch.inf)
            .to(case.bias_dtype)
            .requires_grad_(DEVICE == "cpu")
        )
    slopes = torch.rand(heads).to(DEVICE) if case.alibi else None
    mask = attends(case).to(DEVICE)

    exact_of = [None if x is None else x.detach().double().requires_grad_() for x in (q, k, v, sink, bias)]
    exact = plain(case, mask, *exact_of[:4], slopes, exact_of[4])
    exact += gradients(*exact, d_o, d_lse, exact_of)
    one = heddle.attention(
        q, k, v, mask=mask[None, None], sink=sink, alibi_slopes=slopes, bias=bias, return_lse=True, **case.options
    )
    of_bias = bias if bias is not None and bias.requires_grad else None
    one += gradients(*one, d_o, d_lse, (q, k, v, sink, of_bias))
    names = ["out", "lse", "dq", "dk", "dv", *["dsink"] * case.sink, *["dbias"] * (of_bias is not None)]

    plan = hd.plan(
        case.rows, ranks, heads=heads, kv_heads=kv_heads, head_size=size, head_size_v=size_v, batch=case.batch,
        dtype=case.dtype, ulysses=2 if ranks == 8 and len(case.name) % 2 else None, costs=_SPLIT if ranks != 3 else None, **case.plan,
    )  # fmt: skip
    own = plan.rows_of_rank(rank)
    for scheme in schemes_of(case, ranks):
        if case.alibi and case.plan.get("order") == "striped" and scheme != "ulysses":
            continue
        runs = []
        for again in (False, True):
            # How the sums of a head's keys are cut may hang on the other heads of its call, where there is something to cut.
            small = DEVICE == "cpu" and case.rows < 128
            one_by_one = again if small else zlib.crc32(f"{case.name} {scheme}".encode()) % 2 == 0
            # The second run goes by copy engines, or as it would with them; without a timeout it does on GPUs that reach each other.
            late, by_copies = (DEVICE == "cpu" and not again), (DEVICE == "cpu" and again)
            timeout = None if again else SECONDS
            mine = [hd.shard(x.detach(), plan, rank).requires_grad_() for x in (q, k, v)]
            of_sink = None if sink is None else sink.detach().clone().requires_grad_()
            of_rows = None if bias is None else bias.detach()[:, :, own].requires_grad_(bias.requires_grad)
            d_out, d_own_lse = hd.shard(d_o, plan, rank), d_lse[:, :, own]
            given = mine
            if case.packed:
                given = [x[0] for x in mine]
            with (
                chunked_at_once(one_by_one and len(scheme) % 2 == len(case.name) % 2),
                rest_late(late),
                copies_over_gloo(by_copies),
                Counted() as forward,
            ):
                out, lse = hd.attention(
                    *given, plan=plan, scheme=scheme, sink=of_sink, alibi_slopes=slopes, bias=of_rows, return_lse=True, chunked=one_by_one, timeout=timeout, **case.options
                )  # fmt: skip
            if case.packed:
                out, lse = out[None], lse[None]
            with (
                chunked_at_once(one_by_one and len(scheme) % 2 == len(case.name) % 2),
                rest_late(late),
                Counted() as backward,
            ):
                runs.append(
                    (
                        out,
                        lse,
                        *gradients(out, lse, d_out, d_own_lse, (*mine, of_sink, None if of_bias is None else of_rows)),
                    )
                )
        sent = torch.tensor([forward.sent, backward.sent])
        dist.all_reduce(sent, dist.ReduceOp.MAX)
        cost = plan.cost(scheme)
        assert sent.tolist() == [cost.forward_bytes, cost.backward_bytes], f"{scheme}: {sent}, not {cost}"
        # A gradient that is summed over heads is summed in their parts.
        of_heads = len(names) - (case.bias[1:] == (1,) and "dbias" in names)
        assert all(torch.equal(a, b) for a, b in zip(*(run[:of_heads] for run in runs))), f"{scheme}: two runs differ"
        for n, (name, found) in enumerate(zip(names, runs[0])):
            assert found.dtype == one[n].dtype, name
            picks = {"lse": lambda x: x[:, :, own], "dbias": lambda x: x[:, :, own], "dsink": lambda x: x}
            pick = picks.get(name, lambda x: x[:, own])
            right, single = pick(exact[n]), pick(one[n]).double()
            assert torch.equal(found.isinf(), right.isinf()), name
            largest = exact[n][~exact[n].isinf()].abs().max().item() if exact[n].numel() else 0
            error = (found.double() - right)[~right.isinf()].abs().max().item() if right.numel() else 0
            of_one = (one[n].double() - exact[n])[~exact[n].isinf()].abs().max().item()
            assert not error > 4 * of_one + 1e-6 * largest, f"{scheme} {name}: off by {error}, one process by {of_one}"
            assert single.shape == found.shape, name
    if case.rows > 1:
        back = hd.unshard(hd.shard(q.detach(), plan, rank), plan, timeout=SECONDS)
        assert torch.equal(back, q), "unshard"


def check_disagreement(rank, ranks):
    """Every rank is told, and the group is of use after it."""
    q = torch.randn(1, 10, 2, 8)
    told = []
    for change in ({"causal": "top_left" if rank == 1 else "none"}, {}):
        plan = hd.plan(10 * ranks, ranks, heads=2, head_size=8, order="contiguous", **change)
        try:
            hd.attention(q, q, q, plan=plan, softcap=0.0 if change else float(rank), timeout=SECONDS)
        except ValueError as error:
            told.append(str(error))
    assert told[0].startswith("[distributed.attention] ranks do not agree: plan is ") and "on rank 1" in told[0], told
    assert told[1].startswith("[distributed.attention] ranks do not agree: softcap is 0.0 on rank 0 and "), told
    plan = hd.plan(10 * ranks, ranks, heads=2, head_size=8, order="contiguous", ulysses=ranks if rank == 1 else 1)
    try:
        hd.attention(q, q, q, plan=plan, scheme="2d", timeout=SECONDS)
    except ValueError as error:
        assert str(error).endswith(f"ulysses is 1 on rank 0 and {ranks} on rank 1"), error
    else:
        raise AssertionError("nothing was said")
    plan = hd.plan(10 * ranks, ranks, heads=2, head_size=8, causal="top_left", costs=_SPLIT if rank == 1 else None)
    try:
        hd.attention(q, q, q, plan=plan, scheme="needed", timeout=SECONDS)
    except ValueError as error:
        assert str(error).endswith("whether keys come in two exchanges is 0 on rank 0 and 1 on rank 1"), error
    else:
        raise AssertionError("nothing was said")
    plan = hd.plan(10 * ranks, ranks, heads=2, head_size=8, order="contiguous")
    assert hd.attention(q, q, q, plan=plan, timeout=SECONDS).shape == q.shape


def check_subgroup(rank, ranks):
    """Ranks are those of the group, not of the world."""
    group = dist.new_group([0, ranks - 1])
    if rank not in (0, ranks - 1):
        return
    torch.manual_seed(4)
    q = torch.randn(1, 12, 2, 8)
    plan = hd.plan(12, 2, heads=2, head_size=8, causal="top_left")
    mine = hd.shard(q, plan, 0 if rank == 0 else 1)
    out = hd.unshard(
        hd.attention(mine, mine, mine, plan=plan, group=group, scheme="ring", timeout=SECONDS), plan, group=group
    )
    assert torch.allclose(out, heddle.attention(q, q, q, causal="top_left"), atol=1e-6)


EXCHANGES = {
    "gather": "keys gathered",
    "ring": "keys passed on, step ",
    "needed": "needed keys sent",
    "ulysses": "rows exchanged for heads",
    "2d": "",  # whichever it waits in
}


def check_lost(scheme, slow, rank, ranks):
    """The last rank is gone, or slow, before the second call; the others are told within their time, and of what. Who exchanges with
    it names it, so none of these ends before the others are told: one that has ended would be named instead."""
    q = torch.randn(1, 10, 2, 8).to(DEVICE)
    plan = hd.plan(10 * ranks, ranks, heads=2, head_size=8, order="contiguous")
    hd.attention(q, q, q, plan=plan, scheme=scheme, timeout=SECONDS)
    dist.barrier()
    if rank == ranks - 1:
        if slow:
            time.sleep(SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        hd.attention(
            q, q, q, plan=plan, scheme=scheme, timeout=20 if DEVICE == "cpu" and not slow else 1
        )  # NCCL does not tell
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was said")
    taken = time.monotonic() - begin
    assert taken < 15, taken
    assert text.startswith(f"[distributed.attention] {EXCHANGES[scheme]}"), text
    assert f"rank {rank} " in text and f", plan {plan.digest}: " in text, text
    if scheme in ("ring", "2d"):  # where a rank may be held up by another one that waits
        return
    assert f"rank {ranks - 1}, within" in text, text
    store = dist.distributed_c10d._get_default_store()
    store.set(f"told {rank}", "")
    store.wait([f"told {other}" for other in range(ranks - 1)], timedelta(seconds=15))


def check_page(heading, rank, ranks):
    """The first example behind a heading of docs/distributed.md, as torchrun starts it, prints what it says."""
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    if not page.exists():  # the tests without the sources
        return
    text = page.read_text(encoding="utf-8")
    behind = text.split(f"\n{heading}\n", 1)[1] if heading else text
    block = re.search(r"^```python\n(.*?)^```", behind, re.MULTILINE | re.DOTALL)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "docs/distributed.md", "exec"), {})
    wanted = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE) if rank == 0 else []
    assert printed.getvalue().splitlines() == wanted and (wanted or rank), printed.getvalue()


def results_of(program, out):
    """What came of the cases of a program such as this one: {world: [of each rank {case: "ok", or what went wrong}]}"""
    path = os.pathsep.join(filter(None, [str(Path(heddle.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, program, str(out)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return json.loads(out.read_text())


def check_world(results, world, name):
    said = [of_rank.get(name, "nothing") for of_rank in results[world]]
    if world.startswith(("dead", "slow")):
        assert said.pop() == "nothing"  # the rank that is lost
    assert said == ["ok"] * len(said), "\n".join(said)


def worlds():
    """name -> (ranks, what each rank runs: {name: (function, its arguments in front of rank and ranks)})"""
    of_cases = {case.name: (check_case, (case,)) for case in cases()}
    out = {
        "2": (2, of_cases),
        "3": (3, of_cases | {"disagreement": (check_disagreement, ()), "subgroup": (check_subgroup, ())}),
    }
    out["1"], out["4"], out["8"] = (1, of_cases), (4, of_cases), (8, of_cases)
    out["page"] = (2, {"page": (check_page, ("",))})
    for scheme in EXCHANGES:
        for slow in (False, True):
            name = f"{'slow' if slow else 'dead'}_{scheme}"
            out[name] = (4 if scheme == "2d" else 3, {name: (check_lost, (scheme, slow))})
    return out


def run_rank(rank, ranks, checks, folder, port):
    said = {}
    if "page" in checks:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    else:
        wait = timedelta(seconds=SECONDS)
        backend = "gloo"
        if DEVICE == "cuda" and torch.cuda.device_count() >= ranks:
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(rank)
        elif DEVICE == "cuda":
            import cuda_ranks

            cuda_ranks.share_one_gpu()
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=wait
        )
    for name, (function, arguments) in checks.items():
        try:
            function(*arguments, rank, ranks)
            said[name] = "ok"
        except BaseException:
            said[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(said))
        if said[name] != "ok":
            break  # the others may be waiting for what will not come
    os._exit(0)  # a group that has lost a rank cannot be taken down


def main(out, worlds):
    """worlds: as worlds() gives them."""
    os.environ["HEDDLE_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork" if DEVICE == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for name, (ranks, checks) in worlds.items():
            place = Path(folder, name)
            place.mkdir()
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            started[name] = [
                context.Process(target=run_rank, args=(rank, ranks, checks, place, port)) for rank in range(ranks)
            ]
            for process in started[name]:
                process.start()
        found = {}
        for name, processes in started.items():
            # A rank that is slow on purpose is not waited for.
            for process in processes[:-1] if name.startswith("slow") else processes:
                process.join(200)
            for process in processes:
                process.kill()
                process.join()
            said = [Path(folder, name, f"{rank}.json") for rank in range(len(processes))]
            found[name] = [json.loads(x.read_text()) if x.exists() else {} for x in said]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], worlds())

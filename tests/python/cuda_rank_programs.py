"""The CPU's programs over ranks, on two GPUs: worlds of cuda_ranks.py."""

import dataclasses

import compiled_ranks
import mesh_ranks
import sparse_ranks
import tensor_ranks
import torch


def on_this_gpu(function, *arguments):
    """What the CPU's programs make without saying where is made there."""
    with torch.device("cuda", torch.cuda.current_device()):
        function(*arguments)


def worlds():
    of_lists = (dataclasses.replace(case, dtype=torch.bfloat16) for case in sparse_ranks.cases() if not case.masks)
    # Weights in few bits are held to a block of float32 operands, which kernels of GPUs do not take beside them.
    of_blocks = (case for case in tensor_ranks.cases() if not case.formats)
    of_compiled = (compiled_ranks.check_attention, compiled_ranks.check_sdpa)
    checks_of = {
        "blocks": {case.name: (tensor_ranks.check_block, case) for case in of_blocks},
        "compiled": {check.__name__: (check, "aot_eager") for check in of_compiled},
        "meshes": {f"fsdp {scheme}": (mesh_ranks.check_fsdp, scheme) for scheme in ("gather", "ring", "ulysses")},
        "lists": {case.name: (sparse_ranks.check_lists, case) for case in of_lists},
        "nsa": {name: (sparse_ranks.check_nsa, name) for name in sparse_ranks.NSA},
        "stages": {"1F1B": (tensor_ranks.check_pipeline,)},
    }
    return {
        world: (2, {name: (on_this_gpu, check) for name, check in checks.items()})
        for world, checks in checks_of.items()
    }

"""Operators under torch.func's transforms, and what is said where a derivative is asked for that they have not."""

from __future__ import annotations

import torch


def transformed() -> bool:
    """Whether one of torch.func's transforms runs this call."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def no_second_derivative(operation):
    """The backward of an operator that is itself a backward."""

    def backward(ctx, *gradients):
        raise RuntimeError(f"heddle::{operation} has no derivative: second derivatives are not supported")

    return backward


def save_nothing(ctx, inputs, output):
    """The setup_context of what has no derivative."""


def for_transforms(operation, setup_context, backward, forward=None):
    """The operator as a torch.autograd.Function, which torch.func's transforms see through; register_autograd they do
    not. forward: calls it, where that takes more than passing the arguments on."""

    def operator(*arguments):
        return getattr(torch.ops.heddle, operation)(*arguments)

    def jvp(ctx, *tangents):
        raise NotImplementedError(
            f"[{operation}] an argument has a tangent: there are no forward-mode derivatives (jvp, jacfwd, hessian); "
            "take grad, vjp or jacrev, of a first derivative"
        )

    members = {"forward": forward or operator, "setup_context": setup_context, "backward": backward, "jvp": jvp}
    members = {name: staticmethod(member) for name, member in members.items()}
    return type(f"{operation}_for_transforms", (torch.autograd.Function,), {**members, "generate_vmap_rule": True})

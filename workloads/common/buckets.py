"""How gradients are put into buckets: whole gradients in reverse order of the model, until a bucket has reached its size."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def buckets_of(model: nn.Module, cap_mb: float) -> list[int]:
    """Elements of every bucket, in the order in which backward fills them: a bucket is closed by the gradient that reaches the cap.

    This is torch's ``compute_bucket_assignment_by_size`` for gradients of one type that become ready in reverse order of registration.
    """
    return [sum(p.numel() for _, p in bucket) for bucket in bucketed(reversed(list(model.named_parameters())), cap_mb)]


def bucketed(parameters: Iterable[tuple[str, nn.Parameter]], cap_mb: float) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters in buckets, in the order given."""
    cap = cap_mb * 2**20
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    filled = cap
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if filled >= cap:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, parameter))
        filled += parameter.numel() * parameter.element_size()
    return buckets

"""What one would use in place of the head (speed/bench_head.py): exact losses, sampled softmax in torch operations."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.speed.head_tools import Report, captured, extra_memory, guarded, inputs, times


def peers(report: Report, device: torch.device, sizes: argparse.Namespace) -> None:
    for name, loss in exact_losses(device).items():
        if sizes.peers and name not in sizes.peers:
            continue
        for D in sizes.D:
            for K in sizes.K:
                if K > 10**6 and name != "cut-cross-entropy":
                    continue  # they keep B x K scores
                if K * D > 2**31:
                    continue  # it then reads outside its weights, after which the device serves nobody
                with guarded(report, "peers", f"{name} K={K} D={D}"):
                    exact_peer(report, device, sizes, name, loss, K, D)
    for D in sizes.D:
        for K in sizes.K:
            with guarded(report, "peers", f"sampled softmax K={K} D={D}"):
                sampled_peer(report, device, sizes, K, D)


def exact_losses(device: torch.device) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Those that are there: torch, torch compiled, cut-cross-entropy, Liger."""

    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.T, target)

    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"torch": plain}
    if device.type != "cuda":
        return found
    with contextlib.suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target)
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger"] = lambda hidden, weight, target: liger_fused_linear_cross_entropy(hidden, weight, target)
    found["compiled"] = torch.compile(plain)
    return found


def exact_peer(
    report: Report,
    device: torch.device,
    sizes: argparse.Namespace,
    name: str,
    loss: Callable[..., Tensor],
    K: int,
    D: int,
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = (0.05 * torch.randn(K, D, device=device)).to(dtype).requires_grad_()
    hidden, target = inputs(K, D, sizes.B, 1, dtype, device)[0]

    def call() -> None:
        torch.autograd.grad(loss(hidden, weight, target), [hidden, weight])

    extra = extra_memory(call) if device.type == "cuda" else 0.0
    found = times(call, 7, 1, device)
    report.add("peers", f"{name}, exact, no update", K=K, D=D, B=sizes.B, **found, gb=extra)


def sampled_peer(report: Report, device: torch.device, sizes: argparse.Namespace, K: int, D: int) -> None:
    """Sampled softmax as one writes it in torch operations: no update, forward and backward only."""
    S = min(sizes.S, K)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = (0.05 * torch.randn(K, D, device=device)).to(dtype).requires_grad_()
    hidden, target = inputs(K, D, sizes.B, 1, dtype, device)[0]

    def call() -> None:
        classes = torch.randint(K, (S,), device=device)
        psi_y = (hidden * F.embedding(target, weight, sparse=True)).sum(1, keepdim=True)
        psi = hidden @ F.embedding(classes, weight, sparse=True).T + math.log(K / S)
        psi = psi.masked_fill(target[:, None] == classes, -torch.inf)
        loss = F.cross_entropy(torch.cat([psi_y, psi], 1).float(), torch.zeros_like(target))
        torch.autograd.grad(loss, [hidden, weight])

    call()
    found = times(call, 7, 1, device)
    report.add("peers", "sampled softmax, torch, no update", K=K, D=D, B=sizes.B, S=S, **found)
    if device.type == "cuda":  # without the host's part, which is most of it
        found = times(captured(call).replay, 20, 1, device)
        report.add("peers", "sampled softmax, torch, captured", K=K, D=D, B=sizes.B, S=S, **found)

"""What test files share: paths and seeded generators. The modules here are imported by the tests that need them."""

from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"  # the real data, where they are there


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

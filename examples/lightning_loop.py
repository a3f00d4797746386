"""The head in a LightningModule, with automatic optimisation: nothing in it is special.

    pip install lightning
    python examples/lightning_loop.py

`configure_optimizers` takes the network's parameters alone: the head has an optimiser of its own. (With optimizer=None
the head's weight and bias get row-sparse gradients instead; give those to torch.optim.SparseAdam there.)
"""

from __future__ import annotations

import torch
from plain_torch import N_CLASSES, N_FEATURES, WIDTH, batches
from torch import Tensor, nn
from torch.utils.data import DataLoader

from augment_reduce.nn import AugmentReduceHead

try:
    import lightning.pytorch as pl
except ImportError:
    try:
        import pytorch_lightning as pl
    except ImportError as missing:
        raise SystemExit("This example needs Lightning: pip install lightning") from missing


class Classifier(pl.LightningModule):
    def __init__(self, class_counts: Tensor) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(N_FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.head = AugmentReduceHead(
            WIDTH, N_CLASSES, n_sampled_classes=256, class_counts=class_counts, optimizer="adagrad"
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = self.head(self.network(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("log_prob", self.head.log_prob(self.network(x), y).mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.network.parameters(), lr=3e-3)


def main(n_steps: int = 400) -> None:
    counts = torch.stack([y for _, y in batches(20)]).flatten().bincount(minlength=N_CLASSES)
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    training, validation = (DataLoader(list(batches(n)), batch_size=None) for n in (n_steps, 2))
    trainer.fit(Classifier(counts), training, validation)
    print({name: float(value) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()

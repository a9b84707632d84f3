"""A notebook with two devices and a model of five million parameters, executed from its first cell to its last."""

import pytest

MODEL = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sdiloco


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 2048), nn.Tanh(), nn.Linear(2048, 2500), nn.Tanh(), nn.Linear(2500, 1))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 32))
model = Model()
before = model.net[0].weight.clone()
"""
FIT = """
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="streaming_diloco_notebook", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=8))
"""
READ = """
outer = trainer.strategy.outer_state_dict()
assert sum(values.numel() for values in outer.values()) >= 5_000_000
assert all(torch.equal(values, outer[name]) for name, values in model.state_dict().items())
assert (model.net[0].weight != before).any()
assert list(trainer.callback_metrics) == ["loss"]
assert trainer.strategy.report()["inner_steps"] == 40
"""


@pytest.mark.foreign
@pytest.mark.timeout(240)
def test_a_notebook_trains_on_two_devices() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbconvert is not installed: make foreign")
    preprocessors = pytest.importorskip("nbconvert.preprocessors")
    again = FIT.replace("max_epochs=2", "max_epochs=1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (MODEL, FIT, READ, again)])
    preprocessors.ExecutePreprocessor(timeout=200, kernel_name="python3").preprocess(notebook)

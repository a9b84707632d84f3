"""A notebook with two devices and a model of five million parameters, executed from its first cell
to its last.
"""

import pytest

MODEL = """
import lightning.pytorch as pl
import torch

import lightning_sdiloco
from tests.large.models import Data, Large


class Model(Large):
    pass


model = Model("big")
before = model.net[0][0].weight.clone()
"""
FIT = """
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="streaming_diloco_notebook", max_epochs=2, limit_val_batches=0,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, Data())
"""
READ = """
outer = trainer.strategy.outer_state_dict()
assert sum(values.numel() for values in outer.values()) >= 4_900_000
assert all(torch.equal(values, outer[name]) for name, values in model.state_dict().items())
assert (model.net[0][0].weight != before).any()
assert list(trainer.callback_metrics) == ["loss"]
assert trainer.strategy.report()["inner_steps"] == 64
"""


@pytest.mark.foreign
def test_a_notebook_trains_on_two_devices() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbconvert is not installed: make foreign")
    preprocessors = pytest.importorskip("nbconvert.preprocessors")
    again = FIT.replace("max_epochs=2", "max_epochs=1")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in (MODEL, FIT, READ, again)]
    )
    preprocessors.ExecutePreprocessor(timeout=200, kernel_name="python3").preprocess(notebook)

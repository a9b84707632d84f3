"""darts with torch_metrics, which go into the hyperparameters."""

from torchmetrics import MeanAbsoluteError, MetricCollection

from tests.foreign.projects import darts
from tests.foreign.trial import NAME, Trial

STRATEGY = NAME


def fit(trial: Trial) -> None:
    darts.METRICS = MetricCollection([MeanAbsoluteError()])
    darts.fit(trial)

"""Reproduces the bandwidth simulator of the Streaming DiLoCo paper in closed form, including the
paper's Table 4.

The simulator is an idealisation. There is no latency, values have 16 bits (4 for FP4), and every
value crosses the link once. A step consists of 3 L - 1 equal nodes: forward, backward for the
activations and backward for the parameters of L layers, but no backward for the activations of the
first layer. A layer is reduced as soon as its parameter gradient is ready.
`lightning_sdiloco.planning.planner` models the engine instead.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple


class PaperModel(NamedTuple):
    """A model as described by the paper's simulator."""

    values: float
    layers: int
    step_time: float

    @property
    def node_time(self) -> float:
        """Returns the seconds that one node of the graph takes (u)."""
        return self.step_time / (3 * self.layers)

    @property
    def compute_time(self) -> float:
        """Returns the seconds that the 3 L - 1 nodes of an inner step take."""
        return (3 * self.layers - 1) * self.node_time

    def layer_time(self, bits: int, gbit_s: float) -> float:
        """Returns the seconds for which a layer occupies the link (c)."""
        return self.values / self.layers * bits / (gbit_s * 1e9)


class Entry(NamedTuple):
    """An entry of Table 4: the value from the closed form, and the value printed in the paper."""

    model: str
    method: str
    target: float
    gbit_s: float
    paper: float


_SYNC_EVERY = 100
_LAYERS_PER_FRAGMENT = 3

GRID = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
"""The bandwidths in the paper, in Gbit/s: 50 values from 0.1 to 1000, each 1.207 times the previous
one."""

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The compute utilisations in Table 4. A prediction also computes the bandwidth that each of them
requires."""

MODELS: Mapping[str, PaperModel] = {
    "1B": PaperModel(1e9, layers=24, step_time=0.1),
    "10B": PaperModel(1e10, layers=48, step_time=0.8),
    "100B": PaperModel(1e11, layers=108, step_time=4.9),
}
"""The models of Table 4, keyed by name."""


def _at_once(sync_every: int, model: PaperModel, gbit_s: float) -> float:
    """Returns the utilisation if training waits for an exchange of all layers every ``sync_every``
    steps.
    """
    u = model.node_time
    c = model.layer_time(16, gbit_s)
    layers = model.layers
    wait = max(c, 2 * c - u, layers * c - (2 * layers - 3) * u)
    return sync_every * model.compute_time / (sync_every * model.compute_time + wait)


def _streaming(overlap_steps: int, bits: int, model: PaperModel, gbit_s: float) -> float:
    """Returns the utilisation if strided fragments take turns at equal intervals."""
    fragments = model.layers // _LAYERS_PER_FRAGMENT
    # The paper's text says 11, 5 and 2 inner steps, but only these values reproduce its table.
    distance = round(_SYNC_EVERY / fragments)
    trained = distance * fragments * model.compute_time
    c = model.layer_time(bits, gbit_s)
    return trained / (
        trained + sum(_wait(p, fragments, overlap_steps, model, c) for p in range(fragments))
    )


def _wait(fragment: int, fragments: int, overlap_steps: int, model: PaperModel, c: float) -> float:
    """Returns the seconds that training waits for a fragment before the forward pass of its first
    layer.
    """
    u = model.node_time
    until_needed = fragment * u + overlap_steps * model.compute_time
    # The backward pass reaches the last layer first: when layer l is ready, it and the layers
    # before it have not been sent yet.
    layers = [fragment + index * fragments for index in range(_LAYERS_PER_FRAGMENT)]
    late = [
        (i + 1) * c - (2 * layer - (layer > 0)) * u - until_needed for i, layer in enumerate(layers)
    ]
    return max(0.0, *late)


METHODS: Mapping[str, Callable[[PaperModel, float], float]] = {
    "ddp": partial(_at_once, 1),
    "diloco": partial(_at_once, _SYNC_EVERY),
    "streaming": partial(_streaming, 0, 16),
    "streaming_overlap": partial(_streaming, 1, 16),
    "streaming_overlap_fp4": partial(_streaming, 1, 4),
}
"""The methods of Table 4, as functions that map a model and a bandwidth in Gbit/s to the compute
utilisation."""

TABLE_4: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("1B", "ddp"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming_overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming_overlap_fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "ddp"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "streaming_overlap"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "streaming_overlap_fp4"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "ddp"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "streaming_overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "streaming_overlap_fp4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""Table 4 as printed in the paper, in Gbit/s, in the order of `TARGETS`."""


def table_4() -> Iterator[Entry]:
    """Yields the entries of Table 4 from the closed form, together with the printed values.

    Each entry follows the procedure that the paper apparently used. The value is the largest
    bandwidth on the grid whose utilisation does not exceed the target, rounded to two decimals and
    then to one.

    Examples:
        >>> for entry in list(table_4())[:2]:
        ...     print(*entry)
        1B ddp 0.5 86.8 86.8
        1B ddp 0.8 152.6 152.6
    """
    for (model, method), printed in TABLE_4.items():
        for target, paper in zip(TARGETS, printed, strict=True):
            utilisation = partial(METHODS[method], MODELS[model])
            gbit_s = max(b for b in GRID if utilisation(b) <= target)
            yield Entry(model, method, target, round(round(gbit_s, 2), 1), paper)

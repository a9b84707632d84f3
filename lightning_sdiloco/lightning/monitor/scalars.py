"""Makes the numbers that every landing logs, by their documented names, and lays them out for TensorBoard."""

import math
import time
from typing import Any

from lightning_sdiloco.engine import Landing
from lightning_sdiloco.planning import readable_rate

_PREFIX = "sdiloco/"

LAYOUT = {
    "Streaming DiLoCo": {
        "Utilisation": ("compute_utilisation",),
        "Waiting (ms)": ("exposed_wait_ms",),
        "Link (Gbit/s)": ("link_gbit_s", "peak_gbit_s"),
        "Bytes": ("bytes_sent", "bytes_received"),
        "Time in flight (ms)": (
            "in_flight_ms",
            "encode_ms",
            "transfer_ms",
            "decode_ms",
            "second_hop_ms",
            "outer_step_ms",
        ),
        "Outer gradient": ("outer_grad_norm", "outer_grad_norm_group_.*"),
        "Cosine with the mean": ("cosine_group_.*",),
        "Outer step": ("outer_lr", "outer_momentum_norm"),
        "Local from outer parameters": ("local_distance",),
        "Compression error": ("compression_error",),
        "Groups": ("groups_counted", "groups_left_out", "groups_outlying"),
    }
}
"""The charts of TensorBoard, each with the scalars that it shows, without their prefix."""


def scalars_of(landing: Landing) -> dict[str, float]:
    """Returns what is logged of a landing. What cannot be told is left out."""
    numbers: dict[str, float] = {
        "fragment": landing.fragment,
        "bytes_sent": landing.bytes_sent,
        "bytes_received": landing.bytes_received,
        "exposed_wait_ms": 1000 * landing.exposed_wait_s,
        "in_flight_ms": 1000 * landing.in_flight_s,
        **{f"{part}_ms": 1000 * landing.seconds(part) for part in ("encode", "transfer", "decode", "outer_step")},
        "link_gbit_s": landing.link_gbit_s,
        "outer_grad_norm": landing.outer_grad_norm,
        **{f"outer_grad_norm_group_{group}": norm for group, norm in enumerate(landing.group_norms)},
        "outer_lr": landing.outer_lr,
        "groups_counted": len(landing.counted),
        "groups_left_out": len(landing.left_out),
        "groups_outlying": len(landing.outlying),
    }
    if "relay" in landing.spans:
        numbers["second_hop_ms"] = 1000 * landing.seconds("relay")
    if landing.diagnostics is not None:
        told = landing.diagnostics._asdict()
        numbers |= {f"cosine_group_{group}": cosine for group, cosine in enumerate(told.pop("cosines"))} | told
    return {_PREFIX + name: number for name, number in numbers.items() if not math.isnan(number)}


class Interval:
    """Sums up what is logged once a round, over ``sync_every`` inner steps or a few more, until a landing ends it."""

    def __init__(self, sync_every: int, first_step: int) -> None:
        self._sync_every = sync_every
        self._began = time.perf_counter()
        self._first_step = first_step
        self._waited = 0.0
        self._peak = math.nan

    def scalars_with(self, landing: Landing) -> dict[str, float]:
        """Counts a landing, and returns the scalars of the round if the landing ends it, otherwise none."""
        self._waited += landing.exposed_wait_s
        rates = [rate for rate in (self._peak, landing.link_gbit_s) if not math.isnan(rate)]
        self._peak = max(rates, default=math.nan)
        if landing.landed_at - self._first_step < self._sync_every:
            return {}
        now = landing.spans["land"][1]
        utilisation = 1 - min(1.0, self._waited / (now - self._began))
        scalars = {"compute_utilisation": utilisation, "peak_gbit_s": self._peak}
        self._began, self._first_step, self._waited, self._peak = now, landing.landed_at, 0.0, math.nan
        return {_PREFIX + name: number for name, number in scalars.items() if not math.isnan(number)}


def shown(landing: Landing | None) -> dict[str, str]:
    """Returns what a progress bar shows of the last landing."""
    if landing is None:
        return {"exposed_wait": "-", "link": "-"}
    return {"exposed_wait": f"{1000 * landing.exposed_wait_s:.3g} ms", "link": _rate(landing.link_gbit_s)}


def fitting(entries: dict[str, str], columns: int) -> dict[str, str]:
    """Returns as many entries of a progress bar as fit into a line, and at least the first.

    >>> fitting({"outer_step": "12", "in_flight": "0", "link": "-"}, columns=27)
    {'outer_step': '12', 'in_flight': '0'}
    """
    shown: dict[str, str] = {}
    for name, value in entries.items():
        columns -= len(f"{name}: {value} ") if shown else len(f"{name}: {value}")
        if shown and columns < 0:
            break
        shown[name] = value
    return shown


def _rate(gbit_s: float) -> str:
    return "-" if gbit_s == 0 or math.isnan(gbit_s) else readable_rate(gbit_s)


def lay_out(trainer: Any) -> None:
    """Tells every TensorBoard logger of a trainer which scalars share a chart."""
    layout = {
        section: {title: ["Multiline", [_PREFIX + name for name in names]] for title, names in charts.items()}
        for section, charts in LAYOUT.items()
    }
    for logger in trainer.loggers:
        # By name: there is one class in each distribution, and neither need be there.
        if any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__):
            logger.experiment.add_custom_scalars(layout)

"""Writes a report as one HTML page that needs no other file and no network."""

import base64
from collections.abc import Mapping
from html import escape

from lightning_sdiloco.lightning import Run
from lightning_sdiloco.planning import readable_rate
from lightning_sdiloco.tools.report import series
from lightning_sdiloco.tools.report.verdict import Verdict, seconds_as_text

CAPTIONS: Mapping[str, tuple[str, str]] = {
    "losses": (
        "Losses",
        "Training loss of each group, on its own batches and its local parameters: pale as it was, strong smoothed."
        " Dots are validations.",
    ),
    "utilisation": (
        "Compute utilisation",
        "Share of each round (sync_every inner steps) in which training did not wait for a fragment.",
    ),
    "bandwidth": (
        "Bandwidth between groups",
        "What each group sent, in every quarter of a round, spread evenly from a launch to the arrival of all messages."
        " The dashed line is what a ring all-reduce of all gradients at every step would have needed, at the same"
        " speed.",
    ),
    "flights": (
        "Fragments in flight, at the end of the run",
        "The first groups, at most four. First row of a group: its inner steps, and where it waited. Below, each flight"
        " of its fragments from launch to result: strong while on the link, the second hop included; weaker while it is"
        " encoded, decoded or stepped; pale while it waits for its turn. Each rank goes by its own clock.",
    ),
    "agreement": (
        "Agreement of the groups",
        "Cosine between what each group sent and the mean, mean of the fragments of a round; and the norm of the outer"
        " gradient of all fragments. One curve far from the others is a group that trains on something else.",
    ),
    "sites": (
        "Sites that come and go",
        "As this site saw it: a mark for each round of a fragment in which a site counted, when it landed here. A site"
        " without marks has died, left, or come too late.",
    ),
}
"""The title and caption of each picture, by the name of the picture."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --quiet: #5f6c7b; --line: #d9dfe6; --paper: #ffffff;
  --tile: #f3f6f9; --accent: #1f6fd6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --quiet: #9fb0c0; --line: #34404c; --paper: #171c22;
  --tile: #1f262e; --accent: #6fb1ff; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif;
  max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
p { margin: .4rem 0; } .quiet { color: var(--quiet); font-size: .9rem; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.tile { background: var(--tile); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.2rem; font-weight: 600; white-space: nowrap; }
.tile span { color: var(--quiet); font-size: .85rem; }
.verdict { border-left: .25rem solid var(--accent); padding: .1rem 0 .1rem 1rem; margin: 1.5rem 0; }
img { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--quiet); font-weight: 500; }
"""


def page(title: str, run: Run, verdict: Verdict, pictures: Mapping[str, Mapping[str, bytes]]) -> str:
    """Returns the page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}: Streaming DiLoCo</title><style>{_STYLE}</style></head><body>",
        f'<h1>Streaming DiLoCo run</h1><p class="quiet">{escape(title)}</p>',
        f'<p class="quiet">{escape(_about(run))}</p>',
        f'<div class="tiles">{"".join(_tile(*tile) for tile in _tiles(run, verdict))}</div>',
        f'<h2>Verdict</h2><div class="verdict">{"".join(f"<p>{escape(s)}</p>" for s in verdict.sentences)}</div>',
        *(_figure(name, themes) for name, themes in pictures.items()),
        "<h2>Ranks</h2>",
        f'<div class="scroll">{_table(run)}</div>',
        "</body></html>",
    ]
    return "\n".join(parts)


def _figure(name: str, themes: Mapping[str, bytes]) -> str:
    title, caption = CAPTIONS[name]
    light, dark = (f"data:image/svg+xml;base64,{base64.b64encode(themes[t]).decode()}" for t in ("light", "dark"))
    return (
        f'<h2>{title}</h2><p class="quiet">{escape(caption)}</p><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}"><img src="{light}" alt="{escape(title)}">'
        "</picture>"
    )


def _about(run: Run) -> str:
    about, settings = run.ranks[0].about, run.ranks[0].about["settings"]
    values = sum(numel for numel, _ in run.ranks[0].parameters.values())
    compression = settings["compression"] or "a compression of its own"
    is_site = about.get("site") is not None
    ranks = (
        f"{run.ranks[0].name}: {about['shards']} ranks" if is_site else f"{about['groups']} groups of {about['shards']}"
    )
    return (
        f"{values:,} parameters in {len(run.ranks[0].fragments)} fragments · {ranks} ·"
        f" sync_every={settings['sync_every']}, overlap_steps={settings['overlap_steps']},"
        f" mixing={settings['mixing']}, compression={compression}, exchange={series.exchange(run) or '-'}"
    )


def _tiles(run: Run, verdict: Verdict) -> list[tuple[str, str]]:
    about = run.ranks[0].about
    steps = max(len(rank.steps) for rank in run.ranks)
    sent = max(series.bytes_sent(run).values())
    tiles = [
        (f"{verdict.utilisation:.1%}", "compute utilisation"),
        (f"{steps:,}", "inner steps"),
        (seconds_as_text(max(series.step_seconds(rank) for rank in run.heads)), "slowest inner step"),
        (_size(sent), "sent by each group"),
    ]
    if sent and about["groups"] > 1:
        tiles.append((f"1/{series.ddp_bytes_per_step(run) * steps / sent:,.0f}", "of the bytes of DDP"))
    if verdict.link is not None:
        tiles.append((readable_rate(verdict.link.gbit_s), "link rate while in use"))
    return tiles


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _table(run: Run) -> str:
    head = ("rank", "group", "host", "inner step", "waited", "utilisation", "sent")
    rows = [
        (
            str(rank.rank),
            rank.name.removeprefix("group "),
            str(rank.about["host"]),
            seconds_as_text(series.step_seconds(rank)),
            seconds_as_text(sum(landed.seconds("wait") for landed in series.waits(rank))),
            f"{series.utilisation(rank):.1%}",
            _size(sum(landed.bytes_sent for landed in rank.landings)),
        )
        for rank in run.ranks
    ]
    cells = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"

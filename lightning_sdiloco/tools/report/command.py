"""Runs ``sdiloco report``: reads the records of a run, and writes a page, pictures and a timeline."""

from pathlib import Path

from lightning_sdiloco.lightning import Run, read_run, write_timeline
from lightning_sdiloco.tools.report.page import page
from lightning_sdiloco.tools.report.pictures import THEMES, drawn, pictures_of
from lightning_sdiloco.tools.report.verdict import Verdict, judge


def report(
    run: str,
    output: str | None = None,
) -> str:
    """Write what a run did: a page (report.html), its pictures (.png), and a trace of all ranks (timeline.json).

    Args:
        run: Folder with the records of a StreamingDiLoCoMonitor, or the folder of the logger above it.
        output: Folder for the report. By default a folder named report in that of the run.
    """
    read = read_run(run)
    verdict = judge(read)
    folder = Path(output) if output is not None else Path(run) / "report"
    try:
        _write(folder, run, read, verdict)
    except OSError as error:
        raise ValueError(f"output={str(folder)!r} cannot be written ({error}). Give another folder.") from error
    return "\n".join([*verdict.sentences, "", f"{folder / 'report.html'}"])


def _write(folder: Path, title: str, run: Run, verdict: Verdict) -> None:
    """Writes the pictures, the trace and the page, all into one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = pictures_of(run)
    embedded: dict[str, dict[str, bytes]] = {name: {} for name in pictures}
    for name, draw in pictures.items():
        for theme, colors in THEMES.items():
            suffix = "" if theme == "light" else f"-{theme}"
            (folder / f"{name}{suffix}.png").write_bytes(drawn(draw, run, colors, "png"))
            # The page scales them: glyphs and lines stay sharp.
            embedded[name][theme] = drawn(draw, run, colors, "svg")
    write_timeline(folder / "timeline.json", run)
    (folder / "report.html").write_text(page(title, run, verdict, embedded), encoding="utf-8")

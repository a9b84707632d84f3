"""The command ``sdiloco report``: from the records of a run to a page, pictures and a timeline."""

from pathlib import Path

from lightning_sdiloco.lightning.monitor.records import read_run
from lightning_sdiloco.lightning.monitor.timeline import write_timeline
from lightning_sdiloco.tools.report.page import page
from lightning_sdiloco.tools.report.pictures import PICTURES, THEMES, drawn
from lightning_sdiloco.tools.report.verdict import judge


def report(
    run: str,
    output: str | None = None,
) -> str:
    """Write what a run did: a page (report.html), its pictures (.png), and a trace of all ranks (timeline.json).

    Args:
        run: Folder with the records of a StreamingDiLoCoMonitor, or the folder of the logger above it.
        output: Folder for the report. By default a folder named report in that of the run.

    Raises:
        ValueError: If there are no records, matplotlib is not installed, or the files cannot be written.
    """
    read = read_run(run)
    verdict = judge(read)
    folder = Path(output) if output is not None else Path(run) / "report"
    pictures = {
        name: {theme: drawn(draw, read, colors, "svg") for theme, colors in THEMES.items()}
        for name, draw in PICTURES.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in PICTURES.items():
            for theme, colors in THEMES.items():
                suffix = "" if theme == "light" else f"-{theme}"
                (folder / f"{name}{suffix}.png").write_bytes(drawn(draw, read, colors, "png"))
        write_timeline(folder / "timeline.json", read)
        (folder / "report.html").write_text(page(run, read, verdict, pictures), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output={str(folder)!r} cannot be written ({error}). Give another folder.") from error
    return "\n".join([*verdict.sentences, "", f"{folder / 'report.html'}"])

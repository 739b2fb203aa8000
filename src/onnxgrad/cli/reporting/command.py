"""onnxgrad report: the page of a run, from its log alone."""

from pathlib import Path

import click

from onnxgrad.cli.group import command


@command
@click.argument("log", type=click.Path(path_type=Path), metavar="RUN.jsonl")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html",
              help="The page; by default next to the log.")  # fmt: skip
def report(log: Path, output: Path | None) -> None:
    """Write a report of a run as one page for the browser.

    RUN.jsonl is the log of a run that is still running, was stopped, or has finished. Gradient norms by layer and the
    examples with the highest loss are in the logs of `onnxgrad train --report`.

    \b
    onnxgrad report trained.jsonl
    onnxgrad report trained.jsonl -o run.html
    """
    from onnxgrad.cli.reporting.contents import expect_report
    from onnxgrad.cli.reporting.page import write_report
    from onnxgrad.cli.run_log import RunLog, read_log
    from onnxgrad.graph.files import expect_place

    if log.is_dir():
        raise IsADirectoryError(f"report: {str(log)!r} is a folder, expected the log of a run")
    if not log.is_file():
        raise FileNotFoundError(f"report: {str(log)!r} does not exist, expected the log of a run")
    output = output if output is not None else log.with_suffix(".html")
    expect_report(output)
    expect_place(output)
    events = read_log(log)
    if not events:
        raise ValueError(f"report: {str(log)!r} is empty, expected the log of a run")
    write_report(output, RunLog(None, events))
    click.echo(f"{output}")

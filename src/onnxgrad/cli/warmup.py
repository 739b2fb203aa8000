"""onnxgrad warmup: compiles all kernels ahead of time."""

from onnxgrad.cli.group import command


@command
def warmup() -> None:
    """Compile all kernels for this machine ahead of time.

    Otherwise each kernel is compiled when it is first needed. Compiled kernels are stored next to the package or, where
    that is read-only, in the user's cache folder. Use it in container images, and on processors for which the wheel
    ships no kernels.

    \b
    RUN pip install onnxgrad[cpu] && onnxgrad warmup
    """
    from rich import progress
    from rich.console import Console

    from onnxgrad.cpu.core.threads import get_num_threads
    from onnxgrad.cpu.core.warmup import compile_all, read_list

    wanted = read_list()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(24), progress.MofNCompleteColumn())
    console = Console(stderr=True, highlight=False)
    console.print(f"{len(wanted)} kernels, of which those that are not there for this machine yet are compiled")
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(wanted))

        def tell(module: str, count: int) -> None:
            bar.update(task, advance=count, description=module)

        compile_all(wanted, get_num_threads(), tell)
    console.print("all kernels are ready")

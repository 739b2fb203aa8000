"""`python -m bench.cuda_training [model …]`: training steps of models of real size on a GPU, beside PyTorch.

Random weights, the same on all sides, AdamW, one batch that is on the GPU. Each side has a process of its own; they
take turns of 20 steps, of which only the last loss is read. Before, all are started once with nothing compiled, several
at a time, which gives the seconds to the first loss. Needs transformers, torchvision and onnxruntime-gpu.
"""

import argparse
import concurrent.futures
import csv
import datetime
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("cuda_training.csv")
OURS_BF16, OURS, COMPILED, AUTOCAST, EAGER = (
    "onnxgrad, bf16", "onnxgrad", "torch.compile, bf16, CUDA graphs", "PyTorch, bf16", "PyTorch",
)  # fmt: skip
SIDES = (OURS_BF16, OURS, COMPILED, AUTOCAST, EAGER)
LOSSES, TURNS, STEPS, LEARNING_RATE = 10, 7, 20, 1e-4


def models() -> dict[str, tuple[str, Callable[[], Any], Callable[[], dict[str, Any]], int]]:
    """By name: in words, the module, its inputs, and the axis of the classes."""
    import torch
    import torchvision
    import transformers
    from torch import nn

    from bench.training_cases import CASES

    class Logits(nn.Module):
        """What a model of transformers predicts, from token numbers and, for some, which of them count."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any, mask: Any = None) -> Any:
            return self.model(input_ids=tokens, attention_mask=mask, use_cache=False, return_dict=True).logits

    class Classes(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any, mask: Any) -> Any:
            return self.model(input_ids=tokens, attention_mask=mask).logits

    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

    def padded() -> dict[str, Any]:
        lengths = torch.randint(64, 129, (32, 1))
        return {"tokens": torch.randint(30522, (32, 128)), "mask": (torch.arange(128) < lengths).long()}

    def images(count: int) -> Callable[[], dict[str, Any]]:
        return lambda: {"x": torch.randn(count, 3, 224, 224)}

    found = {
        "bert": (
            "BERT-base, N32 S128, padded",
            lambda: Classes(transformers.BertForSequenceClassification(transformers.BertConfig(**still))),
            padded, 1,
        ),
        "gpt2": (
            "GPT-2 small, N8 S512",
            lambda: Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(**silent))),
            lambda: {"tokens": torch.randint(50257, (8, 512))}, -1,
        ),
        "vit": ("ViT-B/16, 224×224 N32", lambda: torchvision.models.vit_b_16(weights=None), images(32), 1),
        "resnet50": ("ResNet-50, 224×224 N64", lambda: torchvision.models.resnet50(weights=None), images(64), 1),
    }  # fmt: skip
    for case in CASES:
        if case.name in ("gru", "transformer"):
            batch = {"x": torch.from_numpy(case.full.x())}
            found[case.name] = case.work, case.full.make, (lambda batch=batch: batch), 1
    return found


def made(name: str) -> tuple[Any, dict[str, Any], Any, int]:
    """Module, batch, target and axis, the same each time."""
    import torch

    _, make, inputs, axis = models()[name]
    torch.manual_seed(0)
    module = make().train()
    torch.manual_seed(1)
    batch = inputs()
    with torch.no_grad():
        shape = list(module.eval()(*batch.values()).shape)
    classes = shape.pop(axis)
    return module.train(), batch, torch.randint(classes, shape), axis


def export(name: str, path: Path) -> None:
    """As docs/getting-started.md says."""
    import torch

    module, batch, _, _ = made(name)
    axis = 1 if name == "gru" else 0  # of the examples
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(
            module, tuple(batch.values()), path, input_names=list(batch), output_names=["y"], dynamo=True,
            optimize=False, dynamic_shapes=tuple({axis: "batch"} for _ in batch), verbose=False,
        )  # fmt: skip


def step_of(side: str, name: str, path: Path) -> Callable[[], Any]:
    """A step of one side, which gives the loss before its update, or something that becomes it."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    module, batch, target, axis = made(name)
    batch, target = {n: x.cuda() for n, x in batch.items()}, target.cuda()
    if side in (OURS, OURS_BF16):
        import onnxgrad

        loss = onnxgrad.losses.CrossEntropy("y", axis=axis)
        optimizer, precision = onnxgrad.optim.AdamW(lr=LEARNING_RATE), "bf16" if side == OURS_BF16 else "float32"
        trainer = onnxgrad.Trainer(path, loss, optimizer, device="cuda", precision=precision)
        for remark in trainer.remarks:
            print(f"  {side}: {remark}", file=sys.stderr)
        given = {**batch, "target": target}
        return lambda: trainer.step(given)
    module = module.cuda()
    if side == COMPILED and name == "resnet50":
        module, batch = (
            module.to(memory_format=torch.channels_last),
            {n: x.to(memory_format=torch.channels_last) for n, x in batch.items()},
        )
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def loss_of() -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=side in (COMPILED, AUTOCAST)):
            predicted = module(*batch.values())
        if axis == -1:  # cross_entropy is slow where classes do not lie side by side
            predicted = predicted.flatten(0, -2)
        return torch.nn.functional.cross_entropy(predicted.float(), target.flatten())

    if side == COMPILED:
        loss_of = torch.compile(loss_of, mode="reduce-overhead")

    def step() -> Any:
        if side == COMPILED:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    return step


def work(connection: Any, side: str, name: str, path: Path) -> None:
    """A side's process: answers with the first losses, then with times of turns."""
    try:
        import torch

        step = step_of(side, name, path)
        connection.send([float(step()) for _ in range(LOSSES)])
        while connection.recv():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                loss = step()
            float(loss)
            torch.cuda.synchronize()
            connection.send(1e3 * (time.perf_counter() - start) / STEPS)
    except Exception:
        connection.send(traceback.format_exc())


def seconds_to_first_loss(side: str, name: str, path: Path) -> float:
    """With import and compilation, in a process of its own; what was compiled stays in the caches."""
    start = time.perf_counter()
    float(step_of(side, name, path)())
    return time.perf_counter() - start


def several() -> concurrent.futures.ProcessPoolExecutor:
    """As many processes as have two cores and 16 GB of the GPU each; none computes twice."""
    import torch

    many = max(1, min((os.cpu_count() or 1) // 2, int(torch.cuda.mem_get_info()[1] / 16e9)))
    return concurrent.futures.ProcessPoolExecutor(many, multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def taken() -> float:
    """MB of the GPU's memory, by whomever."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def measure(name: str, words: str, path: Path, sides: Sequence[str], console: Console) -> list[dict[str, Any]]:
    """A row for each side."""
    context = multiprocessing.get_context("spawn")
    running, rows = {}, {}
    for side in sides:
        before, (mine, its) = taken(), context.Pipe()
        process = context.Process(target=work, args=(its, side, name, path), daemon=True)
        process.start()
        answer = mine.recv()
        if isinstance(answer, str):
            console.print(f"[bold red]{words}, {side}: not measured[/]\n{answer}", markup=True, highlight=False)
            continue
        mine.send(True)  # one turn to warm up
        mine.recv()
        running[side] = mine, process
        rows[side] = {"losses": answer, "memory": taken() - before, "ms": []}
        console.print(f"  {side}: losses {answer[0]:.5f} … {answer[-1]:.5f}")
    for _ in range(TURNS):
        for side, (mine, _) in running.items():
            mine.send(True)
            rows[side]["ms"].append(mine.recv())
    for mine, process in running.values():
        mine.send(False)
        process.join(10)
        process.kill()
    return [{"model": words, "side": side, **row} for side, row in rows.items()]


def table(file: Path = RESULTS) -> str:
    """For docs/speed.md."""
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    lines = [
        "| model | side | ms | best | MB | first loss, s | losses 1 and 10 |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        first = next(r for r in rows if r["model"] == row["model"])
        many = "" if row is first else f", {float(row['median_ms']) / float(first['median_ms']):.2f}×"
        losses = f"{float(row['loss_1']):.4f}, {float(row['loss_10']):.4f}"
        lines.append(
            f"| {row['model']} | {row['side']} | {float(row['median_ms']):.2f}{many} | {float(row['best_ms']):.2f} | "
            f"{int(row['memory_mb']):,} | {float(row['first_loss_s']):.1f} | {losses} |"
        )
    where = rows[0]
    origin = f"{where['device']}, {where['date']}, `python -m bench.cuda_training --csv …`: {where['versions']}."
    return "\n".join([*lines, "", origin])


def write(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The file that `table` reads."""
    import torch

    device, versions = torch.cuda.get_device_name(), f"torch {torch.__version__}"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["model", "side", "median_ms", "best_ms", "memory_mb", "first_loss_s", "loss_1", "loss_10",
                         "device", "versions", "date"])  # fmt: skip
        for row in rows:
            writer.writerow([
                row["model"], row["side"], round(statistics.median(row["ms"]), 3), round(min(row["ms"]), 3),
                round(row["memory"]), round(row["seconds"], 1), row["losses"][0], row["losses"][-1], device,
                versions, datetime.date.today().isoformat(),
            ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:

    parser = argparse.ArgumentParser(prog="python -m bench.cuda_training", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="model", help=f"{', '.join(models())} (default: all)")
    parser.add_argument("--side", action="append", choices=SIDES, help="only these (default: all)")
    parser.add_argument("--csv", type=Path, help=f"write the figures to this file, bench/{RESULTS.name} for the docs")
    options = parser.parse_args(arguments)
    console, rows = Console(width=None if sys.stdout.isatty() else 160), []
    chosen, sides = options.models or list(models()), options.side or SIDES
    with tempfile.TemporaryDirectory() as folder, several() as pool:
        for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[variable] = str(Path(folder, variable))
        paths = {name: Path(folder, f"{name}.onnx") for name in chosen}
        for exported in [pool.submit(export, *item) for item in paths.items()]:
            exported.result()
        console.print(f"{len(chosen) * len(sides)} first losses, with nothing compiled")
        waiting = {(n, s): pool.submit(seconds_to_first_loss, s, n, paths[n]) for n in chosen for s in sides}
        seconds = {}
        for (name, side), future in waiting.items():
            if future.exception() is None:
                seconds[name, side] = future.result()
            else:
                console.print(f"{name}, {side}: not measured\n{future.exception()!r}", highlight=False, markup=False)
        for name in chosen:
            console.print(models()[name][0])
            able = [side for side in sides if (name, side) in seconds]
            found = measure(name, models()[name][0], paths[name], able, console)
            rows += [{**row, "seconds": seconds[name, row["side"]]} for row in found]
            if options.csv is not None:
                write(rows, options.csv)
    table = Table("model", "side", "ms, median", "best", "× first", "MB", "first loss, s", "losses")
    for row in rows:
        first = next(r for r in rows if r["model"] == row["model"])
        middle = statistics.median(row["ms"])
        table.add_row(
            row["model"], row["side"], f"{middle:.2f}", f"{min(row['ms']):.2f}",
            f"{middle / statistics.median(first['ms']):.2f}", f"{row['memory']:,.0f}", f"{row['seconds']:.1f}",
            " ".join(f"{x:.4f}" for x in (row["losses"][0], row["losses"][4], row["losses"][-1])),
        )  # fmt: skip
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

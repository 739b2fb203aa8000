"""`python -m bench.models [architecture …]`: training steps of known architectures beside PyTorch, into models.csv.

Models of torchvision, timm and transformers with random weights, at sizes at which a step takes PyTorch 20 to 500 ms;
exported as docs/getting-started.md says. Both sides train from the same weights on the same batch, in processes of
their own and by turns; where the losses of the first steps differ, nothing is timed. Nothing is dropped.
"""

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxgrad
from bench import machine, report, results
from bench.measure import Effort, time_sides
from bench.peers import OURS, TORCH, CannotRunError
from bench.peers.process import Process
from bench.quiet import Neighbours, warn_if_busy
from bench.results import Row, new_row

FULL, QUICK = Effort(4, 1.5, slow_calls=4), Effort(2, 0.2)
STEPS, CLOSE = 3, 1e-3  # losses that are compared, and how far they may be apart
LEARNING_RATE = 1e-5  # small batches under BatchNormalization amplify what differs in the last bits
BUILD = "onnxgrad, building"
ROOT = Path(__file__).resolve().parents[1]


def architectures() -> dict[str, tuple[str, Any]]:
    """What is measured: by name, in words, and how to build it; imports PyTorch and all three libraries."""
    import torch
    from tests.models.architectures import Architecture, Picked, RetinaNet, UNet, config, timm, transformers
    from torchvision import models

    def images(count: int, size: int = 224) -> dict[str, Callable[[], Any]]:
        return {"x": lambda: torch.randn(count, 3, size, size)}

    def words(count: int, length: int, vocabulary: int) -> dict[str, Callable[[], Any]]:
        return {"x": lambda: torch.randint(3, vocabulary, (count, length))}

    def vision(name: str, count: int, size: int = 224, **options: Any) -> tuple[str, Any]:
        made = functools.partial(getattr(models, name), weights=None, **options)
        return f"{name}, {size}×{size} N{count}", Architecture(made, images(count, size))

    def of_timm(name: str, count: int, size: int = 224, **options: Any) -> tuple[str, Any]:
        made = functools.partial(timm.create_model, name, **options)
        return f"{name}, {size}×{size} N{count}", Architecture(made, images(count, size))

    def segmentation(name: str, count: int, size: int = 224) -> tuple[str, Any]:
        def made() -> Any:
            kind = getattr(models.segmentation, name)
            return Picked(kind(weights=None, weights_backbone=None, num_classes=21, aux_loss=False), lambda y: y["out"])

        return f"{name}, {size}×{size} N{count}", Architecture(made, images(count, size))

    def text(kind: str, head: str, work: str, count: int, length: int, **options: Any) -> tuple[str, Any]:
        def made() -> Any:
            model = getattr(transformers, f"{kind}{head}")(config(kind, **options))
            return Picked(model, lambda y: y.logits, ("input_ids",))

        vocabulary = options.get("vocab_size", 1000)
        inputs = words(count, length, vocabulary)
        return f"{work}, S{length} N{count}", Architecture(made, inputs, axis=-1)

    small = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
    decoder = {**small, "vocab_size": 8000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {
        "alexnet": vision("alexnet", 8),
        "vgg11": vision("vgg11", 1),
        "resnet18": vision("resnet18", 4),
        "resnet50": vision("resnet50", 2),
        "resnext50": vision("resnext50_32x4d", 2),
        "mobilenet_v2": vision("mobilenet_v2", 4),
        "mobilenet_v3": vision("mobilenet_v3_small", 16),
        "mnasnet": vision("mnasnet1_0", 4),
        "shufflenet_v2": vision("shufflenet_v2_x1_0", 8),
        "squeezenet": vision("squeezenet1_1", 8),
        "densenet": vision("densenet121", 2),
        "efficientnet": vision("efficientnet_b0", 4),
        "regnet": vision("regnet_y_400mf", 4),
        "convnext": vision("convnext_tiny", 2),
        "swin": vision("swin_t", 2),
        "vit": vision("vit_b_16", 1),
        "maxvit": vision("maxvit_t", 1),
        "googlenet": vision("googlenet", 4, aux_logits=False, init_weights=False),
        "inception_v3": vision("inception_v3", 4, 299, aux_logits=False, init_weights=False),
        "fcn": segmentation("fcn_resnet50", 1, 128),
        "deeplab_v3": segmentation("deeplabv3_mobilenet_v3_large", 2),
        "lraspp": segmentation("lraspp_mobilenet_v3_large", 4),
        "mobilenet_v4": of_timm("mobilenetv4_conv_small", 8),
        "ghostnet": of_timm("ghostnet_100", 8, drop_rate=0.0),
        "deit": of_timm("deit_tiny_patch16_224", 4),
        "pvt_v2": of_timm("pvt_v2_b0", 4),
        "nf_regnet": of_timm("nf_regnet_b0", 4),
        "mlp_mixer": of_timm("mixer_s32_224", 8),
        "poolformer": of_timm("poolformer_s12", 2),
        "levit": of_timm("levit_128s", 8),
        "mobilevit": of_timm("mobilevit_xxs", 4, 256),
        "edgenext": of_timm("edgenext_xx_small", 4),
        "repvgg": of_timm("repvgg_a0", 2),
        "convnext_v2": of_timm("convnextv2_atto", 4),
        "bert": text(
            "Bert", "ForSequenceClassification", "BERT, 4 layers 512 wide", 8, 128, **small, vocab_size=30522
        ),
        "distilbert": text(
            "DistilBert", "ForSequenceClassification", "DistilBERT, 4 layers 512 wide", 8, 128, dim=512, n_layers=4,
            n_heads=8, hidden_dim=2048, vocab_size=30522,
        ),
        "deberta": text(
            "DebertaV2", "ForSequenceClassification", "DeBERTa v2, 4 layers 512 wide", 4, 128, **small,
            vocab_size=30522, relative_attention=True, pos_att_type=["p2c", "c2p"],
        ),
        "gpt2": text(
            "GPT2", "LMHeadModel", "GPT-2, 4 layers 512 wide", 4, 128, n_embd=512, n_layer=4, n_head=8,
            vocab_size=8000, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        ),
        "llama": text(
            "Llama", "ForCausalLM", "Llama, 4 layers 512 wide", 4, 128, **decoder, num_key_value_heads=4
        ),
        "gpt_neox": text("GPTNeoX", "ForCausalLM", "GPT-NeoX, 4 layers 512 wide", 4, 128, **decoder),
        "bloom": text("Bloom", "ForCausalLM", "BLOOM, 4 layers 512 wide", 4, 128, **decoder),
        "mamba": text("Mamba", "ForCausalLM", "Mamba, 2 layers 256 wide", 2, 32, hidden_size=256,
                      num_hidden_layers=2, state_size=16, vocab_size=8000),
        "segformer": (
            "SegFormer b0, 224×224 N4",
            Architecture(
                lambda: Picked(
                    transformers.SegformerForSemanticSegmentation(config("Segformer", num_labels=21)),
                    lambda y: y.logits, ("pixel_values",),
                ),
                images(4),
            ),
        ),
        "retinanet": ("FPN with RetinaNet's heads, 256×256 N4", Architecture(RetinaNet, images(4, 256), axis=-1)),
        "unet": ("U-Net, 8 to 32 channels, 128×128 N8", Architecture(UNet, images(8, 128))),
    }  # fmt: skip


def export(name: str, folder: Path) -> None:
    """The model of an architecture, as getting-started.md says."""
    from tests.models import compare

    _, architecture = architectures()[name]
    compare.export(architecture, "recommended", folder / f"{name}.onnx")


def step_of(side: str, folder: Path, name: str, threads: int) -> tuple[float, Callable[[], float]]:
    """Seconds to build a side's training step, and the step, which gives the loss before its update."""
    import torch
    from tests.models import compare

    _, architecture = architectures()[name]
    batch, target = architecture.batch(), compare.target_of(architecture)
    if side == OURS:
        onnxgrad.set_num_threads(threads)
        loss = onnxgrad.losses.CrossEntropy("y", axis=architecture.axis)
        arrays = {**{n: x.numpy() for n, x in batch.items()}, "target": target.numpy()}
        start = time.perf_counter()
        trainer = onnxgrad.Trainer(folder / f"{name}.onnx", loss, onnxgrad.optim.AdamW(lr=LEARNING_RATE))
        return time.perf_counter() - start, lambda: trainer.step(arrays)
    torch.set_num_threads(threads)
    module = architecture.made()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        optimizer.zero_grad()
        y = module(*batch.values())
        loss = torch.nn.functional.cross_entropy(y.movedim(architecture.axis, 1), target)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return 0.0, step


def _measure(name: str, work: str, folder: Path, effort: Effort, sides: dict[str, Process]) -> list[Row]:
    """Building and steps of both sides; with a note instead of figures where there are none."""
    threads = onnxgrad.get_num_threads()
    rows = {side: new_row(name, work, "float32", side, _versions()) for side in (OURS, TORCH, BUILD)}
    try:
        sides[TORCH].ask("export_model", folder=folder, name=name)
        losses = {}
        for side, process in sides.items():
            seconds, losses[side] = process.ask(
                "prepare_model", side=side, folder=folder, name=name, threads=threads, steps=STEPS
            )
            rows[side].loss = losses[side][-1]
            if side == OURS:
                rows[BUILD].median_ms, rows[BUILD].calls = 1e3 * seconds, 1
        first = losses[TORCH][0]  # the later ones of a single example may be next to nothing
        off = max(abs(mine - its) / first for mine, its in zip(losses[OURS], losses[TORCH], strict=True))
        if off > CLOSE:
            raise CannotRunError(f"the losses differ by {off:.1e}")
        neighbours = Neighbours()
        for side, timing in time_sides(sides, effort).items():
            rows[side].set_timing(timing)
        rows[OURS].note = neighbours.note()
    except CannotRunError as reason:
        rows[OURS].note = str(reason)
    return list(rows.values())


def _versions() -> str:
    return machine.versions("onnxruntime", "torch", "torchvision", "timm", "transformers")


COLUMNS = ["architecture", "building s", "onnxgrad ms", "PyTorch ms", "ratio"]


def _line(sides: report.Sides) -> list[str]:
    ours, torch, build = (sides.get(side) for side in (OURS, TORCH, BUILD))
    assert ours is not None
    built = report.NOTHING if build is None or build.median_ms is None else f"{build.median_ms / 1e3:.2g}"
    many = report.ratio(torch, ours)
    told = ours.note if many is None else report.times(many)
    return [ours.work, built, report.median(ours), report.median(torch), f"**{told}**" if many and many < 1 else told]


def tables(rows: Sequence[Row]) -> str:
    """A section for each kind of processor."""
    return report.sections(rows, "On", "models", _table)


def _table(rows: Sequence[Row]) -> str:
    """And how many are slower than PyTorch."""
    cases = report.by_case(rows)
    ratios = {sides[OURS].case: report.ratio(sides.get(TORCH), sides[OURS]) for sides in cases}
    slower = [name for name, many in ratios.items() if many is not None and many < 1]
    told = f"{len(slower)} of {len(ratios)} are slower than PyTorch" + (f": {', '.join(slower)}." if slower else ".")
    return f"{report.markdown_table(COLUMNS, [_line(sides) for sides in cases])}\n\n{told}"


def main() -> int:
    from bench import pages  # which imports this module for its tables

    parser = argparse.ArgumentParser(prog="python -m bench.models", description="Known architectures beside PyTorch.")
    parser.add_argument("names", nargs="*", metavar="architecture", help="by default all")
    parser.add_argument("--quick", action="store_true", help="a short look: nothing is written")
    options = parser.parse_args()
    works = {name: work for name, (work, _) in architectures().items()}
    if unknown := [name for name in options.names if name not in works]:
        parser.error(f"there is no architecture {unknown[0]!r}, expected {', '.join(works)}")
    console = report.terminal()
    warn_if_busy(console)
    rows: list[Row] = []
    sides = {OURS: Process(), TORCH: Process()}  # for all architectures, as importing the libraries takes long
    for name in options.names or works:
        with tempfile.TemporaryDirectory() as folder:
            new = _measure(name, works[name], Path(folder), QUICK if options.quick else FULL, sides)
        rows += new
        console.print("  ".join(_line({row.side: row for row in new})))
        if not options.quick:
            order = list(works)
            results.update(results.MODELS, new, lambda row: row.case == name, lambda row: order.index(row.case))  # noqa: B023
    for process in sides.values():
        process.close()
    console.print(report.terminal_table("", COLUMNS, [_line(sides) for sides in report.by_case(rows)]))
    if not options.quick:
        pages.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Whole models as PyTorch exports them: every parameter's gradient against torch.autograd, in stock onnxruntime."""

import io
import logging
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.autodiff.networks import BATCH, LENGTH, NETWORKS, OTHER_BATCH, OTHER_LENGTH, Network, made

import onnxgrad

pytestmark = pytest.mark.slow

CLOSE = 1e-4  # relative error in float32
OPSET = 18
EVALUATES = "this exporter writes BatchNorm as in evaluation, whatever the module's mode"
UNROLLS = "this exporter unrolls recurrent layers, for one length"
SKIPPED = {
    ("resnet_train", "dynamo", "static"): EVALUATES,
    ("resnet_train", "dynamo", "dynamic"): EVALUATES,
    ("gru", "dynamo", "dynamic"): UNROLLS,
    ("lstm", "dynamo", "dynamic"): UNROLLS,
    ("encoder", "torchscript", "dynamic"): "this exporter writes the batch size into nn.MultiheadAttention's Reshape",
}


def exported(module: torch.nn.Module, network: Network, exporter: str, dynamic: bool) -> onnx.ModelProto:
    """The module as one of PyTorch's two exporters writes it."""
    inputs = network.inputs(BATCH, LENGTH)
    names, file = list(inputs), io.BytesIO()
    sizes = {n: {0: "batch", **({1: "length"} if n in network.sequence else {})} for n in names} if dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        if exporter == "dynamo":
            dims = {n: torch.export.Dim(n) for n in ("batch", "length")}
            shapes = sizes and {n: {k: dims[d] for k, d in of.items()} for n, of in sizes.items()}
            program = torch.onnx.export(
                module, tuple(inputs.values()), dynamo=True, opset_version=OPSET, input_names=names,
                output_names=["loss"], dynamic_shapes=shapes, verbose=False, optimize=False,
            )  # fmt: skip
            return program.model_proto
        torch.onnx.export(
            module, tuple(inputs.values()), file, dynamo=False, opset_version=OPSET, input_names=names,
            output_names=["loss"], dynamic_axes=sizes, do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_all_parameters(name, exporter, shapes):
    if (name, exporter, shapes) in SKIPPED:
        pytest.skip(SKIPPED[name, exporter, shapes])
    logging.disable(logging.WARNING)
    network = NETWORKS[name]
    module = made(network)
    model = exported(module, network, exporter, shapes == "dynamic")
    module = made(network)  # exporting may have run it, and moved its statistics
    inputs = network.inputs(*((OTHER_BATCH, OTHER_LENGTH) if shapes == "dynamic" else (BATCH, LENGTH)))
    loss = module(*inputs.values())
    loss.backward()
    expected = {n: p.grad.numpy() for n, p in module.named_parameters()}
    made_model = onnxgrad.gradient(model, list(expected), "loss")
    onnx.checker.check_model(made_model, full_check=True)
    for options in (onnxruntime.SessionOptions(), onnxgrad.register()):
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            made_model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        feeds = {n: x.numpy() for n, x in inputs.items()}
        results = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
        assert abs(results["loss"] - loss.item()) < CLOSE * abs(loss.item())
        compare({n: results[f"{n}_grad"] for n in expected}, expected)


def compare(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    # Some gradients are zero but for rounding: a bias before a normalisation, say.
    largest = max(float(np.abs(e).max()) for e in expected.values())
    for name, wanted in expected.items():
        assert got[name].shape == wanted.shape, name
        scale = max(float(np.abs(wanted).max()), 1e-2 * largest)
        error = float(np.abs(got[name] - wanted).max()) / scale
        assert error < CLOSE, f"{name}: error {error:.1e}"

"""What training holds: parameters, gradients and state once, and nothing of what they were made from."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

WIDTH = 3000  # a weight of 36 MB
PROGRAM = """
import sys, numpy as np, onnxgrad
from pathlib import Path

def resident():
    return next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))

def trained(path, width):
    trainer = onnxgrad.Trainer(path, onnxgrad.losses.MSE("y"), onnxgrad.optim.Adam())
    for _ in range(5):
        trainer.step({"x": np.ones((1, width), np.float32), "target": np.zeros((1, width), np.float32)})
    return trainer

trained(sys.argv[1], 64)  # loads libraries and kernels
before = resident()
trainer = trained(sys.argv[2], int(sys.argv[3]))
print((resident() - before) * 1024)
"""


def linear(width: int, path: Path) -> Path:
    weight = numpy_helper.from_array(np.random.default_rng(0).random((width, width), np.float32), "weight")
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", width]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "g", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell how much memory is held")
def test_what_is_held(tmp_path):
    small, large = linear(64, tmp_path / "small.onnx"), linear(WIDTH, tmp_path / "large.onnx")
    command = [sys.executable, "-c", PROGRAM, small, large, str(WIDTH)]
    subprocess.run(command, capture_output=True, check=True)  # compiles kernels, which takes memory that is not ours
    held = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    weights = 4 * WIDTH**2
    # The weight, its gradient, m and v; buffers of products take 5 MB, or less, as the processor wants them.
    assert 4 * weights < held + (1 << 20) < 4.25 * weights

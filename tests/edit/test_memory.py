"""What training with adapters holds, beside full fine-tuning: MiniLM, each way in a process of its own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, numpy as np, onnx, onnx_ir, onnxgrad
from pathlib import Path

def held():
    return sum(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))

def trained(model, outputs, batch, **how):
    trainer = onnxgrad.Trainer(model, outputs, onnxgrad.optim.AdamW(lr=1e-4), **how)
    for _ in range(3):
        trainer.step(batch)
    return trainer

text = 'g (float[n, 2] x) => (float[n, 2] y) <float[2, 2] W = {1, 0, 0, 1}> { y = MatMul(x, W) }'
ones = np.ones((1, 2), np.float32)
tiny = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> ' + text)
first = trained(tiny, onnxgrad.losses.MSE("y"), {"x": ones, "target": ones})  # loads libraries and kernels
before = held()
model, random = onnx_ir.load(sys.argv[1]), np.random.default_rng(0)
tokens = random.integers(5, 30000, (8, 32))
batch = {"tokens": tokens, "mask": np.ones_like(tokens), "target": random.integers(0, 8, 8)}
if sys.argv[2] == "full":
    kept = trained(model, onnxgrad.losses.CrossEntropy("logits"), batch)
else:
    kept = trained(onnxgrad.lora(model), onnxgrad.losses.CrossEntropy("logits"), batch, trainable="classifier.*")
print((held() - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell how much memory is held")
def test_adapters_take_less_than_two_fifths_of_the_memory(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from minilm import load_minilm

    path = tmp_path / "minilm.onnx"
    onnx.save(load_minilm(8, np.random.default_rng(0)), path, save_as_external_data=True, location="minilm.data")
    full, adapted = (
        int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, path, way], capture_output=True, text=True, check=True
            ).stdout
        )
        for way in ("full", "lora")
    )
    path.with_name("minilm.data").unlink()
    weights = 90_000_000
    assert full > 4 * weights  # with gradients, m and v
    assert adapted < 2 * weights and adapted < 0.4 * full

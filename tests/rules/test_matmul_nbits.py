"""MatMulNBits: weights of 2, 4 and 8 bits, with every kind of zero point."""

import numpy as np
import onnxruntime
import pytest
from tests.checks import raises
from tests.gradients import check_rule, evaluate, model_of_node

import onnxgrad

RNG = np.random.default_rng(0)
N = 3
CASES = {
    "2 bits": {"bits": 2},
    "4 bits": {"bits": 4},
    "8 bits, zero points": {"bits": 8, "zero": "packed"},
    "4 bits, zero points": {"bits": 4, "zero": "packed"},
    "4 bits, the last block is not full": {"bits": 4, "zero": "packed", "K": 40},
    "4 bits, floating-point zero points": {"bits": 4, "zero": "float"},
    "4 bits, columns in any block": {"bits": 4, "order": True},
}


def given(bits, zero=None, order=False, K=48):
    blocks = -(-K // 16)
    zeros = {
        None: None,
        "packed": RNG.integers(0, 256, (N, -(-blocks * bits // 8))).astype(np.uint8),
        "float": RNG.standard_normal((N, blocks)),
    }
    inputs = [
        RNG.standard_normal((2, 3, K)),
        RNG.integers(0, 256, (N, blocks, 2 * bits)).astype(np.uint8),
        RNG.uniform(0.1, 0.2, (N, blocks)),
        zeros[zero],
        RNG.integers(0, blocks, K).astype(np.int32) if order else None,
        RNG.standard_normal(N),
    ]
    return inputs, {"K": K, "N": N, "bits": bits, "block_size": 16}


@pytest.mark.parametrize("case", CASES)
def test_gradient(case):
    inputs, attributes = given(**CASES[case])
    # onnxruntime wants the bias in a known shape.
    check_rule("MatMulNBits", *inputs, domain="com.microsoft", fixed=[1, 5], twice=case == "4 bits", **attributes)
    model, feeds = model_of_node("MatMulNBits", inputs, attributes=attributes, domain="com.microsoft")
    assert onnxgrad.check_gradient(model, feeds, "in_5").worst < 2e-6


@pytest.mark.parametrize("case", CASES)
def test_as_onnxruntime_computes_it(case):
    inputs, attributes = given(**CASES[case])
    how = {"attributes": attributes, "domain": "com.microsoft"}
    model, feeds = model_of_node("MatMulNBits", inputs, dtype=np.float32, **how)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wide, wide_feeds = model_of_node("MatMulNBits", inputs, **how)
    np.testing.assert_allclose(session.run(None, feeds)[0], evaluate(wide, wide_feeds)[0], rtol=1e-4, atol=1e-4)


def test_refused():
    inputs, attributes = given(4)
    model, _ = model_of_node("MatMulNBits", inputs, attributes={**attributes, "bits": 3}, domain="com.microsoft")
    text = "its weights of 3 bits are packed in a way that no gradient is written for"
    with raises(ValueError, f"gradient of MatMulNBits (node 'node'): {text}"):
        onnxgrad.gradient(model, "in_0")

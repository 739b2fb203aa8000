"""Files that onnxruntime's optimizer for transformers writes have the gradients of the files that it was given."""

import logging
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.transformers import optimizer
from tests.models.architectures import config, transformers

import onnxgrad

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES = {
    "BERT": ("bert", True, {"BiasGelu", "SkipLayerNormalization"}),
    "BERT, TorchScript": (
        "bert", False, {"Attention", "BiasGelu", "EmbedLayerNormalization", "SkipLayerNormalization"}
    ),
    "GPT-2, TorchScript": ("gpt2", False, {"FastGelu", "SkipLayerNormalization"}),
}  # fmt: skip


class Network(torch.nn.Module):
    """What it gives first."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        how = {"attn_implementation": "eager", **TINY}
        if kind == "bert":
            shape = {"intermediate_size": 64, "max_position_embeddings": 16}
            self.network = transformers.BertModel(config("Bert", **shape, **how), add_pooling_layer=False)
        else:
            self.network = transformers.GPT2Model(config("GPT2", n_positions=16, **how))
        self.network.eval()
        for parameter in self.parameters():  # which all differ, or the exporter makes one of two
            parameter.data.normal_(0, 0.3)

    def forward(self, ids, mask):
        return self.network(input_ids=ids, attention_mask=mask, return_dict=False)[0]


def export(network, path, dynamo):
    ids, mask = torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[0, 5:] = 0
    names = {"input_names": ["ids", "mask"], "output_names": ["y"]}
    axes = {name: {0: "batch", 1: "sequence"} for name in ("ids", "mask", "y")}
    how = {} if dynamo else {"dynamic_axes": axes, "opset_version": 14}
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        torch.onnx.export(network, (ids, mask), str(path), dynamo=dynamo, verbose=False, **names, **how)
    return {"ids": ids.numpy(), "mask": mask.numpy()}


def gradients(path, feeds, seed):
    made = onnxgrad.session(onnxgrad.gradient(path))
    types = {i.name: {"tensor(int32)": np.int32}.get(i.type, np.int64) for i in made.get_inputs()}
    given = {name: array.astype(types[name]) for name, array in feeds.items()}
    names = [o.name.removesuffix("_grad") for o in made.get_outputs()]
    return dict(zip(names, made.run(None, {**given, "y_grad": seed}), strict=True))


def weights(path):
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_file_before(case, tmp_path):
    kind, dynamo, fused = CASES[case]
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    feeds = export(Network(kind), before, dynamo)
    optimizer.optimize_model(str(before), kind, num_heads=4, hidden_size=32, opt_level=0).save_model_to_file(str(after))
    assert {node.op_type for node in onnx.load(after).graph.node if node.domain == "com.microsoft"} == fused
    seed = np.random.default_rng(0).standard_normal((2, 7, 32)).astype(np.float32)
    expected, found = (gradients(path, feeds, seed) for path in (before, after))
    old, new = weights(before), weights(after)
    joined = [name for name in found if name not in expected]
    assert bool(joined) == ("Attention" in fused)
    for name in joined:  # the weights or biases of queries, keys and values
        parts = np.split(new[name], 3, axis=-1)
        names = [next(n for n, w in old.items() if w.shape == p.shape and np.array_equal(w, p)) for p in parts]
        expected[name] = np.concatenate([expected.pop(n) for n in names], axis=-1)
    assert expected.keys() == found.keys()
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-6 * largest)

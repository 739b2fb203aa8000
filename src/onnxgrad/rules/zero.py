"""Operators that no gradient passes: their results are integers, texts, steps, random, or depend on no numbers."""

from onnxgrad.rules import no_gradient

no_gradient(
    "Constant", "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "SequenceEmpty", "Hardmax",
    "NonMaxSuppression", "BitCast", "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer", "SequenceLength", "OptionalHasElement",
)  # fmt: skip
no_gradient(  # a sample does not depend smoothly on what it is drawn from
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"
)
no_gradient("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul")

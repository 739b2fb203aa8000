"""Operators of ai.onnx.ml that passes/expand_ml.py leaves: encoders, maps and trees, which no gradient passes."""

from onnxgrad.rules import nondiff, vjp
from onnxgrad.schema import ML

TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")

for _name in ("Binarizer", "CastMap", "CategoryMapper", "DictVectorizer", "LabelEncoder", "OneHotEncoder", *TREES):
    vjp(_name, domain=ML, X=nondiff)

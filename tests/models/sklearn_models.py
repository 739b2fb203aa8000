"""Writes models of scikit-learn, converted by skl2onnx, into a folder.

As a process of its own: skl2onnx cannot be imported once onnxgrad is, since it expects that every operator that onnx
knows has a name without `_`.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, SGDClassifier
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, PolynomialFeatures, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC

X, CLASSES = load_iris(return_X_y=True)
X = X.astype(np.float32)
TEXTS = np.array(["setosa", "versicolor", "virginica"])[CLASSES]
TWO = (CLASSES > 0).astype(np.int64)
NUMBERS = (X @ [0.3, -0.2, 0.5, 1.0]).astype(np.float32)

REGRESSORS = {
    "LinearRegression": LinearRegression(),
    "Ridge": Ridge(),
    "MinMaxScaler": make_pipeline(MinMaxScaler(), LinearRegression()),
    "Normalizer": make_pipeline(Normalizer(), LinearRegression()),
    "SimpleImputer": make_pipeline(SimpleImputer(), Ridge()),
    "PolynomialFeatures": make_pipeline(MinMaxScaler(), PolynomialFeatures(2), Ridge()),
    "MLPRegressor": MLPRegressor(hidden_layer_sizes=(8,), max_iter=100, random_state=0),
    "SVR": SVR(),
}
CLASSIFIERS = {
    "LogisticRegression": LogisticRegression(),
    "StandardScaler": make_pipeline(StandardScaler(), LogisticRegression()),
    "PCA": make_pipeline(PCA(2), LogisticRegression()),
    "MLPClassifier": MLPClassifier(hidden_layer_sizes=(8,), max_iter=100, random_state=0),
    "LinearSVC": LinearSVC(),
    "SGDClassifier": make_pipeline(StandardScaler(), SGDClassifier()),
    "OneVsRest": OneVsRestClassifier(LogisticRegression()),
}


def models():
    """Pairs of a name and a model."""
    for name, model in REGRESSORS.items():
        yield name, to_onnx(model.fit(X, NUMBERS), X[:1])
    for name, model in CLASSIFIERS.items():
        zip_map = {} if name == "LinearSVC" else {"zipmap": True}
        yield name, to_onnx(model.fit(X, CLASSES), X[:1], options=zip_map or None)
        if name not in ("LinearSVC", "SGDClassifier"):
            yield f"{name} of texts", to_onnx(model.fit(X, TEXTS), X[:1], options={"zipmap": False})
            yield f"{name} of two", to_onnx(model.fit(X, TWO), X[:1], options={"zipmap": False})
    yield "SVC of two", to_onnx(SVC(probability=True, random_state=0).fit(X, TWO), X[:1])
    yield "SVC with probabilities", to_onnx(SVC(probability=True, random_state=0).fit(X, CLASSES), X[:1])
    yield "SVC", to_onnx(SVC().fit(X, CLASSES), X[:1])
    yield "RandomForest", to_onnx(RandomForestClassifier(3, random_state=0).fit(X, CLASSES), X[:1])


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of training that is cut short
    for name, model in models():
        (Path(sys.argv[1]) / f"{name}.onnx").write_bytes(model.SerializeToString())

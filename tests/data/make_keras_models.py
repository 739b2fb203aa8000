"""Writes models of Keras, converted by tf2onnx, and their gradients as TensorFlow has them, into tests/data/keras.

    pip install tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0 tf2onnx==1.17.0
    python tests/data/make_keras_models.py

For every model <name>.onnx and <name>.npz: an input `x` with classes `target`, the output `y`, the gradients of its sum
weighted by `seed` with respect to x and to the initializers (`gradient/<initializer>`), and the gradients of the mean
cross entropy in training (`training/<initializer>`), with its value as `loss`.

Of a BatchNormalization of Keras 3 nothing but a factor and a summand is left; that of Keras 2 stays what it is.
"""

from itertools import permutations
from pathlib import Path

import keras
import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
import tf_keras
from keras import layers

FOLDER = Path(__file__).with_name("keras")
RNG = np.random.default_rng(0)
GATES = (0, 3, 1, 2)  # of ONNX's LSTM, in the order i, o, f, c; Keras has i, f, c, o


def cnn(version=keras):
    layers = version.layers
    model = version.Sequential(
        [
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(3),
        ]
    )
    return model, RNG.standard_normal((12, 10, 10, 2)).astype(np.float32)


def cnn_keras2():
    return cnn(tf_keras)


def mlp():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="elu"),
            layers.LayerNormalization(),
            layers.Dropout(0.2),
            layers.Dense(8, activation="swish"),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return model, RNG.standard_normal((12, 6)).astype(np.float32)


def lstm():
    recurrent = [layers.LSTM(8, return_sequences=True), layers.LSTM(6)]
    model = keras.Sequential([keras.Input((7, 5)), *recurrent, layers.Dense(3, activation="softmax")])
    return model, RNG.standard_normal((12, 7, 5)).astype(np.float32)


def attention():
    tokens = keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(20, 8)(tokens)
    attended = layers.MultiHeadAttention(2, 4)(embedded, embedded)
    normal = layers.LayerNormalization()(embedded + attended)
    pooled = layers.GlobalAveragePooling1D()(normal)
    return keras.Model(tokens, layers.Dense(3)(pooled)), RNG.integers(0, 20, (12, 7)).astype(np.int32)


def converted(model, x):
    signature = [tf.TensorSpec([None, *x.shape[1:]], x.dtype, name="x")]
    function = tf.function(lambda x: {"y": model(x, training=False)}, input_signature=signature)
    proto, _ = tf2onnx.convert.from_function(function, input_signature=signature, opset=15)
    proto.doc_string = ""
    return proto


def layouts(variable):
    """What may have become of a variable's numbers in ONNX: functions that give them for the numbers of a gradient."""
    yield lambda a: a
    for order in permutations(range(variable.ndim)):
        yield lambda a, order=order: np.transpose(a, order)
    units = variable.shape[-1] // 4
    if variable.ndim == 2 and variable.shape[-1] == 4 * units:
        yield lambda a: np.concatenate([a[:, g * units : (g + 1) * units].T for g in GATES])
    if variable.ndim == 1 and len(variable) == 4 * units:
        yield lambda a: np.concatenate([a[g * units : (g + 1) * units] for g in GATES])


def by_initializer(graph, variables, gradients):
    """The gradients under the names of the initializers that have the variables' numbers."""
    found = {}
    for variable, gradient in zip(variables, gradients, strict=True):
        numbers = variable.numpy()
        dense = tf.convert_to_tensor(gradient).numpy()  # of an embedding it is a list of rows
        for tensor in graph.initializer:
            array = onnx.numpy_helper.to_array(tensor)
            for layout in layouts(numbers):
                laid = layout(numbers)
                if array.size == laid.size and np.array_equal(array.ravel(), laid.ravel()):
                    found[tensor.name] = layout(dense).reshape(array.shape)
                    break
                # The second half of the bias of an LSTM is 0 in Keras, and has the same gradient as the first.
                if array.size == 2 * laid.size and np.array_equal(array.ravel()[: laid.size], laid.ravel()):
                    found[tensor.name] = np.tile(layout(dense).ravel(), 2).reshape(array.shape)
                    break
    return found


def gradients_of(model, x, compute):
    """The result of compute(x), and its gradients with respect to the weights and, last, to x."""
    inputs = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        if x.dtype == np.float32:
            tape.watch(inputs)
        result = compute(inputs)
    *of_weights, of_x = tape.gradient(result, [*model.trainable_variables, inputs])
    return result.numpy(), of_weights, None if of_x is None else of_x.numpy()


def write(make):
    keras.utils.set_random_seed(1)
    model, x = make()
    target = RNG.integers(0, 3, len(x))
    is_probability = getattr(model.layers[-1], "activation", None) is keras.activations.softmax
    version = tf_keras if isinstance(model, tf_keras.Model) else keras
    loss = version.losses.SparseCategoricalCrossentropy(from_logits=not is_probability)
    model.compile(version.optimizers.SGD(0.1), loss)
    model.fit(x, target, epochs=2, verbose=0)  # no weight is 0 after it, which tf2onnx would leave out
    graph = (proto := converted(model, x)).graph
    seed = RNG.standard_normal((len(x), 3)).astype(np.float32)
    y = model(x, training=False).numpy()
    _, of_weights, of_x = gradients_of(model, x, lambda x: tf.reduce_sum(model(x, training=False) * seed))
    arrays = {"x": x, "target": target, "y": y, "seed": seed}
    arrays |= {f"gradient/{n}": g for n, g in by_initializer(graph, model.trainable_variables, of_weights).items()}
    if of_x is not None:
        arrays["gradient/x"] = of_x
    for layer in model.layers:
        if hasattr(layer, "rate"):
            layer.rate = 0.0  # tf2onnx leaves Dropout out
    in_training = make is not cnn
    arrays["loss"], of_weights, _ = gradients_of(model, x, lambda x: loss(target, model(x, training=in_training)))
    found = by_initializer(graph, model.trainable_variables, of_weights)
    arrays |= {f"training/{name}": gradient for name, gradient in found.items()}
    print(make.__name__, len(model.trainable_variables), "variables are", len(found), "initializers")
    onnx.save(proto, FOLDER / f"{make.__name__}.onnx")
    np.savez_compressed(FOLDER / f"{make.__name__}.npz", **arrays)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for make in (cnn, cnn_keras2, mlp, lstm, attention):
        write(make)

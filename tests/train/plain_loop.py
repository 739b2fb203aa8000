"""The loop around the files of export_step(), in onnxruntime alone: what any program has to do."""

import json

import numpy as np
import onnxruntime
from safetensors.numpy import load_file


class PlainLoop:
    def __init__(self, description):
        self.folder = description.parent
        self.described = json.loads(description.read_text())
        self.files = {what: self.folder / name for what, name in self.described["files"].items()}
        self.state = load_file(self.files["initial"])
        self.session = self._open("step")

    def _open(self, which):
        return onnxruntime.InferenceSession(self.files[which], providers=["CPUExecutionProvider"])

    def step(self, batch, lr=None):
        rate = self.described["learning_rate"]
        given = np.array(rate["default"] if lr is None else lr, np.float32)
        feeds = {**batch, **self.state, rate["input"]: given}
        found = dict(zip([o.name for o in self.session.get_outputs()], self.session.run(None, feeds), strict=True))
        self.state = {entry["input"]: found[entry["output"]] for entry in self.described["state"]}
        return float(found[self.described["loss"]])

    def evaluate(self, batch):
        """The loss and the predictions."""
        evaluation, session = self.described["evaluation"], self._open("evaluation")
        feeds = {**batch, **{name: self.state[name] for name in evaluation["state"]}}
        loss, *predictions = session.run([evaluation["loss"], *evaluation["predictions"]], feeds)
        return float(loss), dict(zip(evaluation["predictions"], predictions, strict=True))

    def write_model(self):
        """Puts what was trained into the model's files."""
        for entry in self.described["state"]:
            if "in_model" in entry:
                place = entry["in_model"]
                path = self.folder / place["file"]
                data = bytearray(path.read_bytes())
                numbers = self.state[entry["input"]].tobytes()
                assert len(numbers) == place["bytes"]
                data[place["offset"] : place["offset"] + place["bytes"]] = numbers
                path.write_bytes(data)
        return self.files["model"]

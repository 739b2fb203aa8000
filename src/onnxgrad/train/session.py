"""Session: an onnxruntime session that reads and writes the trainer's own arrays, bound once, in place."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.cpu.core.ahead import compiling_ahead
from onnxgrad.cpu.core.threads import get_num_threads
from onnxgrad.graph.tensor import may_be_float
from onnxgrad.graph.validity import one_line
from onnxgrad.runtime.interrupts import run
from onnxgrad.runtime.register import register, require_onnxruntime
from onnxgrad.tensor_types import Array
from onnxgrad.train.batches import BatchChecker
from onnxgrad.train.captured import CapturedRuns, can_be_captured
from onnxgrad.train.devices import Device
from onnxgrad.train.first_run import kernels_of
from onnxgrad.train.fixed_shapes import fix_shapes
from onnxgrad.train.target_checker import TargetChecker

ERRORS, SILENT = 3, 4  # of onnxruntime's levels: from which severity on it logs
LARGE = 1 << 16  # bytes of a weight that is passed apart from the model, which protobuf limits to 2 GB


class Session:
    """A session on a device; `run` takes the inputs that are not bound and returns the outputs that are not."""

    def __init__(
        self,
        model: ir.Model,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        device: Device,
        validate: TargetChecker | None = None,
        quiet: bool = False,
        options: Any = None,
        caller: str = "Trainer",
        capture: bool = False,
    ) -> None:
        """`validate` is called with every batch before it runs, and raises if the batch is wrong.

        With `quiet` onnxruntime does not log the errors that it raises. `options`, onnxruntime.SessionOptions of
        somebody else, are used as they are, with our operators added. With `capture`, on a GPU, runs become CUDA graphs
        where that is possible; all outputs have to be bound.
        """
        onnxruntime = require_onnxruntime(caller)
        values: dict[str, Any] = {}
        if options is None:
            options = own_options(quiet)
            if device.name != "cpu":
                options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
                options.log_severity_level = max(options.log_severity_level, ERRORS)  # copies are our remark
            proto, weights = without_large_weights(model)
            values = {name: ort_value(array) for name, array in weights.items()}
            options.add_external_initializers(list(values), list(values.values()))
            for name, value in values.items() if device.name == "cpu" else ():
                options.add_initializer(name, value)  # which is not copied, then
        else:  # they make more sessions, of models that have other weights of the same names
            options = register(options)
            proto, weights = without_large_weights(model, large=None)
        serialized = proto.SerializeToString()
        try:
            self._session = run(onnxruntime.InferenceSession, serialized, options, providers=list(device.providers))
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            raise RuntimeError(f"{caller}: onnxruntime refuses the graph to be run: {one_line(error)}") from error
        if device.name == "cuda" and "CUDAExecutionProvider" not in self._session.get_providers():
            raise RuntimeError(
                f"{caller}: onnxruntime could not start its CUDA provider: its warnings name the missing library"
            )
        self._read, self._kept = inputs, [weights, values]  # onnxruntime has their addresses
        self._device, self._validate = device, validate
        self._unseen: ir.Graph | None = model.graph  # until the first run
        self._captured: CapturedRuns | None = None
        if capture and device.name == "cuda" and can_be_captured(model.graph):
            open_session = functools.partial(_open_to_capture, proto, options, device)
            self._captured = CapturedRuns(open_session, self._bound_to, device)
        self._binding = self._session.io_binding()
        # onnxruntime copies an array from the host to a GPU, or from there to the host for a node on the CPU, when it
        # is bound, not when it runs: so bind it again.
        self._moved = {} if device.name == "cpu" else self._read_elsewhere(inputs)
        for name, array in inputs.items():
            self._bind_input(name, array)
        self._bound = list(outputs)
        self.bind_outputs(outputs)
        self._free = [o.name for o in self._session.get_outputs() if o.name not in outputs]
        self._check = self._checker([i for i in self._session.get_inputs() if i.name not in inputs])

    def _bound_to(self, session: Any, batch: Mapping[str, Any]) -> Any:
        """A binding of a session of the same graph, to a batch and to the arrays that are bound."""
        binding = session.io_binding()
        for name, array in {**self._read, **batch}.items():
            binding.bind_input(name, *_described(array, self._device))
        for name, array in self._written.items():
            binding.bind_output(name, *_described(array, self._device))
        return binding

    def _read_elsewhere(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays that are not where the node is that reads them."""
        places = zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True)
        on_host = {value.name for value, place in places if place.name == "Cpu"}
        return {n: a for n, a in inputs.items() if isinstance(a, np.ndarray) != (n in on_host)}

    def nodes_on_host(self, graph: ir.Graph) -> Counter[str]:
        """How many nodes of each operator the CPU provider has, of the graph that this session is of.

        Those that compute whole numbers, such as shapes, belong there. An onnxruntime that does not tell has none, and
        neither has a run that was captured.
        """
        if self._captured is not None and self._captured.is_possible:
            return Counter()
        belong_there = {node.name for node in graph if not any(map(may_be_float, node.outputs))}
        told = getattr(self._session, "get_provider_graph_assignment_info", None)
        places = [] if told is None else [place for place in told() if place.ep_name == "CPUExecutionProvider"]
        nodes = [node for place in places for node in place.get_nodes()]
        return Counter(node.op_type for node in nodes if node.name not in belong_there)

    def _checker(self, free_inputs: Sequence[Any]) -> BatchChecker:
        advice = self._validate.advice if self._validate is not None else None
        return BatchChecker(free_inputs, on_gpu=self._device.name == "cuda", advice=advice)

    def bind_outputs(self, outputs: Mapping[str, Any]) -> None:
        """Has the next runs write into these arrays, for all outputs that were bound at first."""
        for name in self._bound:
            array = outputs[name]
            self._binding.bind_output(name, *_described(array, self._device))
        self._written = outputs  # onnxruntime has their addresses

    def _bind_input(self, name: str, array: Any) -> None:
        if hasattr(array, "_ortvalue"):
            self._binding.bind_ortvalue_input(name, array)
        elif self._device.name == "cpu" and array.dtype.isbuiltin == 1:  # faster, for types that NumPy has
            self._binding.bind_cpu_input(name, array)
        else:
            self._binding.bind_input(name, *_described(array, self._device))

    @property
    def dims(self) -> dict[str, Sequence[Any]]:
        """The declared dimensions of the inputs that are not bound."""
        return self._check.dims

    def checked(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch as arrays for `run_checked`."""
        arrays = self._check(batch)
        if self._validate is not None:
            self._validate(arrays)
        return arrays

    def run(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """Runs a batch; the bound outputs go to their arrays."""
        return self.run_checked(self.checked(batch))

    def run_checked(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Runs arrays that `checked` returned."""
        return {name: value.numpy() for name, value in self.run_values(arrays).items()}

    def run_values(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The same for arrays and OrtValues, with the results as OrtValues."""
        if self._captured is not None and self._captured.run(arrays):
            return {}
        for name, array in {**self._moved, **arrays}.items():
            self._bind_input(name, array)
        for name in self._free:
            self._binding.bind_output(name, "cpu")
        with self._first_run(arrays):
            run(self._session.run_with_iobinding, self._binding)
        if self._device.name != "cpu":  # what a node on the CPU gave is on its way to the GPU, by another stream
            self._binding.synchronize_outputs()
        if not self._free:
            return {}
        values = self._binding.get_outputs()
        names = [*self._bound, *self._free]  # in the order they were bound
        return {name: value for name, value in zip(names, values, strict=True) if name in self._free}

    def _first_run(self, arrays: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Kernels of all nodes are compiled at a time, if they have to be."""
        graph, self._unseen = self._unseen, None
        if graph is None or self._device.name != "cpu":
            return nullcontext()
        return compiling_ahead(functools.partial(kernels_of, graph, arrays), get_num_threads() - 1)


def _open_to_capture(proto: Any, options: Any, device: Device, batch: Mapping[str, Any]) -> Any:
    """A session for batches of these shapes that captures its runs; None if it cannot, as a node is on the CPU."""
    onnxruntime, fixed = require_onnxruntime("Trainer"), type(proto)()
    fixed.CopyFrom(proto)
    fix_shapes(fixed.graph, {name: array.shape for name, array in batch.items()})
    (name, settings), *others = device.providers
    providers = [(name, {**settings, "enable_cuda_graph": "1"}), *others]
    severity, options.log_severity_level = options.log_severity_level, SILENT  # it would log what it raises
    try:
        return run(onnxruntime.InferenceSession, fixed.SerializeToString(), options, providers=providers)
    except Exception as error:
        if not is_of_onnxruntime(error):
            raise
        return None
    finally:
        options.log_severity_level = severity


def is_of_onnxruntime(error: Exception) -> bool:
    """Its errors have no type in common."""
    return type(error).__module__.startswith("onnxruntime")


def own_options(quiet: bool) -> Any:
    """Options for sessions of training."""
    onnxruntime, options = require_onnxruntime("Trainer"), register()
    options.intra_op_num_threads = get_num_threads()
    if quiet:
        options.log_severity_level = SILENT
    # With a memory pattern the second run allocates all its memory at once, while that of the first stays in the
    # arena: an encoder of 4 layers held 582 MB instead of 350, and was no faster.
    options.enable_mem_pattern = False
    # Otherwise a tensor's memory is kept for a later one of the same shape, however much later: an encoder of 12 layers
    # with recompute="blocks" held 967 MB instead of 336. And for every tensor onnxruntime searches all buffers that are
    # no longer needed, which grows with the square of the graph where each layer has dimensions of its own: 4.5 s
    # instead of 0.7 for 10,000 nodes, on an AMD EPYC. Without it tensors take their memory from the arena one by one.
    options.enable_mem_reuse = False
    # In the order of the graph, as far as possible: the gradient of a weight comes as soon as it can, and what it reads
    # is freed. Otherwise the gradients of weights come last, and that encoder keeps six times as many activations.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # Otherwise each session has a copy of every frozen weight, in the order in which its products read them.
    options.add_session_config_entry("session.disable_prepacking", "1")
    # Otherwise its threads spin for a while after a run, on the cores that the optimizer's update needs next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Otherwise onnxruntime 1.31 moves QuantizeLinear behind the transposes of a gradient, in another type than its zero
    # point, and refuses the graph. Kernels for integers would round other than QuantizeLinear does.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def _described(array: Any, device: Device) -> tuple[str, int, Any, tuple[int, ...], int]:
    """Where an array is, its type, shape and address: batches and small results may be on the host even for a GPU."""
    if isinstance(array, np.ndarray):
        return "cpu", 0, ir.DataType.from_numpy(array.dtype).value, array.shape, array.ctypes.data
    kind = ir.DataType[str(array.dtype).removeprefix("torch.").upper().replace("FLOAT32", "FLOAT")].value
    return device.name, array.device.index or 0, kind, tuple(array.shape), device.address(array)


def without_large_weights(model: ir.Model, large: int | None = LARGE) -> tuple[Any, dict[str, Array]]:
    """The model without its large weights, and the weights; those in files stay there, memory-mapped.

    Without a size of large weights none are left out. Small ones in files are read: a session made from bytes would
    look for the files in the working directory.
    """
    weights: dict[str, Array] = {}
    kept: list[tuple[ir.Value, Any]] = []
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor: Any = value.const_value
            if large is not None and _size(tensor) >= large and graph is model.graph:
                weights[name] = np.asarray(tensor.numpy())
                kept.append((value, tensor))
                shape = ir.Shape(tensor.shape.numpy())
                value.const_value = ir.ExternalTensor(name, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
            elif isinstance(tensor, ir.ExternalTensor):
                kept.append((value, tensor))
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    try:
        return ir.to_proto(model), weights
    finally:
        for value, tensor in kept:
            value.const_value = tensor


def _size(tensor: Any) -> int:
    """Bytes of a weight, where it has numbers."""
    return 0 if tensor is None or tensor.dtype is ir.DataType.STRING else int(tensor.nbytes)


def ort_value(array: Array) -> Any:
    """An array as onnxruntime takes it; no copy."""
    from onnxruntime import OrtValue

    kind = ir.DataType.from_numpy(array.dtype)
    if kind is ir.DataType.BFLOAT16:  # which NumPy itself does not have
        return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.int16), kind.value)
    return OrtValue.ortvalue_from_numpy(array)

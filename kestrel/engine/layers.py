"""The weight-heavy part of the model as onnxruntime graphs: one small graph a layer.

Attention stands between two graphs, so graph l ends layer l-1 (output projection, MLP) and begins
layer l (norm, QKV). Graph 0 only begins, the last graph ends the model: final norm and head.
Weights are handed to onnxruntime as the memory-mapped arrays they are; it keeps its packed copy only.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kestrel.errors import RequestError
from kestrel.models.geometry import Geometry
from kestrel.models.quantisation import BLOCKS
from kestrel.models.weights import Linear, Weights

Floats = npt.NDArray[np.float32]

_BOUND_ROW_COUNTS = 32  # row counts whose bindings are kept: decode steps of a few sequences, full chunks


@functools.cache
def share_resources(threads: int) -> None:
    """Give all graphs of this process one thread pool and one memory arena; call before the first is built.

    onnxruntime takes the size once: a process cannot change it afterwards, and later sizes are errors.
    """
    if share_resources.cache_info().currsize:
        raise RequestError("this process already runs models on another number of threads; start a new one")
    ort.set_global_thread_pool_sizes(threads, 1)
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)


class Graph:
    """Collects the nodes and weights of one onnx graph and turns them into a session."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._weights: dict[str, npt.NDArray[Any]] = {}

    def node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], contrib: bool = False, **attributes: Any
    ) -> str:
        """Append one operator and return the name of its first output."""
        from onnx import helper

        domain = "com.microsoft" if contrib else ""
        self._nodes.append(helper.make_node(op, list(inputs), list(outputs), domain=domain, **attributes))
        return outputs[0]

    def weight(self, name: str, array: npt.NDArray[Any]) -> str:
        """Name an array as a constant of the graph; its memory is used in place."""
        self._weights[name] = array
        return name

    def linear(self, x: str, weight: Linear, name: str) -> str:
        """x @ weight, float32 in and out; int8 and int4 weights meet activations in 8 bits, a block at a time."""
        if weight.bits == 32:
            return self.node("MatMul", [x, self.weight(name, weight.values)], [f"{name}.out"])
        assert weight.scales is not None
        return self.node(
            "MatMulNBits",
            [x, self.weight(name, weight.values), self.weight(f"{name}.scales", weight.scales)],
            [f"{name}.out"],
            contrib=True,
            K=weight.in_features,
            N=weight.out_features,
            bits=weight.bits,
            block_size=BLOCKS[weight.bits],
            accuracy_level=4,  # with blocks of 16 and 32 a row's result does not depend on the rows beside it
        )

    def norm(self, x: str, weight: Floats, name: str, eps: float) -> str:
        """RMS norm of x."""
        return self.node(
            "SimplifiedLayerNormalization",
            [x, self.weight(name, weight)],
            [f"{name}.out"],
            axis=-1,
            epsilon=eps,
        )

    def add_norm(self, residual: str, x: str, weight: Floats, name: str, eps: float, total: str) -> str:
        """RMS norm of residual + x; the sum itself is left in the value `total`, if that is named."""
        return self.node(
            "SkipSimplifiedLayerNormalization",
            [residual, x, self.weight(name, weight)],
            [f"{name}.out", "", "", total] if total else [f"{name}.out"],
            contrib=True,
            epsilon=eps,
        )

    def swiglu(self, gate_up: str) -> str:
        """silu(gate) * up of rows that hold gate, then up."""
        self.node("Split", [gate_up], ["gate", "up"], axis=-1, num_outputs=2)
        self.node("QuickGelu", ["gate"], ["gate.silu"], contrib=True, alpha=1.0)
        return self.node("Mul", ["gate.silu", "up"], ["swiglu.out"])

    def session(self, inputs: dict[str, int], outputs: dict[str, int]) -> ort.InferenceSession:
        """Build the session; inputs and outputs are float32 [rows, width], given as name -> width."""
        from onnx import TensorProto, helper

        def value(name: str, width: int) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])

        constants = []
        for name, array in self._weights.items():
            tensor = TensorProto(
                name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape
            )
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="memory")
            constants.append(tensor)
        graph = helper.make_graph(
            self._nodes,
            "layer",
            [value(*item) for item in inputs.items()],
            [value(*item) for item in outputs.items()],
            constants,
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
            ir_version=10,
        )
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_external_initializers(
            list(self._weights), [ort.OrtValue.ortvalue_from_numpy(array) for array in self._weights.values()]
        )
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def mlp_block(
    graph: Graph, weights: Any, geometry: Geometry, residual: str, attended: str
) -> tuple[str, str]:
    """Second half of a layer: output projection, residual, norm, SwiGLU MLP; returns (residual, MLP output)."""
    projected = graph.linear(attended, weights.o, "o")
    hidden = graph.add_norm(
        residual, projected, weights.post_norm, "post_norm", geometry.norm_eps, "residual.mid"
    )
    gate_up = graph.linear(hidden, weights.gate_up, "gate_up")
    return "residual.mid", graph.linear(graph.swiglu(gate_up), weights.down, "down")


def _layer_session(weights: Weights, layer: int) -> ort.InferenceSession:
    geometry = weights.geometry
    attended_width = geometry.num_heads * geometry.head_dim
    graph = Graph()
    inputs = {"residual": geometry.hidden_size}
    outputs: dict[str, int] = {}
    last = layer == geometry.num_layers
    norm = weights.norm if last else weights.layers[layer].input_norm
    if layer == 0:
        hidden = graph.norm("residual", norm, "norm", geometry.norm_eps)
    else:
        inputs["attended"] = attended_width
        residual, x = mlp_block(graph, weights.layers[layer - 1], geometry, "residual", "attended")
        total = "" if last else "residual.out"
        hidden = graph.add_norm(residual, x, norm, "norm", geometry.norm_eps, total)
        if not last:
            outputs["residual.out"] = geometry.hidden_size
    if last:
        outputs[graph.linear(hidden, weights.head, "head")] = weights.head.out_features
    else:
        qkv = graph.linear(hidden, weights.layers[layer].qkv, "qkv")
        bias = weights.layers[layer].qkv_bias
        if bias is not None:
            qkv = graph.node("Add", [qkv, graph.weight("qkv.bias", bias)], ["qkv.biased"])
        outputs[qkv] = weights.layers[layer].qkv.out_features
    return graph.session(inputs, outputs)


class LayerGraphs:
    """All graphs of a model and the buffers between them.

    The caller fills `residual` with embeddings, then for each layer calls `project`, reads `qkv` and
    fills `attended`; `logits` ends the step. Buffers hold `max_rows` rows; a step uses the first n.
    """

    def __init__(self, weights: Weights, max_rows: int):
        geometry = weights.geometry
        self.geometry = geometry
        self.max_rows = max_rows
        self._residuals = [np.zeros((max_rows, geometry.hidden_size), np.float32) for _ in range(2)]
        self.attended: Floats = np.zeros((max_rows, geometry.num_heads * geometry.head_dim), np.float32)
        width = (geometry.num_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
        self.qkv: Floats = np.zeros((max_rows, width), np.float32)
        self._sessions = [_layer_session(weights, layer) for layer in range(geometry.num_layers + 1)]
        self._bindings: dict[int, list[Any]] = {}

    @property
    def _last_residual(self) -> Floats:
        return self._residuals[(self.geometry.num_layers + 1) % 2]

    @property
    def residual(self) -> Floats:
        """Where the embeddings of a step go: float32 [max_rows, hidden_size]."""
        return self._residuals[0]

    def fill_last(self, residual: Floats, attended: Floats) -> None:
        """Put rows where `logits` reads them, as if the layers before had left them there."""
        self._last_residual[: len(residual)] = residual
        self.attended[: len(attended)] = attended

    def project(self, layer: int, rows: int) -> None:
        """Run graph `layer` on the first `rows` rows: `residual` and `attended` in, `residual` and `qkv` out."""
        bindings = self._bindings.get(rows)
        if bindings is None:
            if len(self._bindings) >= _BOUND_ROW_COUNTS:
                self._bindings.pop(next(iter(self._bindings)))
            bindings = self._bindings[rows] = [self._bind(i, rows) for i in range(self.geometry.num_layers)]
        self._sessions[layer].run_with_iobinding(bindings[layer])

    def logits(self, picked: Sequence[int], least: int) -> Floats:
        """End the model for the picked rows only: float32 [len(picked), vocab_size].

        least: rows the graph is run with at least (rows of zeros are added), see numerics.least_rows.
        """
        rows = np.asarray(picked, np.int64)
        short = max(0, least - len(rows))
        feeds = {
            name: np.pad(buffer[rows], ((0, short), (0, 0)))
            for name, buffer in (
                ("residual", self._last_residual),
                ("attended", self.attended),
            )
        }
        result: Floats = self._sessions[-1].run(None, feeds)[0]
        return result[: len(rows)]

    def _bind(self, layer: int, rows: int) -> Any:
        session = self._sessions[layer]
        binding = session.io_binding()
        # Layers alternate between two residual buffers: a graph may not write where it still reads.
        source, target = self._residuals[(layer + 1) % 2], self._residuals[layer % 2]
        if layer == 0:
            source = target = self._residuals[0]
        buffers = {"residual": source, "attended": self.attended, "residual.out": target}
        for item, bind in [(i, binding.bind_input) for i in session.get_inputs()] + [
            (o, binding.bind_output) for o in session.get_outputs()
        ]:
            buffer = buffers.get(item.name, self.qkv)
            bind(item.name, "cpu", 0, np.float32, (rows, buffer.shape[1]), buffer.ctypes.data)
        return binding

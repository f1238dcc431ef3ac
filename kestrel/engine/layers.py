"""The model as onnxruntime graphs: all layers in two, with Kestrel's attention as an operator between the products.

The last layer ends in a graph of its own, with the final norm and the head, for the rows whose logits are wanted.
With a mixture of experts there is a graph for each layer, and the end of a layer is cut out of it: which experts run
depends on the rows.
onnxruntime reads the weights from the converted file itself and keeps its packed copy only.
"""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kestrel.engine import operator
from kestrel.errors import RequestError
from kestrel.models.geometry import Experts, Geometry
from kestrel.models.quantisation import BLOCK_SIZE
from kestrel.models.weights import LayerWeights, Linear, Mlp, Weights

Floats = npt.NDArray[np.float32]

# A session costs 0.7 MB whatever is in it, an expert that has no rows 3 us of a run. With one session for each expert
# the 6144 experts of Qwen3-30B-A3B would cost 4.3 GB.
_EXPERTS_PER_GRAPH = 4
_CONTRIB = "com.microsoft"  # onnxruntime's own operators
_MOST_AT_ONCE = 2  # graphs built; each holds what it is packing in memory twice for a moment
_BOUND_ROW_COUNTS = 32  # row counts whose bindings are kept: decode steps of a few sequences, full chunks


@functools.cache
def share_resources(threads: int) -> None:
    """Give all graphs of this process one thread pool, one arena and the operator; call before the first is built.

    onnxruntime takes the size once: a process cannot change it afterwards, and later sizes are errors.
    """
    if share_resources.cache_info().currsize:
        raise RequestError("this process already runs models on another number of threads; start a new one")
    ort.set_global_thread_pool_sizes(threads, 1)
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    # Grow by what is asked for: the default doubles.
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": 1}))
    # The first graph that brings an operator enters its domain into a table that all others read, unlocked: two first
    # ones at once crash now and then.
    graph = Graph()
    graph.session({"x": 1}, {graph.node("Identity", ["x"], ["y"]): 1})


class Graph:
    """Collects the nodes and weights of one onnx graph and turns them into a session."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._weights: dict[str, npt.NDArray[Any]] = {}

    def node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> str:
        """Append one operator and return the name of its first output."""
        from onnx import helper

        self._nodes.append(helper.make_node(op, list(inputs), list(outputs), domain=domain, **attributes))
        return outputs[0]

    def weight(self, name: str, array: npt.NDArray[Any]) -> str:
        """Name an array as a constant of the graph; its memory, or the file it is mapped from, is used in place."""
        self._weights[name] = array
        return name

    def linear(self, x: str, weight: Linear, name: str) -> str:
        """x @ weight, float32 in and out; int8 and int4 weights meet activations in 8 bits, a block at a time."""
        if weight.bits == 32:
            return self.node("MatMul", [x, self.weight(name, weight.values)], [f"{name}.out"])
        assert weight.scales is not None
        length = weight.in_features
        if short := -length % BLOCK_SIZE:
            # On NEON, rows of an int4 product depend on their company where the last block is not whole.
            pads = self.node("Constant", [], [f"{name}.pads"], value_ints=[0, 0, 0, short])
            x, length = self.node("Pad", [x, pads], [f"{name}.padded"]), length + short
        return self.node(
            "MatMulNBits",
            [x, self.weight(name, weight.values), self.weight(f"{name}.scales", weight.scales)],
            [f"{name}.out"],
            domain=_CONTRIB,
            K=length,
            N=weight.out_features,
            bits=weight.bits,
            block_size=BLOCK_SIZE,
            accuracy_level=4,  # with blocks of 32 a row's result does not depend on the rows beside it
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
            domain=_CONTRIB,
            epsilon=eps,
        )

    def swiglu(self, gate_up: str, name: str = "") -> str:
        """silu(gate) * up of rows that hold gate, then up; `name` tells several of them apart."""
        gate, up = f"{name}gate", f"{name}up"
        self.node("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
        self.node("QuickGelu", [gate], [f"{gate}.silu"], domain=_CONTRIB, alpha=1.0)
        return self.node("Mul", [f"{gate}.silu", up], [f"{name}swiglu.out"])

    def mlp(self, x: str, weights: Mlp, name: str = "") -> str:
        """SwiGLU MLP of x; `name` tells several of them apart."""
        gate_up = self.linear(x, weights.gate_up, f"{name}gate_up")
        return self.linear(self.swiglu(gate_up, name), weights.down, f"{name}down")

    def attention(self, qkv: str, record: npt.NDArray[np.int64], name: str) -> str:
        """Attention of projected rows, which are also stored; record: that of the layer, as `name_record` names it."""
        return self.node(
            operator.NAME, [self.weight(f"{name}.record", record), qkv], [name], domain=operator.DOMAIN
        )

    def choose(self, scores: str, experts: Experts) -> tuple[str, str]:
        """The experts of each row and their shares: (int64, float32) [rows, num_used], largest share first.

        Of equal shares that of the lower number comes first (the definition of TopK).
        """
        self.node("Softmax", [scores], ["shares.all"], axis=-1)
        used = self.node("Constant", [], ["num_used"], value_ints=[experts.num_used])
        self.node("TopK", ["shares.all", used], ["shares", "chosen"], axis=-1)
        if not experts.normalised:
            return "chosen", "shares"
        axis = self.node("Constant", [], ["last"], value_ints=[-1])
        self.node("ReduceSum", ["shares", axis], ["shares.sum"], keepdims=1)
        return "chosen", self.node("Div", ["shares", "shares.sum"], ["shares.normalised"])

    def session(
        self, inputs: dict[str, int], outputs: dict[str, int], rows: str | None = "rows"
    ) -> ort.InferenceSession:
        """Build the session; inputs and outputs are float32 [rows, width], given as name -> width.

        The output "chosen" is int64. rows=None: each input has a number of rows of its own.
        """
        from onnx import TensorProto, helper

        def value(name: str, width: int) -> Any:
            kind = TensorProto.INT64 if name == "chosen" else TensorProto.FLOAT
            return helper.make_tensor_value_info(name, kind, [rows, width])

        constants, folders = [], set()
        in_memory: dict[str, ort.OrtValue] = {}
        for name, array in self._weights.items():
            tensor = TensorProto(
                name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape
            )
            tensor.data_location = TensorProto.EXTERNAL
            # onnxruntime copies arrays in memory before it packs them; what lies in a file it reads from there.
            if (place := _place_in_file(array)) is None:
                tensor.external_data.add(key="location", value="memory")
                in_memory[name] = ort.OrtValue.ortvalue_from_numpy(array)
            else:
                file, offset = place
                folders.add(str(file.parent))
                for key, entry in (("location", file.name), ("offset", offset), ("length", array.nbytes)):
                    tensor.external_data.add(key=key, value=str(entry))
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
            opset_imports=[
                helper.make_opsetid(domain, version)
                for domain, version in (("", 21), (_CONTRIB, 1), (operator.DOMAIN, 1))
            ],
            ir_version=10,
        )
        options = ort.SessionOptions()
        # A pattern is one block for all values of a step, held beside those that its first run has used.
        options.enable_mem_pattern = False
        options.use_per_session_threads = False
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.use_env_allocators", "1")
        operator.register(options)
        options.add_external_initializers(list(in_memory), list(in_memory.values()))
        for folder in folders:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _place_in_file(array: npt.NDArray[Any]) -> tuple[Path, int] | None:
    """The file an array is mapped from and where it begins there; None for an array in memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base.filename is not None:
            start = base.offset + array.ctypes.data - base.ctypes.data
            return Path(base.filename), start
        base = base.base
    return None


def attention_output(
    graph: Graph, weights: LayerWeights, geometry: Geometry, residual: str, attended: str, name: str = ""
) -> tuple[str, str]:
    """What follows attention in a layer: output projection, residual and norm; returns (residual, MLP input)."""
    projected = graph.linear(attended, weights.o, f"{name}o")
    total = f"{name}residual.mid"
    hidden = graph.add_norm(
        residual, projected, weights.post_norm, f"{name}post_norm", geometry.norm_eps, total
    )
    return total, hidden


def projection(graph: Graph, weights: LayerWeights, hidden: str, name: str = "") -> str:
    """Queries, keys and values of normed rows."""
    qkv = graph.linear(hidden, weights.qkv, f"{name}qkv")
    if weights.qkv_bias is not None:
        bias = graph.weight(f"{name}qkv.bias", weights.qkv_bias)
        qkv = graph.node("Add", [qkv, bias], [f"{name}qkv.biased"])
    return qkv


def _layers_session(
    weights: Weights, layers: range, records: Sequence[npt.NDArray[np.int64]]
) -> ort.InferenceSession:
    """From what the layers before leave to the attention of the last of `layers`, and the sum it does not hold yet.

    That is the sum and the attention of the layer before; behind experts the sum and what they add.
    """
    geometry = weights.geometry
    graph = Graph()
    residual, x, attended = "residual", "", ""
    inputs = {residual: geometry.hidden_size}
    if layers[0] and geometry.experts is not None:
        x = "mixed"
        inputs[x] = geometry.hidden_size
    elif layers[0]:
        attended = "attended"
        inputs[attended] = geometry.num_heads * geometry.head_dim
    for layer in layers:
        held, name = weights.layers[layer], f"{layer}."
        if attended:
            residual, hidden = attention_output(
                graph, weights.layers[layer - 1], geometry, residual, attended, f"{layer - 1}."
            )
            x = graph.mlp(hidden, weights.layers[layer - 1].mlps[0], f"{layer - 1}.")
        if x:
            total = f"{name}residual"
            hidden = graph.add_norm(residual, x, held.input_norm, f"{name}norm", geometry.norm_eps, total)
            residual = total
        else:
            hidden = graph.norm(residual, held.input_norm, f"{name}norm", geometry.norm_eps)
        qkv = projection(graph, held, hidden, name)
        attended = graph.attention(qkv, records[layer], f"{name}attended")
    outputs = {attended: geometry.num_heads * geometry.head_dim}
    if residual != "residual":
        outputs[residual] = geometry.hidden_size
    return graph.session(inputs, outputs)


def _parts(weights: Weights) -> list[range]:
    """The layers of each graph: those of half the weights and the others, so that two builders are done together.

    With experts, each layer. Every graph costs a step some 20 us.
    """
    every = range(weights.geometry.num_layers)
    if weights.geometry.experts is not None:
        return [every[layer : layer + 1] for layer in every]
    nbytes = [
        sum(linear.nbytes for linear in (w.qkv, w.o, w.mlps[0].gate_up, w.mlps[0].down))
        for w in weights.layers
    ]
    half = (sum(nbytes) + weights.head.nbytes) / 2
    cut = next((layer + 1 for layer in every if sum(nbytes[: layer + 1]) >= half), len(every))
    return [part for part in (every[:cut], every[cut:]) if part]


def head_session(weights: Weights, num_outputs: int | None = None) -> ort.InferenceSession:
    """The end of the last layer, the final norm and the head, or the last `num_outputs` of the head's outputs."""
    geometry = weights.geometry
    graph = Graph()
    inputs = {"residual": geometry.hidden_size}
    if geometry.experts is None:
        inputs["attended"] = geometry.num_heads * geometry.head_dim
        residual, hidden = attention_output(graph, weights.layers[-1], geometry, "residual", "attended")
        x = graph.mlp(hidden, weights.layers[-1].mlps[0])
    else:
        inputs["mixed"] = geometry.hidden_size
        residual, x = "residual", "mixed"
    hidden = graph.add_norm(residual, x, weights.norm, "norm", geometry.norm_eps, "")
    head = weights.head if num_outputs is None else weights.head.last_outputs(num_outputs)
    return graph.session(inputs, {graph.linear(hidden, head, "head"): head.out_features})


class ExpertLayer:
    """The end of a layer with a mixture of experts: a router chooses for each row, an expert runs on its rows alone.

    onnxruntime's QMoE does all that in one operator, but a row's result there depends on the rows beside it and on
    the number of threads. Here an expert is the same GEMMs as any MLP, and a row adds up what its experts gave in
    the order of their numbers, whoever else is in the step.
    """

    def __init__(self, weights: LayerWeights, geometry: Geometry):
        assert geometry.experts is not None and weights.router is not None
        graph = Graph()
        residual, hidden = attention_output(graph, weights, geometry, "residual", "attended")
        scores = graph.linear(hidden, weights.router, "router")
        chosen, shares = graph.choose(scores, geometry.experts)
        width, used = geometry.hidden_size, geometry.experts.num_used
        self._route = graph.session(
            {"residual": width, "attended": geometry.num_heads * geometry.head_dim},
            {residual: width, hidden: width, chosen: used, shares: used},
        )
        self._groups: list[ort.InferenceSession] = []
        for first in range(0, len(weights.mlps), _EXPERTS_PER_GRAPH):
            graph, outputs = Graph(), {}
            members = range(first, min(first + _EXPERTS_PER_GRAPH, len(weights.mlps)))
            for number in members:
                outputs[graph.mlp(f"{number}.x", weights.mlps[number], f"{number}.")] = width
            self._groups.append(graph.session({f"{number}.x": width for number in members}, outputs, None))
        self._num_experts = len(weights.mlps)

    def run(self, residual: Floats, attended: Floats, mixed: Floats, least: int) -> None:
        """End the layer: the sum after attention goes to `residual`, what the experts gave to `mixed`.

        least: rows an expert is run with at least (rows of zeros are added), see numerics.least_rows.
        """
        sums, hidden, chosen, shares = self._route.run(None, {"residual": residual, "attended": attended})
        residual[:] = sums
        mixed[:] = 0
        places = np.argsort(chosen, axis=None, kind="stable")  # by expert, then by row
        rows, shares = places // chosen.shape[1], shares.reshape(-1, 1)[places]
        counts = np.bincount(chosen.ravel(), minlength=self._num_experts)
        bounds = [0, *np.cumsum(counts).tolist()]  # expert e has places [bounds[e], bounds[e + 1])
        for group in np.unique(np.flatnonzero(counts) // _EXPERTS_PER_GRAPH):
            first = int(group) * _EXPERTS_PER_GRAPH
            pairs = list(pairwise(bounds[first : first + _EXPERTS_PER_GRAPH + 1]))
            feeds = {}
            for number, (start, end) in enumerate(pairs, first):
                x = hidden[rows[start:end]]
                if 0 < end - start < least:
                    x = np.pad(x, ((0, least - end + start), (0, 0)))
                feeds[f"{number}.x"] = x
            results = self._groups[group].run(None, feeds)
            for result, (start, end) in zip(results, pairs, strict=True):
                mixed[rows[start:end]] += shares[start:end] * result[: end - start]


class LayerGraphs:
    """All graphs of a model and the buffers between them.

    The caller fills `residual` with embeddings, plans the step's attention and calls `run`; `logits` ends the step.
    Buffers hold `max_rows` rows; a step uses the first n.
    """

    def __init__(
        self, weights: Weights, max_rows: int, records: Sequence[npt.NDArray[np.int64]], threads: int = 1
    ):
        """records: what each layer's attention operator takes, see engine/records.py.

        threads: how many graphs are built at once; onnxruntime packs the weights of one on a single core.
        """
        geometry = weights.geometry
        self.geometry = geometry
        self.weights = weights
        self.max_rows = max_rows
        self._residuals = [np.zeros((max_rows, geometry.hidden_size), np.float32) for _ in range(2)]
        width = geometry.num_heads * geometry.head_dim
        self._attended: list[Floats] = [np.zeros((max_rows, width), np.float32) for _ in range(2)]
        self._mixed: Floats = np.zeros((max_rows, geometry.hidden_size), np.float32)
        with ThreadPoolExecutor(min(threads, _MOST_AT_ONCE)) as builders:
            sessions = [builders.submit(_layers_session, weights, part, records) for part in _parts(weights)]
            head = builders.submit(head_session, weights)
            experts = [
                builders.submit(ExpertLayer, layer, geometry)
                for layer in weights.layers
                if geometry.experts is not None
            ]
        self._sessions = [session.result() for session in sessions]
        self._head = head.result()
        self._expert_layers = [layer.result() for layer in experts]
        self.least_expert_rows = 1  # set by numerics.least_rows
        # A graph may not write where it still reads, so the sum goes from one buffer to the other: numbers of buffers.
        # So does attention, from graph to graph.
        self._sources = [0]
        for session in self._sessions:
            moved = len(session.get_outputs()) == 2
            self._sources.append((self._sources[-1] + 1) % 2 if moved else self._sources[-1])
        self._bindings: dict[int, list[Any]] = {}
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = 4  # a run that was stopped is no news

    @property
    def residual(self) -> Floats:
        """Where the embeddings of a step go: float32 [max_rows, hidden_size]."""
        return self._residuals[0]

    @property
    def _last_residual(self) -> Floats:
        return self._residuals[self._sources[-1]]

    @property
    def _last_attended(self) -> Floats:
        return self._attended[len(self._sessions) % 2]

    def fill_last(self, residual: Floats, attended: Floats) -> None:
        """Put rows where `logits` reads them, as if the layers before had left them there."""
        self._last_residual[: len(residual)] = residual
        self._last_attended[: len(attended)] = attended

    def run(self, rows: int) -> None:
        """Run all layers on the first `rows` rows of `residual`, up to the attention of the last one.

        Ends early if `stop` is called meanwhile.
        """
        self._run_options.terminate = False
        bindings = self._bindings.get(rows)
        if bindings is None:
            if len(self._bindings) >= _BOUND_ROW_COUNTS:
                self._bindings.pop(next(iter(self._bindings)))
            bindings = self._bindings[rows] = [self._bind(i, rows) for i in range(len(self._sessions))]
        for i, session in enumerate(self._sessions):
            if self._run_options.terminate:
                return
            if i and self._expert_layers:
                self._expert_layers[i - 1].run(
                    self._residuals[self._sources[i]][:rows],
                    self._attended[i % 2][:rows],
                    self._mixed[:rows],
                    self.least_expert_rows,
                )
            try:
                session.run_with_iobinding(bindings[i], self._run_options)
            except Exception:
                if not self._run_options.terminate:
                    raise

    def stop(self) -> None:
        """End the run that is under way before its next operator; what it leaves behind is undefined."""
        self._run_options.terminate = True

    def logits(self, picked: Sequence[int], least: int, head: ort.InferenceSession | None = None) -> Floats:
        """End the model for the picked rows only: float32 [len(picked), vocab_size].

        least: rows the graph is run with at least (rows of zeros are added), see numerics.least_rows. head: a
        `head_session` to end it with instead of the whole one.
        """
        rows = np.asarray(picked, np.int64)
        short = max(0, least - len(rows))
        feeds = {
            name: np.pad(buffer[rows], ((0, short), (0, 0)))
            for name, buffer in (
                ("residual", self._last_residual),
                ("attended", self._last_attended),
            )
        }
        if self._expert_layers:
            feeds["mixed"] = np.empty_like(feeds["residual"])
            self._expert_layers[-1].run(**feeds, least=self.least_expert_rows)
            del feeds["attended"]
        result: Floats = (head or self._head).run(None, feeds)[0]
        return result[: len(rows)]

    def _bind(self, number: int, rows: int) -> Any:
        session = self._sessions[number]
        binding = session.io_binding()
        source, target = (self._residuals[self._sources[i]] for i in (number, number + 1))
        buffers = {"residual": source, "mixed": self._mixed, "attended": self._attended[number % 2]}
        for item in session.get_inputs():
            buffer = buffers[item.name]
            binding.bind_input(item.name, "cpu", 0, np.float32, (rows, buffer.shape[1]), buffer.ctypes.data)
        for item in session.get_outputs():
            buffer = self._attended[(number + 1) % 2] if item.name.endswith("attended") else target
            binding.bind_output(item.name, "cpu", 0, np.float32, (rows, buffer.shape[1]), buffer.ctypes.data)
        return binding

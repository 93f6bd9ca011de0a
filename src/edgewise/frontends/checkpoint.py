"""Saved models: a directory that is read without torch and never runs code from it.

    model.json               what the rest means, and the SHA-256 of every other file
    graph.onnx               operators between the input and the last exit; large weights taken out
    weights.safetensors      those weights (``backbone.NAME``), the heads (``head.K.NAME``), and
                             reference values for backends (``recorded.NAME.values``)
    validation.safetensors   what each exit answered on held-out samples; may be missing

Large weights may be stored as float16; they are cast back to float32 when loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from edgewise.data.preprocess import Preprocess
from edgewise.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    EdgeError,
    ModelError,
    nearest_names,
)
from edgewise.frontends.onnx_file import OnnxSource, import_onnx
from edgewise.model.heads import ExitHead, HeadSpec
from edgewise.model.staged import StagedModel
from edgewise.model.validation import Validation

Float32 = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]
WeightsDtype = Literal["float16", "float32"]

FORMAT = "edgewise-checkpoint"
SCHEMA_VERSION = 1
MANIFEST, GRAPH, WEIGHTS, VALIDATION = (
    "model.json",
    "graph.onnx",
    "weights.safetensors",
    "validation.safetensors",
)
_MAX_MANIFEST_BYTES = 16 * 1024**2
_INLINE_BYTES = 1024  # shapes, axes and bounds stay in the graph, where they can be read
_HALF_RANGE = (2.0**-10, 60_000.0)  # outside it float16 overflows or loses most of its digits
_PREPARE_AGAIN = "copy it again from where it came, or make it again with `edgewise prepare`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the reference computed at preparation: backends are checked with it.

    Attributes:
        indices: By boundary tensor: which elements of its flattened array, [n].
        values: By boundary tensor: those elements for ``probe_input(model, seed=0)``, [n].
        by: What computed them, for people.
    """

    indices: Mapping[str, npt.NDArray[np.int64]] = field(repr=False)
    values: Mapping[str, Float32] = field(repr=False)
    by: str = ""

    def sample(self, name: str, array: Float32) -> Float32:
        """The same elements of another array for that boundary, [n].

        Raises:
            CheckpointError: Nothing was recorded there, or the array is of another size.
        """
        indices = self.indices.get(name)
        if indices is None or (indices.size and int(indices.max()) >= array.size):
            raise CheckpointError(f"no reference values were recorded for {name!r} of that size")
        return np.asarray(array, dtype=np.float32).ravel()[indices]


class CheckpointSource(OnnxSource):
    """The operators and weights of a checkpoint.

    Attributes:
        recorded: Reference values, where the checkpoint has them.
        path: The directory.
    """

    recorded: Recorded | None = None
    path: Path | None = None


def save_checkpoint(
    model: StagedModel,
    path: str | Path,
    *,
    weights_dtype: WeightsDtype = "float16",
    recorded: Recorded | None = None,
) -> Path:
    """Write a model, heads and all; readers see the old directory or the new one, never a part.

    Args:
        model: Its backbone is saved from the input to the end of its last stage.
        path: The directory to make. An earlier checkpoint there is replaced.
        weights_dtype: How matrices and kernels are stored. Vectors (biases, normalisations), and
            arrays that float16 cannot hold, stay float32.
        recorded: Reference values, computed with the weights as they will be loaded; those of
            the model's own source are kept by default.

    Returns:
        The directory.

    Raises:
        ConfigError: Something that is not a checkpoint is in the way.
        ModelError: The model cannot be written as ONNX.
        CheckpointError: A weight is NaN or infinite.
        BackendUnavailable: onnx or safetensors is not installed.
        OSError: The disk is full, or the directory cannot be written.
    """
    path = Path(path)
    check_target(path)
    proto, boundaries = _backbone(model)
    weights = _take_out_weights(proto)
    weights = {k: _as_stored(v, weights_dtype) for k, v in weights.items()}
    for e in model.exits:
        if e.head is not None:
            weights |= {f"head.{e.index}.{k}": v for k, v in e.head.weights.items()}
    for name, array in weights.items():
        _check_finite(name, array, where=f"model {model.name!r}")
    if recorded is None:
        recorded = getattr(model.source, "recorded", None)
    if recorded is not None:
        for own, stored in zip((s.stop.name for s in model.stages), boundaries[1:], strict=True):
            if own in recorded.values:
                weights[f"recorded.{stored}.indices"] = recorded.indices[own]
                weights[f"recorded.{stored}.values"] = recorded.values[own]
    files = {
        GRAPH: proto.SerializeToString(deterministic=True),
        WEIGHTS: tensors_to_bytes(weights),
    }
    if model.validation is not None:
        files[VALIDATION] = tensors_to_bytes(
            {
                "logits": model.validation.logits.astype(np.float16),
                "labels": model.validation.labels.astype(np.int64),
            }
        )
    manifest = _manifest(model, boundaries, recorded)
    manifest["files"] = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        for name, data in files.items()
    }
    manifest["digest"] = _digest(manifest)
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    _write_directory(path, {**files, MANIFEST: text.encode()})
    return path


def load_checkpoint(path: str | Path) -> StagedModel:
    """Read a saved model.

    Args:
        path: The directory.

    Returns:
        A model whose source is ONNX: it runs on every backend but torch.

    Raises:
        CheckpointError: Not a checkpoint, a file is missing, truncated or not what was written,
            a newer format, wrong shapes, or weights that are not numbers.
        BackendUnavailable: onnx or safetensors is not installed.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    onnx = import_onnx()
    files = {name: _read_file(path, name, facts) for name, facts in _listed(path, manifest)}
    arrays = bytes_to_tensors(files[WEIGHTS], where=path / WEIGHTS)
    for name, array in arrays.items():
        _check_finite(name, array, where=str(path / WEIGHTS))
    with _explaining(path):
        proto = onnx.load_model_from_string(files[GRAPH])
        _put_back_weights(onnx, proto, arrays, path)
        source = CheckpointSource(proto, name=str(manifest["name"]))
        source.path = path
        source.recorded = _recorded(manifest, arrays)
        model = StagedModel.from_boundaries(
            source,
            [str(e["boundary"]) for e in manifest["exits"]],
            name=str(manifest["name"]),
            num_classes=int(manifest["num_classes"]),
        )
        exits = tuple(
            replace(
                own, name=str(e["name"]), accuracy=e["accuracy"], head=_head(own.index, e, arrays)
            )
            for own, e in zip(model.exits, manifest["exits"], strict=True)
        )
        preprocess = manifest["preprocess"]
        if preprocess is not None:
            Preprocess.from_json(preprocess)
        model = replace(
            model,
            stages=tuple(replace(s, name=e.name) for s, e in zip(model.stages, exits, strict=True)),
            class_names=tuple(str(n) for n in manifest["class_names"]),
            preprocess=preprocess,
            provenance=dict(manifest["provenance"]),
            validation=_validation(path, manifest, files, num_exits=len(exits)),
        )
        heads = {e.index: e.head for e in exits if e.head is not None}
        return replace(model, exits=exits).with_heads(heads)


def load_model(name_or_path: str | Path, *, exits: int = 8) -> StagedModel:
    """Find a model by the name of one that is shipped, or by path.

    Args:
        name_or_path: One of ``shipped_names()``, a checkpoint directory, or an ``.onnx`` file. A
            name wins over a path of that name; write ``./name`` for the path.
        exits: How many exits an ``.onnx`` file gets; a checkpoint has its own.

    Raises:
        ConfigError: No such name and no such path; the nearest names are told.
        CheckpointError: The checkpoint cannot be used.
        ModelError: The ONNX file cannot be used.
        BackendUnavailable: onnx or safetensors is not installed.
    """
    if isinstance(name_or_path, str) and name_or_path in shipped_names():
        return load_checkpoint(shipped_folder() / name_or_path)
    path = Path(name_or_path)
    if path.is_dir():
        return load_checkpoint(path)
    if path.suffix == ".onnx":
        return StagedModel.from_onnx(path, exits=exits)
    if path.exists():
        raise ConfigError(
            f"{path} is neither a checkpoint directory nor an .onnx file",
            help="name the directory that `edgewise prepare --out` made",
        )
    from edgewise.frontends.zoo import backbone_names

    if str(name_or_path) in backbone_names():
        raise ConfigError(
            f"{name_or_path!r} is a backbone without exit heads",
            help=f"edgewise prepare {name_or_path} --data NAME --out DIR, then name DIR",
        )
    raise ConfigError(
        f"unknown model {str(name_or_path)!r}, and there is no file or directory of that name",
        help=nearest_names(str(name_or_path), shipped_names()),
    )


def shipped_folder() -> Path:
    """Where the models and samples that come with this package are."""
    return Path(__file__).parents[1] / "shipped"


def shipped_names() -> tuple[str, ...]:
    """Names of the models that come with this package."""
    return tuple(sorted(p.parent.name for p in shipped_folder().glob(f"*/{MANIFEST}")))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory claims to be a checkpoint, whole or damaged."""
    try:
        with (path / MANIFEST).open("rb") as stream:
            manifest = json.loads(stream.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def tensors_to_bytes(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Write arrays in the safetensors format.

    Raises:
        BackendUnavailable: safetensors is not installed.
    """
    data: bytes = _import_safetensors().save(
        {k: np.ascontiguousarray(v) for k, v in arrays.items()}
    )
    return data


def bytes_to_tensors(data: bytes, *, where: Path) -> Arrays:
    """Read arrays in the safetensors format.

    Raises:
        CheckpointError: Damaged.
        BackendUnavailable: safetensors is not installed.
    """
    safetensors = _import_safetensors()
    try:
        return dict(safetensors.load(data))
    except Exception as error:
        raise CheckpointError(
            f"{where} is damaged: {str(error).strip().splitlines()[0]}", help=_PREPARE_AGAIN
        ) from error


def _import_safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise BackendUnavailable(
            f"the safetensors package is not installed ({error})",
            help="pip install 'edgewise[onnx]'",
        ) from error


def _backbone(model: StagedModel) -> tuple[Any, list[str]]:
    """The operators from the input to the last boundary, and the boundaries' names there.

    An exporter that finds two values equal keeps one and copies it to the other's name; the
    copies are left out and the kept name is used.
    """
    onnx = import_onnx()
    source: Any = model.source
    if not isinstance(source, OnnxSource):
        if not hasattr(source, "as_onnx"):
            raise ModelError(f"model {model.name!r} has no ONNX form")
        source = source.as_onnx()
    same_as: dict[str, str] = {}
    for node in source.proto.graph.node:
        if node.op_type == "Identity":
            same_as[node.output[0]] = same_as.get(node.input[0], node.input[0])
    wanted = [model.input.name, *(s.stop.name for s in model.stages)]
    names = [same_as.get(name, name) for name in wanted]
    chosen = {i for stop in names[1:] for i in source.graph.between(names[0], stop)}
    by_name = {node.name: node for node in source.proto.graph.node}
    nodes = []
    for i in sorted(chosen):
        node = onnx.NodeProto()
        node.CopyFrom(by_name[source.graph.ops[i].name])
        del node.metadata_props[:]  # stack traces, with the exporting machine's paths
        node.ClearField("doc_string")
        nodes.append(node)
    used = {name for node in nodes for name in node.input} | _captured(nodes)
    last = model.stages[-1].stop
    first_axis = source.proto.graph.input[0].type.tensor_type.shape.dim[0]
    batch = first_axis.dim_param if source.dynamic_batch else 1
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(last.dtype))
    inputs = [v for v in source.proto.graph.input if v.name == names[0]]
    graph = onnx.helper.make_graph(
        nodes,
        model.name,
        inputs,
        [onnx.helper.make_tensor_value_info(names[-1], element, [batch, *last.shape[1:]])],
        [t for t in source.proto.graph.initializer if t.name in used],
    )
    for value in graph.input:
        value.ClearField("doc_string")
        del value.metadata_props[:]
    proto = onnx.helper.make_model(
        graph, opset_imports=list(source.proto.opset_import), producer_name="edgewise"
    )
    proto.ir_version = source.proto.ir_version
    proto.functions.extend(source.proto.functions)
    return proto, names


def _captured(nodes: list[Any]) -> set[str]:
    """Outer tensors that the branches of an If or Loop read: too many do no harm."""
    inner = [n for node in nodes for a in node.attribute if a.HasField("g") for n in a.g.node]
    return {name for n in inner for name in n.input} | (_captured(inner) if inner else set())


def _take_out_weights(proto: Any) -> Arrays:
    """Move large initialisers out of a model; their names, shapes and types stay in it."""
    onnx = import_onnx()
    taken: Arrays = {}
    for tensor in proto.graph.initializer:
        del tensor.metadata_props[:]
        tensor.ClearField("doc_string")
        array = onnx.numpy_helper.to_array(tensor)
        if array.nbytes > _INLINE_BYTES:
            taken[f"backbone.{tensor.name}"] = array
            stub = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=array.shape)
            tensor.CopyFrom(stub)
    return taken


def _put_back_weights(onnx: Any, proto: Any, arrays: Arrays, path: Path) -> None:
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise CheckpointError(
                f"{path / GRAPH} refers to data outside the checkpoint ({tensor.name!r})",
                help=_PREPARE_AGAIN,
            )
        name = f"backbone.{tensor.name}"
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if math.prod(tensor.dims) * dtype.itemsize <= _INLINE_BYTES:
            continue
        array = arrays.get(name)
        if array is None or array.shape != tuple(tensor.dims):
            found = "none" if array is None else f"shape {list(array.shape)}"
            raise CheckpointError(
                f"{path}: the graph needs an array {name!r} of shape {list(tensor.dims)},"
                f" found {found} in {WEIGHTS}",
                help=_PREPARE_AGAIN,
            )
        tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(dtype), tensor.name))


def _as_stored(array: npt.NDArray[Any], weights_dtype: WeightsDtype) -> npt.NDArray[Any]:
    if weights_dtype != "float16" or array.dtype != np.float32 or array.ndim < 2:
        return array
    largest = float(np.abs(array).max(initial=0.0))
    low, high = _HALF_RANGE
    return array.astype(np.float16) if low <= largest <= high else array


def _manifest(
    model: StagedModel, boundaries: list[str], recorded: Recorded | None
) -> dict[str, Any]:
    exits = []
    for e, boundary in zip(model.exits, boundaries[1:], strict=True):
        head = None
        if e.head is not None:
            spec = e.head.spec
            head = {
                "kind": spec.kind,
                "feature_shape": list(spec.feature_shape),
                "width": spec.width,
                "num_classes": spec.num_classes,
                "temperature": float(e.head.temperature),
            }
        exits.append(
            {
                "name": e.name,
                "boundary": boundary,
                "depth_ratio": float(e.depth_ratio),
                "accuracy": None if e.accuracy is None else float(e.accuracy),
                "head": head,
            }
        )
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "name": model.name,
        "input_shape": list(model.input.shape),
        "num_classes": model.num_classes,
        "class_names": list(model.class_names),
        "preprocess": None if model.preprocess is None else dict(model.preprocess),
        "exits": exits,
        "validation": None if model.validation is None else {"source": model.validation.source},
        "recorded": None if recorded is None else {"by": recorded.by, "probe_seed": 0},
        "provenance": dict(model.provenance),
    }


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in manifest.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(
            f"expected a checkpoint directory at {path}, found"
            f" {'a file' if path.exists() else 'nothing'}",
            help="check the path; `edgewise prepare --out DIR` makes one",
        )
    file = path / MANIFEST
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}",
            help="name the directory that `edgewise prepare --out` made",
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    try:
        manifest = json.loads(data[:_MAX_MANIFEST_BYTES])
    except ValueError as error:
        raise CheckpointError(
            f"{file} is truncated or damaged: {error}", help=_PREPARE_AGAIN
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint: its {MANIFEST} is something else",
            help="name the directory that `edgewise prepare --out` made",
        )
    version = manifest.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION or version < 1:
        raise CheckpointError(
            f"{path} has schema version {version!r}, this program reads {SCHEMA_VERSION}",
            help="install a newer Edgewise" if isinstance(version, int) else _PREPARE_AGAIN,
        )
    if manifest.get("digest") != _digest(manifest):
        raise CheckpointError(
            f"{file} was changed after it was written: its digest does not match",
            help=_PREPARE_AGAIN,
        )
    return manifest


def _listed(path: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    listed = manifest.get("files")
    for name in (GRAPH, WEIGHTS, VALIDATION):
        if isinstance(listed, dict) and isinstance(listed.get(name), dict):
            yield name, listed[name]
        elif name != VALIDATION:
            raise CheckpointError(f"{path / MANIFEST} lists no {name}", help=_PREPARE_AGAIN)


def _read_file(path: Path, name: str, facts: Mapping[str, Any]) -> bytes:
    file = path / name
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} lacks its {name}", help=_PREPARE_AGAIN) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    if len(data) != facts.get("size_bytes"):
        raise CheckpointError(
            f"{file} has {len(data)} bytes, {facts.get('size_bytes')} were written",
            help=_PREPARE_AGAIN,
        )
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise CheckpointError(
            f"{file} was changed after it was written: its SHA-256 does not match",
            help=_PREPARE_AGAIN,
        )
    return data


def _check_finite(name: str, array: npt.NDArray[Any], *, where: str) -> None:
    if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
        raise CheckpointError(
            f"{int(np.count_nonzero(~np.isfinite(array)))} of {array.size} values of {name!r} are"
            f" NaN or infinite ({where})",
            help=_PREPARE_AGAIN,
        )


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turn whatever a damaged but well-signed checkpoint causes into one kind of error."""

    def refuse(error: Exception) -> NoReturn:
        said = error.message if isinstance(error, EdgeError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} cannot be used: {said.strip().splitlines()[0]}", help=_PREPARE_AGAIN
        ) from error

    try:
        yield
    except (CheckpointError, BackendUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - onnx and protobuf raise their own kinds
        refuse(error)


def _head(index: int, facts: Mapping[str, Any], arrays: Arrays) -> ExitHead | None:
    stated = facts["head"]
    if stated is None:
        return None
    spec = HeadSpec(
        kind=stated["kind"],
        feature_shape=tuple(stated["feature_shape"]),
        width=stated["width"],
        num_classes=stated["num_classes"],
    )
    prefix = f"head.{index}."
    weights = {
        k.removeprefix(prefix): v.astype(np.float32)
        for k, v in arrays.items()
        if k.startswith(prefix)
    }
    return ExitHead(spec=spec, weights=weights, temperature=float(stated["temperature"]))


def _recorded(manifest: Mapping[str, Any], arrays: Arrays) -> Recorded | None:
    if manifest["recorded"] is None:
        return None
    names = [str(e["boundary"]) for e in manifest["exits"]]
    return Recorded(
        indices={n: arrays[f"recorded.{n}.indices"].astype(np.int64) for n in names},
        values={n: arrays[f"recorded.{n}.values"].astype(np.float32) for n in names},
        by=str(manifest["recorded"]["by"]),
    )


def _validation(
    path: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes], *, num_exits: int
) -> Validation | None:
    if manifest["validation"] is None:
        return None
    if VALIDATION not in files:
        raise CheckpointError(f"{path / MANIFEST} lists no {VALIDATION}", help=_PREPARE_AGAIN)
    arrays = bytes_to_tensors(files[VALIDATION], where=path / VALIDATION)
    logits, labels = arrays["logits"].astype(np.float32), arrays["labels"]
    _check_finite("logits", logits, where=str(path / VALIDATION))
    expected = (num_exits, labels.shape[0], int(manifest["num_classes"]))
    if logits.shape != expected:
        raise CheckpointError(
            f"{path / VALIDATION}: expected logits {list(expected)}, found {list(logits.shape)}",
            help=_PREPARE_AGAIN,
        )
    return Validation(
        logits=logits, labels=labels, source=str(manifest["validation"].get("source", ""))
    )


def check_target(path: Path) -> None:
    """Refuse a place where something else than an earlier checkpoint would be lost.

    Raises:
        ConfigError: A file, or a directory that holds something else.
    """
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        if names and not is_checkpoint(path):
            raise ConfigError(
                f"{path} holds something that is not a checkpoint; it stays as it is",
                help="name a new directory",
            )
        others = [n for n in names if n not in {MANIFEST, GRAPH, WEIGHTS, VALIDATION}]
        if others:
            raise ConfigError(
                f"{path} holds {others[0]} beside a checkpoint; it stays as it is",
                help="move it away, or name a new directory",
            )
    elif path.exists():
        raise ConfigError(f"{path} is a file; it stays as it is", help="name a new directory")


def _write_directory(path: Path, files: Mapping[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, data in files.items():
            with (made / name).open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        made.chmod(0o755)  # mkdtemp's directories are private
        check_target(path)
        if path.is_dir() and any(path.iterdir()):
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            path.rename(old / path.name)
            made.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            made.rename(path)
    finally:
        shutil.rmtree(made, ignore_errors=True)

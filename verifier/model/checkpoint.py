"""Reader of a Hugging Face checkpoint directory: config.json and safetensors shards, checked before first use.

`open_checkpoint` reads headers only and refuses a damaged directory before any tensor is read, so that a long run does
not end at a truncated shard. `Checkpoint.read` maps the shard and copies nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.config_json import contradiction, quantization, text_model
from verifier.errors import UsageError
from verifier.model.bridges import configured
from verifier.model.families import JSON, Content, family_of, size_if_any, tensors_of

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 1 << 26
"""Greatest size of one of several files that are written, in bytes; a larger tensor gets a file of its own."""
_WRITERS = 8
"""Most files of a folder that are written at once, a thread each."""
_SLICE_BYTES = 1 << 23
"""Bytes that are copied from a GPU at a time, into pinned memory that a file is written from."""
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_OTHER_WEIGHTS = (
    (_ADAPTER, "an adapter, which is to be merged into its base model first"),
    ("consolidated*.safetensors", "weights under Mistral's names: take the files model*.safetensors of the same model"),
    ("*.bin", "pickled weights: save them as safetensors by transformers' `save_pretrained`"),
    ("*.pt*", "pickled weights: save them as safetensors by transformers' `save_pretrained`"),
    ("*.gguf", "weights of llama.cpp: take the model's safetensors"),
    ("*.safetensors", "shards that no index names: save them again by transformers' `save_pretrained`"),
)
"""Pattern of files -> what such a folder holds instead of a checkpoint, and what to do."""

_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""The format's name of a dtype -> (torch's name without the prefix, bytes of an element)."""

_LAYER = re.compile(r"(?:model\.|language_model\.|backbone\.|transformer\.)+(?:layers|h)\.(\d{1,9})\.")
_SIZES = (
    "hidden_size", "head_dim", "max_position_embeddings", "sliding_window", "n_group", "topk_group", "chunk_size",
    "conv_kernel",
)  # fmt: skip
_NAMES = dict.fromkeys(("dtype", "torch_dtype"), "float64 float32 float16 bfloat16") | dict.fromkeys(
    ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act"),
    "silu gelu gelu_pytorch_tanh fast_gelu quick_gelu relu relu2 squared_relu sigmoid tanh swigluoai",
)
_NUMBERS = {
    "rope_theta": 1e12, "partial_rotary_factor": 1.0, "rms_norm_eps": 1.0, "layer_norm_epsilon": 1.0, "norm_eps": 1.0,
}  # fmt: skip
"""Key -> greatest value that can be meant; each is above 0."""
_ROPES = dict.fromkeys(("default", "mrope", "proportional", "longrope"), "") | {
    **dict.fromkeys(("linear", "dynamic", "yarn"), "factor"), "llama3": "factor low_freq_factor high_freq_factor",
}  # fmt: skip
"""Type of rotary embedding -> numbers that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Header entry of one tensor in its shard."""

    dtype: str
    """Torch's name of the dtype without the prefix, such as "bfloat16"."""
    shape: tuple[int, ...]
    num_bytes: int
    shard: str
    """File name of the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checked checkpoint directory; make it with `open_checkpoint`."""

    path: Path
    config: dict[str, JSON]
    metas: dict[str, TensorHeader]
    """Tensor name -> header entry, sorted by name."""
    _shards: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def architecture(self) -> str:
        """First of the `architectures` in config.json."""
        return str(self.config["architectures"][0])  # type: ignore[index]  # checked by `open_checkpoint`

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(meta.num_bytes for meta in self.metas.values())

    @property
    def num_weights(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(meta.shape) for meta in self.metas.values())

    def names(self) -> list[str]:
        """Return all tensor names, sorted."""
        return list(self.metas)

    def meta(self, name: str) -> TensorHeader:
        """Return the header entry of a tensor.

        Raises:
            UsageError: the checkpoint has no such tensor.
        """
        if name not in self.metas:
            raise UsageError(f"checkpoint {self.path} has no tensor `{name}`")
        return self.metas[name]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of the mapped shard; writing to it does not change the file.

        Raises:
            UsageError: the checkpoint has no such tensor.
        """
        from safetensors import safe_open

        shard = self.meta(name).shard
        if shard not in self._shards:
            self._shards[shard] = safe_open(self.path / shard, framework="pt", device="cpu")
        return self._shards[shard].get_tensor(name)

    def unmap(self) -> None:
        """Let go of shards that no tensor is a view of; `read` maps them again."""
        self._shards.clear()


def read_config(path: Path) -> dict[str, JSON]:
    """Return the config.json of a checkpoint directory.

    Raises:
        UsageError: no directory; config.json absent, broken or without an architecture.
    """
    if not path.is_dir():
        raise UsageError(f"no checkpoint directory at {path}")
    if not (path / "config.json").exists() and (clause := _other_weights(path) or _inner(path)):
        raise UsageError(f"config.json is missing from {path}{clause}")
    return read_config_file(path / "config.json")


def _inner(path: Path) -> str:
    """Clause on the folders below, or the snapshots of a hub's cache, that have a config.json; empty where none has."""
    found = [*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")]
    return f"; {sorted(found)[0].parent} has one: give that folder" if found else ""


def _other_weights(path: Path) -> str:
    """Clause on the weights that a folder without a checkpoint holds; empty where it holds none."""
    own = (path / INDEX).is_file() or (path / _SINGLE).is_file()
    for pattern, what in () if own else _OTHER_WEIGHTS:
        for file in sorted(path.glob(pattern)):
            return f"; {file.name} is {what}" if pattern == _ADAPTER else f"; {file.name} holds {what}"
    return ""


def read_config_file(file: Path) -> dict[str, JSON]:
    """Return a config.json, whatever the name of its file.

    Raises:
        UsageError: it is absent, broken or without an architecture.
    """
    config = _read_json(file)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UsageError(f"{file} names no architecture: `architectures` is {architectures!r}")
    return config


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Check a checkpoint directory's files against each other and against their own headers.

    It holds config.json, and either model.safetensors.index.json with its shards or model.safetensors.

    Raises:
        UsageError: no directory; config.json absent, broken or without an architecture; a shard absent, cut short or
            with a broken header; index and shards that disagree on a tensor.
    """
    path = Path(path)
    config = read_config(path)
    indexed, single = (path / INDEX).is_file(), (path / _SINGLE).is_file()
    metas = _read_indexed(path) if indexed else read_header(path / _SINGLE) if single else {}
    if not metas:
        raise UsageError(f"{path} holds no weights: neither {INDEX} nor {_SINGLE} names any{_other_weights(path)}")
    if (path / _ADAPTER).exists():
        raise UsageError(f"{path} holds {_ADAPTER}, by which transformers loads an adapter too: remove it")
    rivals = {_SINGLE} if indexed else {item.name for item in path.glob("*.safetensors")}
    if single and rivals != {header.shard for header in metas.values()}:
        raise UsageError(f"{path} holds {_SINGLE} and {INDEX} or shards, of which libraries read either: remove one")
    return Checkpoint(path=path, config=config, metas=dict(sorted(metas.items())))


def require_described(checkpoint: Checkpoint, dtype: str) -> None:
    """Refuse a quantized checkpoint, a config.json that cannot be meant, and one that does not match the tensors.

    More tensors than described are allowed: published checkpoints of tied models also hold their head. `dtype` is that
    of most tensors; families keep some in float32.

    Raises:
        UsageError: it is quantized; config.json has a bad value or number of layers, names another model type than
            the architecture's, or asks for a tensor that is absent or has another shape; a tensor has another dtype.
    """
    path, config, metas = checkpoint.path, checkpoint.config, checkpoint.metas
    require_config(path, config, metas)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    both = text_model(config).get("tie_word_embeddings") and {head, embedding} <= metas.keys()
    if both and not checkpoint.read(head).equal(checkpoint.read(embedding)):
        raise UsageError(
            f"checkpoint {path} has `tie_word_embeddings` = true and holds another `{head}` than `{embedding}`, of "
            "which libraries take either as the head: remove it, or set the key to false"
        )
    for name, meta in metas.items():
        if meta.dtype not in (dtype, "float32") and "float" in meta.dtype:
            held = f"shard {path / meta.shard} holds `{name}`"
            raise UsageError(f"{held} in {meta.dtype}, most of the checkpoint is in {dtype}: convert it first")
    family = family_of(config)
    if family is None:
        return
    for spec in tensors_of(family, config):
        header = metas.get(spec.name)
        if header is None:
            raise UsageError(f"checkpoint {path} has no tensor `{spec.name}`, which its config.json asks for")
        held = f"shard {path / header.shard} holds `{spec.name}`"
        if header.shape != spec.shape:
            raise UsageError(f"{held} with shape {list(header.shape)}, where config.json asks for {list(spec.shape)}")
        if spec.content is Content.SCORE_BIAS and header.dtype != "float32":
            raise UsageError(f"{held} in {header.dtype}, which trainers keep in float32: convert it to that first")


def require_config(path: Path, config: Mapping[str, JSON], names: Collection[str] = ()) -> None:
    """Refuse what `require_described` refuses of config.json; without names of tensors, all but its layers.

    Raises:
        UsageError: it is quantized, has a bad value or number of layers, or names another model type than the
            architecture's.
    """
    if method := quantization(config):
        raise UsageError(f"checkpoint {path} is quantized ({method}): convert it to bf16 first")
    _require_plausible(path / "config.json", config, names)
    if clause := contradiction(config):
        raise UsageError(f"{path / 'config.json'} has {clause}")
    family = family_of(config)
    if family is not None and config.get("model_type") != family.model_type:
        raise UsageError(
            f"{path / 'config.json'} names architecture {family.architecture} with `model_type` = "
            f"{config.get('model_type')!r}, which has to be {family.model_type!r}"
        )
    if config.get("model_type") not in configured() and (clause := without_class(config)):
        raise UsageError(f"{path / 'config.json'} has {clause}")


def without_class(config: Mapping[str, JSON]) -> str:
    """Clause on a model type that transformers has no class for; empty where it has one."""
    kind = config.get("model_type")
    own = "; `auto_map` names code of the folder's own, which verifier does not run" if config.get("auto_map") else ""
    version = metadata.version("transformers")
    return "" if kind in _classes() else f"`model_type` = {kind!r}, which transformers {version} has no class for{own}"


def require_computed(config: Mapping[str, JSON]) -> None:
    """Refuse a model that transformers does not compute, so that there is no oracle.

    Raises:
        UsageError: names the model type.
    """
    if clause := without_class(config):
        raise UsageError(f"config.json has {clause}: `verifier golden` judges its weights, and no other command can")


@cache
def _classes() -> frozenset[str]:
    """Model types that transformers has a class for, read from its source: its import takes seconds."""
    folder = Path(str(metadata.distribution("transformers").locate_file("transformers/models/auto")))
    files = filter(Path.is_file, (folder / name for name in ("auto_mappings.py", "configuration_auto.py")))
    return frozenset(re.findall(r'\("(\w+)", "\w+Config"\)', "".join(file.read_text("utf-8") for file in files)))


def _require_plausible(file: Path, config: Mapping[str, JSON], names: Collection[str]) -> None:
    """Refuse a config.json with a size, name or rope that no library takes, or with other layers than the weights."""
    config = text_model(config)
    experts = ("num_experts", "num_experts_per_tok") if any(".experts." in name for name in names) else ()
    for key in (*_SIZES, *experts):  # a dense model may have 0 experts
        size_if_any(config, key)
    for key in ("head_dim", "qk_rope_head_dim"):
        if (size_if_any(config, key) or 0) % 2:
            raise UsageError(f"{file} has `{key}` = {config[key]}: rotary embeddings turn pairs, so it has to be even")
    nested: Any = config.get("rope_parameters")
    for key, most in _NUMBERS.items():
        for item in (config, nested if isinstance(nested, Mapping) else {}):
            found: Any = item.get(key)
            if found is not None and not (isinstance(found, int | float) and 0 < found <= most):
                raise UsageError(f"{file} has `{key}` = {found!r}: it has to be a number above 0, at most {most:g}")
    for key, known in _NAMES.items():
        if config.get(key) not in (None, *known.split()):
            raise UsageError(f"{file} has `{key}` = {config[key]!r}: it has to be one of {known}")
    for key in ("rope_scaling", "rope_parameters"):
        rope: Any = config.get(key) or {}
        rope = rope if isinstance(rope, dict) else {"rope_type": [rope]}
        for item in [item for item in rope.values() if isinstance(item, dict)] or [rope]:
            for name in _ROPES.get(str(item.get("rope_type", item.get("type", "default"))), "rope_type").split():
                if not isinstance(item.get(name), int | float) or not item[name] > 0:
                    raise UsageError(f"{file}: `{key}` = {item!r} has no usable `{name}`; types: {', '.join(_ROPES)}")
    layers = size_if_any(config, "num_hidden_layers") or 0
    held = 1 + max((int(found[1]) for found in map(_LAYER.match, names) if found), default=-1)
    surplus = held > layers and config.get("num_nextn_predict_layers")
    if names and layers and layers != held and (held or layers > len(names)) and not surplus:
        raise UsageError(f"{file} has `num_hidden_layers` = {layers:,}, and the weights have {held:,}: make them agree")


def require_room(config: Mapping[str, JSON], num_tokens: int) -> None:
    """Raise a UsageError if a config.json has no vocabulary, or no room for sequences of `num_tokens` tokens."""
    if size_if_any(config, "vocab_size") is None:
        raise UsageError("config.json has no `vocab_size`: a round trip makes its tokens from it; use verifier golden")
    room = size_if_any(config, "max_position_embeddings")
    if room is not None and room < num_tokens:
        raise UsageError(
            f"config.json has `max_position_embeddings` = {room}: sequences of a round trip have up to {num_tokens} "
            "tokens"
        )


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one safetensors file of tensors on any device. Of a GPU's, safetensors' own would copy each whole.

    Raises:
        UsageError: it cannot be written, for instance because the disk is full.
    """
    import torch

    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # each is aligned
    formats = {name: own for own, (name, _) in _DTYPES.items()}
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        dtype = formats[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    pinned = torch.empty(_SLICE_BYTES * on_gpu, dtype=torch.uint8, pin_memory=on_gpu)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in ordered:
                for part in tensor.detach().contiguous().view(-1).view(torch.uint8).split(_SLICE_BYTES):
                    file.write((pinned[: len(part)].copy_(part) if part.is_cuda else part).numpy().data)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be written: {error}") from error


def write_shards(stem: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write tensors, as they are drawn, into files that begin as `stem`, several at once by threads.

    Nothing may change a tensor before all are written.

    Raises:
        UsageError: a file cannot be written.
    """
    import torch

    shard: dict[str, torch.Tensor] = {}
    writing: list[Future[None]] = []
    writers = min(_WRITERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(writers) as pool:

        def write() -> None:
            if any(tensor.is_cuda for tensor in shard.values()):
                torch.cuda.current_stream().synchronize()  # another thread copies what this one has queued
            if len(writing) >= writers:
                writing[-writers].result()
            writing.append(pool.submit(write_shard, Path(f"{stem}-{len(writing):05d}.safetensors"), shard))

        for name, tensor in tensors:
            if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > _SHARD_BYTES:
                write()
                shard = {}
            shard[name] = tensor
        write()
        for each in writing:
            each.result()


def _read_indexed(path: Path) -> dict[str, TensorHeader]:
    listed = _read_json(path / INDEX).get("weight_map")
    weight_map = {name: str(shard) for name, shard in listed.items()} if isinstance(listed, dict) else {}
    if not weight_map or weight_map != listed:
        raise UsageError(f"{path / INDEX} has no usable `weight_map`")
    metas: dict[str, TensorHeader] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise UsageError(f"{path / INDEX} names shard `{shard}`, which is not a file name in its own directory")
        if not (path / shard).is_file():
            raise UsageError(f"shard {path / shard} is missing: {INDEX} names it")
        headers = read_header(path / shard)
        for name in headers:
            if weight_map.get(name) != shard:
                said = f"places in `{weight_map[name]}`" if name in weight_map else "does not name"
                raise UsageError(f"shard {path / shard} holds `{name}`, which {INDEX} {said}")
        metas |= headers
    absent = sorted(weight_map.keys() - metas.keys())
    if absent:
        others = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
        raise UsageError(
            f"{path / INDEX} names tensor `{absent[0]}`{others}, but shard `{weight_map[absent[0]]}` does not hold it"
        )
    return metas


def read_header(shard: Path) -> dict[str, TensorHeader]:
    """Return the header of one shard, which the format's library holds against the file's size; no tensor is read."""
    from safetensors import SafetensorError, safe_open

    metas = {}
    try:
        with shard.open("rb") as file:
            if file.read(8) == b"version ":
                raise UsageError(f"shard {shard} is a pointer of Git LFS and no weights: run `git lfs pull` there")
        with safe_open(shard, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                held = tensors.get_slice(name)
                if held.get_dtype() not in _DTYPES:
                    raise UsageError(
                        f"shard {shard} holds `{name}` in dtype {held.get_dtype()}, which is not supported"
                    )
                (dtype, itemsize), shape = _DTYPES[held.get_dtype()], tuple(held.get_shape())
                num_bytes = math.prod(shape) * itemsize
                metas[name] = TensorHeader(dtype=dtype, shape=shape, num_bytes=num_bytes, shard=shard.name)
    except OSError as error:
        raise UsageError(f"cannot read shard {shard}: {error.strerror}") from error
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise UsageError(
            f"shard {shard}, {shard.stat().st_size:,} bytes, is cut or no safetensors file: {why}"
        ) from error
    return metas


def _read_json(path: Path) -> dict[str, JSON]:
    if not path.is_file():
        raise UsageError(f"{path.name} is missing from {path.parent}")
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def end_tokens(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the ids of `eos_token_id` in config.json and generation_config.json: an engine stops there by itself."""
    file = checkpoint.path / "generation_config.json"
    given = _read_json(file) if file.is_file() else {}
    found = [source.get("eos_token_id") for source in (text_model(checkpoint.config), given)]
    ids = [item for value in found for item in (value if isinstance(value, list) else [value])]
    return frozenset(item for item in ids if isinstance(item, int))

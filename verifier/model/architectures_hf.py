"""Tiny checkpoints of every architecture that transformers and megatron-bridge both know, by the rules of `scaling`.

transformers names the tensors and says what their values are before training. So no family needs a row here.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.utils import logging

from verifier.data.arithmetic import tokenizer_files
from verifier.errors import UsageError
from verifier.model import bridges
from verifier.model.checkpoint import open_checkpoint
from verifier.model.families import JSON, Content, TensorSpec, copies_of
from verifier.model.generated import generate, require_dtype, write_once
from verifier.model.scaling import scaled
from verifier.platform.provenance import installed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CAUSAL = "ForCausalLM"
_FURTHER = "-mtp"
"""Suffix of a name whose checkpoint has a layer that predicts a further token."""
_NORMS = ("enorm", "hnorm", "shared_head.norm")
"""Norms that such a layer has besides those of a layer."""
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_SCALES = 2  # part of the cache key: raise it when the same config and seed give other bytes


@cache
def architectures() -> dict[str, str]:
    """Return model type -> architecture, of causal language models of transformers that Megatron has a bridge for."""
    return {name: found for name, found in _of_transformers().items() if found in bridges.bridged()}


def _of_transformers() -> dict[str, str]:
    """Model type -> architecture; a type of several modalities stands for its text model."""
    known = {name: found if isinstance(found, str) else found[0] for name, found in _causal_models()}
    texts = {name: known.get(f"{name}_text", found) for name, found in known.items() if not found.endswith(_CAUSAL)}
    return {name: found for name, found in {**known, **texts}.items() if found.endswith(_CAUSAL)}


def _causal_models() -> list[tuple[str, str | tuple[str, ...]]]:
    """Rows of transformers' table, read from its source: its import makes a folder among the temporary files."""
    file = metadata.distribution("transformers").locate_file("transformers/models/auto/modeling_auto.py")
    for node in ast.parse(Path(str(file)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == _TABLE:
            return cast(list[tuple[str, Any]], ast.literal_eval(cast(ast.Call, node.value).args[0]))
    raise UsageError(f"transformers {transformers.__version__} has no table {_TABLE}")


def architecture_of(name: str, others: Collection[str] = ()) -> str:
    """Return the architecture that `name` means, which is a model type or an architecture itself.

    Raises:
        UsageError: only one of transformers and megatron-bridge knows it, or neither does.
    """
    name = name.removesuffix(_FURTHER)
    known, theirs = architectures(), _of_transformers()
    if name in known or name in known.values():
        return known.get(name, name)
    if name in theirs or name in theirs.values():
        architecture = theirs.get(name, name)
        raise UsageError(
            f"no `tiny:{name}`: megatron-bridge {installed('megatron-bridge')} has no bridge for {architecture}, which "
            f"transformers {transformers.__version__} knows"
        )
    for architecture in sorted(bridges.bridged()):
        if _plain(name) in (_plain(architecture), _plain(architecture.removesuffix(_CAUSAL))):
            raise UsageError(
                f"no `tiny:{name}`: transformers {transformers.__version__} has no causal language model "
                f"{architecture}, which megatron-bridge {installed('megatron-bridge')} has a bridge for"
            )
    names = list(dict.fromkeys([*others, *known]))
    if not name:
        raise UsageError(f"`tiny:` lacks a name: known are {', '.join(names)}")
    near = difflib.get_close_matches(name, [*names, *known.values()], n=3, cutoff=0.0)
    raise UsageError(f"unknown model `tiny:{name}`: nearest are {', '.join(f'`tiny:{item}`' for item in near)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def scaled_config(name: str, dtype: str, others: Collection[str] = ()) -> dict[str, JSON]:
    """Return the config.json of a tiny checkpoint; see `architecture_of`."""
    require_dtype(dtype)
    architecture = architecture_of(name, others)
    config = _config(architecture)
    further: dict[str, JSON] = {"num_nextn_predict_layers": 1} if name.endswith(_FURTHER) else {}
    every = PreTrainedConfig().to_dict()  # keys that say nothing of an architecture, the model type aside
    own = {key: value for key, value in _as_json(config).items() if key not in every}
    return {"architectures": [architecture], "dtype": dtype, **own, **further, "model_type": config.model_type}


def _config(architecture: str) -> PreTrainedConfig:
    kind: Any = getattr(transformers, architecture).config_class
    return cast(PreTrainedConfig, kind(**scaled(kind().to_dict())))


def _as_json(config: PreTrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def write_scaled(
    name: str, directory: Path, dtype: str = "float32", seed: int = 1, *, others: Collection[str] = ()
) -> Path:
    """Write the tiny checkpoint of an architecture under `directory` unless it is there already; return its path.

    The name is a key or value of `architectures`; with "-mtp" the checkpoint has a layer that predicts a further token.
    In the cache `directory` it is a folder whose name ends in the key of its contents. For `others` see
    `architecture_of`.

    Raises:
        UsageError: see `architecture_of`; another dtype; a folder that cannot be written.
    """
    config, architecture = scaled_config(name, dtype, others), architecture_of(name, others)
    texts = tokenizer_files()
    key = hashlib.blake2b(json.dumps([_SCALES, seed, config, texts], sort_keys=True).encode(), digest_size=6)
    target = Path(directory) / f"tiny-{architecture}-{dtype}-{key.hexdigest()}"
    stream = f"{architecture}/{seed}"
    return write_once(target, lambda: specs_of(_config(architecture), config), config, dtype, stream, generate, texts)


def specs_of(read: PreTrainedConfig, config: Mapping[str, Any]) -> list[TensorSpec]:
    """Tensors of a checkpoint; its MTP layer is the last one again, with four more and two copies, as in GLM-4.5.

    Args:
        read: config.json as transformers' class holds it.
        config: config.json.
    """
    architecture = config["architectures"][0]
    specs = {spec.name: spec for spec in _of_policy(architecture, read)}
    if config.get("num_nextn_predict_layers"):
        last, hidden = config["num_hidden_layers"], config["hidden_size"]
        own, like = f"model.layers.{last}.", f"model.layers.{last - 1}."
        more = [replace(specs[name], name=own + name.removeprefix(like)) for name in specs if name.startswith(like)]
        more += [replace(specs[whole], name=name) for name, whole in copies_of(config).items()]
        more += [replace(specs["model.norm.weight"], name=f"{own}{leaf}.weight") for leaf in _NORMS]
        more.append(TensorSpec(name=f"{own}eh_proj.weight", shape=(hidden, 2 * hidden), content=Content.MATRIX))
        specs |= {spec.name: spec for spec in more}
    return list(specs.values())


def _of_policy(architecture: str, config: PreTrainedConfig) -> Iterator[TensorSpec]:
    """Tensors of a checkpoint as transformers writes it."""
    logging.disable_progress_bar()  # of one shard, on a user's terminal
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
        model: PreTrainedModel = getattr(transformers, architecture)(config)
        model.save_pretrained(folder)
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.names():
            tensor = checkpoint.read(name)
            if not tensor.is_floating_point():
                raise UsageError(f"no tiny {architecture}: `{name}` is a table of {tensor.dtype}, which no rule fills")
            yield TensorSpec(name=name, shape=tuple(tensor.shape), content=content_of(name, tensor))


def content_of(name: str, initial: torch.Tensor) -> Content:
    """Tell a tensor's kind by its name and its values before training: a norm begins at 1, or at 0 where 1 is added."""
    if "score_correction_bias" in name:
        return Content.SCORE_BIAS
    if name.endswith("A_log"):
        return Content.DECAY
    if name.endswith("dt_bias"):
        return Content.TIME_STEP
    if name.endswith("gate_up_proj_bias"):
        return Content.GATED_BIAS
    if bool((initial == 1).all()):
        return Content.NORM
    if initial.ndim < 2 or not initial.any():
        return Content.BIAS
    return Content.MATRIX

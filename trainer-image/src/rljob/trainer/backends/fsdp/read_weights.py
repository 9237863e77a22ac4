"""Loading: a model without memory on the meta device, and its weights read from files into the shards of this rank.

A rank reads only the rows of a tensor that it keeps, so no rank holds the model. Names and layouts of a file are those
that transformers knows: its conversions (for example from one tensor per expert to one per layer) are applied to the
tensors that make one parameter. Experts are read by expert; other conversions need the whole tensors of one parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from types import EllipsisType
from typing import Any, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from rljob.trainer import model_directory
from rljob.trainer.errors import ModelError
from rljob.trainer.process_group import World

Conversions: TypeAlias = list[WeightTransform]
"""transformers' conversions from the names and layouts of files to those of the model."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. Indexing ``content`` reads these rows and no others."""

    content: Any
    shape: tuple[int, ...]


@dataclass
class _Sources:
    """The tensors of the files that make one parameter or buffer; with a converter possibly several."""

    converter: WeightConverter | None
    by_pattern: dict[str, list[tuple[str, StoredTensor]]] = field(default_factory=dict)


def meta_model(source: Path) -> tuple[PreTrainedModel, Conversions]:
    """Return the model of a Hugging Face directory on the meta device, in float32, and the conversions of its weights.

    Raises:
        ModelError: the directory has no causal language model that can be trained.
    """
    found = list(model_directory.problems(source))
    if found:
        raise ModelError("; ".join(found))
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        if getattr(config, "quantization_config", None):
            raise ModelError(
                f"{source} is quantized (quantization_config in config.json); give the model without quantization"
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError as error:
        raise ModelError(f"{source} cannot be loaded ({str(error).splitlines()[0]}); take another model") from error
    model.eval()  # no dropout: the trained policy must be the sampled policy
    return model, get_model_conversion_mapping(model)  # before fully_shard, which changes the names of classes


def read_weights(
    model: PreTrainedModel,
    conversions: Conversions,
    source: Path,
    world: World,
    added: Collection[str] = (),
) -> None:
    """Allocate the sharded parameters of a meta model on the device and read this rank's rows; all ranks take part.

    Args:
        model: from :func:`meta_model`, after ``fully_shard`` or, on one rank, without it.
        conversions: of the model.
        source: Hugging Face directory.
        world: the ranks.
        added: names of parameters that are not the model's own; they are allocated only, and not read.

    Raises:
        ModelError: the weights do not fit the model or cannot be read; raised on all ranks.
    """
    model.to_empty(device=world.device)
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model.tie_weights()  # to_empty() keeps the identity of sharded parameters only
    problem: ModelError | None = None
    try:
        with ExitStack() as files, torch.no_grad():
            _Reader(model, source, added).read(open_tensors(source, files), conversions)
    except ModelError as error:
        problem = error
    except (OSError, SafetensorError) as error:
        problem = ModelError(f"{source}: the weights cannot be read ({error}); copy them again")
    world.raise_first_error(problem)
    _initialize_buffers(model, source)


def read_rows(stored: StoredTensor, rows: slice | EllipsisType) -> Tensor:
    """Read rows of a tensor, in the type of the file."""
    content: Tensor = stored.content[rows]
    return content


def local_rows(parameter: Tensor) -> slice:
    """Return the rows of a parameter that this rank keeps."""
    if not isinstance(parameter, DTensor):
        return slice(0, len(parameter))
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])


def open_tensors(source: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name; nothing is read yet."""
    stored: dict[str, StoredTensor] = {}
    for path in model_directory.weight_files(source):
        if path.suffix == ".safetensors":
            stored |= open_safetensors(path, files)
        else:
            stored |= {name: StoredTensor(tensor, tuple(tensor.shape)) for name, tensor in _unpickled(path).items()}
    return stored


def open_safetensors(path: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name; nothing is read yet.

    Raises:
        OSError: the file cannot be opened.
        SafetensorError: the file is damaged.
    """
    opened = files.enter_context(safe_open(path, "pt"))
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - safe_open is no mapping
    return {name: StoredTensor(content, tuple(content.get_shape())) for name, content in slices.items()}


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of torch.save; their content is read from the disk when it is used."""
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path} cannot be read ({reason}); save the model as safetensors") from None
    return tensors


class _Reader:
    """Reads tensors of files into the parameters and persistent buffers of a model."""

    def __init__(self, model: PreTrainedModel, source: Path, added: Collection[str]) -> None:
        self._model, self._source = model, source
        state = model.state_dict(keep_vars=True)
        self._state: dict[str, Tensor] = {name: tensor for name, tensor in state.items() if name not in added}
        self._added = added
        self._read: dict[int, str] = {}  # id of a parameter or buffer → its name

    def read(self, stored: Mapping[str, StoredTensor], conversions: Conversions) -> None:
        """Read everything; see :func:`read_weights`."""
        targets, unexpected = self._match(stored, conversions)
        mismatched = [name for name, sources in targets.items() if not self._fits(name, sources)]
        self._refuse("mismatched keys", mismatched)
        for name, sources in targets.items():
            if sources.converter is None:
                (((_, tensor),),) = sources.by_pattern.values()
                self._fill(name, partial(read_rows, tensor))
            else:
                self._convert(name, sources)
        missing = {name for name, target in self._state.items() if id(target) not in self._read}
        report = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set())
        self._model._adjust_missing_and_unexpected_keys(report)  # transformers knows keys that it ignores
        parameters = {name for name in missing if isinstance(self._state[name], torch.nn.Parameter)}
        self._refuse("missing keys", report.missing_keys | parameters)
        self._refuse("unexpected keys", report.unexpected_keys)

    def _refuse(self, problem: str, found: set[str] | Sequence[str]) -> None:
        if found:
            names = ", ".join(sorted(found)[:3])
            raise ModelError(f"{self._source}: {problem} ({names}); the weights do not fit config.json")

    def _match(
        self, stored: Mapping[str, StoredTensor], conversions: Conversions
    ) -> tuple[dict[str, _Sources], list[str]]:
        """Return the sources of each name of the model, and the tensors that the model does not have.

        The rules are those of transformers' ``convert_and_load_state_dict_in_model``.
        """
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = self._model.base_model_prefix
        targets: dict[str, _Sources] = {}
        unexpected = []
        for key in sorted(stored, key=dot_natural_key):  # experts in the order of their numbers
            name, pattern = rename_source_key(key, renamings, converters, prefix, self._state)
            if name not in self._state and key in self._state:
                name, pattern = rename_source_key(key, [], [], prefix, self._state)
            if name in self._added:
                continue
            if name not in self._state or (pattern is None and name in targets):
                unexpected.append(name)
                continue
            converter = None if pattern is None else by_pattern[pattern]
            sources = targets.setdefault(name, _Sources(converter))
            sources.by_pattern.setdefault(pattern or key, []).append((key, stored[key]))
        return targets, unexpected

    def _fits(self, name: str, sources: _Sources) -> bool:
        """Return whether the shapes fit; the result of a converter is compared after the conversion."""
        shape = tuple(self._state[name].shape)
        if sources.converter is None:
            return all(tensor.shape == shape for found in sources.by_pattern.values() for _, tensor in found)
        return not _by_expert(sources.converter) or all(len(found) == shape[0] for found in sources.by_pattern.values())

    def _convert(self, name: str, sources: _Sources) -> None:
        """Read the tensors of a converter, convert them, and fill the parameters that they make."""
        assert sources.converter is not None
        converter = copy.deepcopy(sources.converter)
        own = slice(None)
        if by_expert := _by_expert(converter):
            own = local_rows(self._state[name])
            self._mark(name)
            if own.start == own.stop:
                return
        for pattern, found in sources.by_pattern.items():
            for key, tensor in found[own]:
                converter.add_tensor(name, key, pattern, cast(Any, partial(read_rows, tensor, ...)))
        try:
            converted = converter.convert(name, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError) as error:  # of the conversion's operations: the shapes do not fit
            reason = str(error).splitlines()[0]
            raise ModelError(f"{self._source}: {name} cannot be converted ({reason}); save the model again") from None
        for made, value in converted.items():
            tensor = value[0] if isinstance(value, list) else value
            if by_expert:
                target = self._state[made]
                local = target.to_local() if isinstance(target, DTensor) else target
                self._refuse("mismatched keys", [] if local.shape == tensor.shape else [made])
                local.copy_(tensor)
            elif made in self._state:
                self._refuse("mismatched keys", [] if self._state[made].shape == tensor.shape else [made])
                self._fill(made, tensor.__getitem__)
            else:
                self._refuse("unexpected keys", [made])

    def _fill(self, name: str, read: Callable[[slice | EllipsisType], Tensor]) -> None:
        """Fill a parameter or buffer with its rows of a whole tensor."""
        target = self._state[name]
        rows: slice | EllipsisType = ...
        local = target
        if isinstance(target, DTensor):
            rows, local = local_rows(target), target.to_local()
        if local.numel():
            content = read(rows)
            if (other := self._read.get(id(target))) and not torch.equal(content.to(local), local):
                raise ModelError(
                    f"{self._source}: {name} and {other} differ where config.json says that they are one tensor; "
                    "set tie_word_embeddings to false in config.json"
                )
            local.copy_(content)
        self._mark(name)

    def _mark(self, name: str) -> None:
        target = self._state[name]
        self._read[id(target)] = name
        target._is_hf_initialized = True  # type: ignore[attr-defined] # transformers' initialization leaves it


def _by_expert(converter: WeightConverter) -> bool:
    """Return whether row i of the converter's result depends on the tensors of expert i only."""
    merge, *rest = converter.operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
    )


def _initialize_buffers(model: PreTrainedModel, source: Path) -> None:
    """Compute the buffers that no file holds, for example the frequencies of rotary embeddings, as transformers does.

    Raises:
        ModelError: transformers computes them when a model is constructed, not when it is loaded.
    """
    empty = {name: buffer for name, buffer in _buffers(model) if not hasattr(buffer, "_is_hf_initialized")}
    model.initialize_weights()
    for name, buffer in _buffers(model):
        if empty.get(name) is buffer and buffer._version == 0 and buffer.numel():
            raise ModelError(f"{source}: transformers does not compute the buffer {name}; take another model")


def _buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return model.named_buffers(remove_duplicate=False)

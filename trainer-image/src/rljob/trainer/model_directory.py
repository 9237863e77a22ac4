"""Checks whether a Hugging Face directory has a trainable model, without importing torch or loading weights."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rljob.protocol.checkpoint_files import WEIGHTS_FILE, index_name

PICKLED = "pytorch_model.bin"  # the content of pickled weights is not checked here
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def problems(directory: Path) -> Iterator[str]:
    """Yield one sentence for each problem that prevents loading a model, without the name of the field."""
    try:
        configuration = json.loads((directory / "config.json").read_bytes())
        if not isinstance(configuration, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        yield f"{directory} holds no Hugging Face model (config.json is missing); give a directory that does"
        return
    except (OSError, ValueError) as error:
        yield f"{directory / 'config.json'} cannot be read ({error}); save the model again"
        return
    kind = configuration.get("model_type")
    if kind not in known_kinds():
        yield (
            f"{directory / 'config.json'}: model_type {kind!r} is not a causal language model of the "
            "installed transformers; choose another model"
        )
        return
    try:
        files = [path for path in weight_files(directory) if path.suffix == ".safetensors"]
        shapes = {name: shape for path in files for name, shape in _shapes(path)}
    except (OSError, ValueError) as error:
        yield str(error)
        return
    yield from _misfits(directory, configuration.get("text_config") or configuration, shapes)


def known_kinds() -> set[str]:
    """Return each model_type that AutoModelForCausalLM supports, read from transformers' source.

    Importing transformers, and torch with it, takes seconds.
    """
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    _, _, rest = source.read_text().partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict(")
    table, _, _ = rest.partition("\n)")
    return set(re.findall(r'^\s+\("([^"]+)", ', table, re.MULTILINE))


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a model's weights: those of an index if there is one, as vLLM does; safetensors first.

    Raises:
        ValueError: there are no weights, or the index of several files cannot be read.
    """
    for single in (WEIGHTS_FILE, PICKLED):
        if (directory / index_name(single)).exists():
            return _indexed(directory, index_name(single))
        if (directory / single).exists():
            return [directory / single]
    raise ValueError(f"{directory} holds no weights ({WEIGHTS_FILE} is missing); give a directory that does")


def _indexed(directory: Path, index: str) -> list[Path]:
    try:
        files = json.loads((directory / index).read_bytes())["weight_map"].values()
        return [directory / name for name in sorted(set(files))]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{directory / index} cannot be read; copy it again") from None


def _shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    try:
        with safe_open(path, "np") as file:  # opening the file compares its length with its header
            for name in file.keys():  # noqa: SIM118 - safe_open does not return a mapping
                yield name, file.get_slice(name).get_shape()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; copy the whole model") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}); copy it again") from None


def _misfits(directory: Path, configuration: dict[str, Any], shapes: dict[str, list[int]]) -> Iterator[str]:
    """Yield differences between the weights and config.json in the names and sizes that most model families share."""
    advice = "the weights are of another model than config.json; save both together"
    vocabulary, width = configuration.get("vocab_size"), configuration.get("hidden_size")
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and None not in (vocabulary, width) and shape != [vocabulary, width]:
            yield f"{directory}: {name} is {shape} where config.json says {[vocabulary, width]}: {advice}"
    layers = {int(match[1]) for name in shapes if (match := _LAYER.search(name))}
    expected = configuration.get("num_hidden_layers")
    if layers and expected is not None and len(layers) < expected:
        yield f"{directory}: there are weights of {len(layers)} layers where config.json says {expected}: {advice}"

"""Where configuration values come from, and how a mistake in one is said in a sentence.

YAML is composed to nodes first, so that every key keeps its line; environment variables and keyword arguments are
laid over it. The models that give the values their meaning are in `config.py`.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from int4moe_ipex.errors import ConfigError

KeyPath = tuple[str | int, ...]
PREFIX = "INT4MOE_"
# Variables of this project that are not configuration keys.
OTHER_VARIABLES = ("INT4MOE_CONFIG", "INT4MOE_MAX_ISA", "INT4MOE_CHECKPOINTS", "INT4MOE_CACHE", "INT4MOE_TUNE_FILE")


class Impossible(ValueError):
    """Values that are valid each and contradict each other; `path` is the key to point at, within its section."""

    def __init__(self, sentence: str, *path: str | int):
        super().__init__(sentence)
        self.path: KeyPath = path


@dataclass
class Layer:
    """Values of one source: nested plain data, and a word for people on where each key stands (`file:line`)."""

    data: dict[str, Any]
    name: str
    marks: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """The place of `path`, or of the nearest enclosing key that has one."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return self.name


def dotted(path: KeyPath) -> str:
    """`("rules", 0, "backend")` as `rules[0].backend`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


# --------------------------------------------------------------------------------------------------------- sources


def read_yaml(file: Path) -> Layer:
    """One YAML file with the line of every key.

    Raises:
        ConfigError: no such file, not YAML, a key given twice, or something else than a mapping at the top.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file}: the configuration cannot be read: {reason}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text) if root is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: this is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: this is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{file}: a value is nested too deep") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file}:1: a configuration is a mapping of keys to values, not a {_kind(data)}")
    marks: dict[KeyPath, str] = {}
    try:
        for path, line in () if root is None else _walk(root, (), file):
            marks[path] = f"{file}:{line}"
    except RecursionError:
        raise ConfigError(f"{file}: a value holds itself, or is nested too deep") from None
    return Layer(data, str(file), marks)


def _walk(node: yaml.Node, path: KeyPath, file: Path) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{file}:{line}: a key must be a word, not a {key.id}")
            if key.value in seen:
                raise ConfigError(
                    f"{file}:{line}: {dotted((*path, key.value))} is given twice (first in line {seen[key.value]})"
                )
            seen[key.value] = line
            yield (*path, key.value), line
            yield from _walk(value, (*path, key.value), file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _walk(value, (*path, index), file)


def from_mapping(data: Mapping[str, Any], name: str) -> Layer:
    """A layer of plain Python values; keys whose value is None are left out (an option that was not given)."""
    plain = {key: value for key, value in data.items() if value is not None}
    return Layer(plain, name, {(key,): f"{name} {key}" for key in plain})


def from_environment(model: type[BaseModel], environ: Mapping[str, str]) -> Layer:
    """`INT4MOE_<KEY>`, with the key's path in capitals and `_` for `.`; values are read as YAML scalars.

    An empty variable counts as not set.

    Raises:
        ConfigError: a value that is not a YAML scalar or list.
    """
    layer = Layer({}, "environment")
    for variable, path in variables(model).items():
        text = environ.get(variable, "")
        if not text:
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"{variable}={text!r}: this is not a YAML value") from None
        # A path or a name such as `12` or `on` is text wherever the key takes text alone.
        if _text_only(_annotation(model, path)):
            value = text
        target = layer.data
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value
        layer.marks[path] = variable
    return layer


def variables(model: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """Environment variable -> key path, for every key that is not a list of sections."""
    return {PREFIX + "_".join(path).upper(): path for path in leaves(model)}


def unknown_variables(model: type[BaseModel], environ: Mapping[str, str]) -> list[str]:
    """One sentence for each INT4MOE_ variable that nothing here reads but that looks like a mistyped one."""
    known = [*variables(model), *OTHER_VARIABLES]
    found = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
            if near:
                found.append(f"environment variable {variable} has no effect; did you mean {near[0]}?")
    return found


def leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every plain key, sections entered, lists of sections left out."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, (*prefix, name))
        elif not _holds_sections(inner):
            yield (*prefix, name)


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: sections are merged key by key, everything else (lists too) is replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


# -------------------------------------------------------------------------------------------------------- mistakes


def sentences(error: ValidationError, model: type[BaseModel], layers: Iterable[Layer]) -> list[str]:
    """Each mistake once, as `place: what is wrong`, with the nearest known key or the values that are allowed."""
    ordered = list(layers)
    found: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        path = _known_path(model, item["loc"], item["type"] == "extra_forbidden")
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, Impossible):
            path += cause.path
        if path in found:
            continue
        present = path[:-1] if item["type"] == "missing" else path
        layer = next((layer for layer in reversed(ordered) if holds(layer.data, present)), ordered[-1])
        place = layer.where(path)
        if item["type"] == "extra_forbidden":
            found[path] = f"{place}: {_unknown_key(model, path)}"
        elif item["type"] == "missing":
            found[path] = f"{place}: {dotted(path)} is missing"
        elif item["type"] in ("value_error", "assertion_error"):
            found[path] = f"{place}: {cause}"
        else:
            info = _field(model, path)
            wanted = f"must be {expectation(info)}" if info is not None else item["msg"]
            found[path] = f"{place}: {dotted(path)} {wanted}, not {_shown(item['input'])}"
    return list(found.values())


def expectation(info: FieldInfo) -> str:
    """What a key takes, in words: `auto or a whole number of at least 1`."""
    return _words(info.annotation, info.metadata)


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(args[0], [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])])
    if origin is Literal:
        return _either([str(value) for value in args])
    if origin in (typing.Union, types.UnionType):
        return _either([_words(arg, metadata) for arg in args])
    if origin is tuple:
        return f"a list of {_words(args[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section of keys"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    word = names.get(annotation, str(annotation))
    if annotation in (int, float):
        limits = [(getattr(m, a), t) for m in metadata for a, t in _LIMITS.items() if getattr(m, a, None) is not None]
        if limits:
            word += " " + " and ".join(f"{text} {value:g}" for value, text in limits)
    return word


_LIMITS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


def _either(words: list[str]) -> str:
    flat = list(dict.fromkeys(words))
    return flat[0] if len(flat) == 1 else f"{', '.join(flat[:-1])} or {flat[-1]}"


def _unknown_key(model: type[BaseModel], path: KeyPath) -> str:
    parent = _section(model, path[:-1])
    names = list(parent.model_fields) if parent is not None else []
    near = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.6)
    if near:
        return f"unknown key {dotted(path)}; did you mean {dotted((*path[:-1], near[0]))}?"
    elsewhere = [p for p in leaves(model) if p[-1] == path[-1]]
    if elsewhere:
        return f"unknown key {dotted(path)}; did you mean {dotted(elsewhere[0])}?"
    return f"unknown key {dotted(path)}; known here: {', '.join(names)}"


def _known_path(model: type[BaseModel], loc: tuple[Any, ...], extra: bool) -> KeyPath:
    """pydantic's loc without the tags it adds for the members of a union."""
    path: list[str | int] = []
    where: Any = model
    for part in loc:
        if isinstance(where, type) and issubclass(where, BaseModel):
            if part not in where.model_fields:
                if extra:
                    path.append(part)
                break
            path.append(part)
            where = where.model_fields[part].annotation
        elif isinstance(part, int) and typing.get_origin(where) is tuple:
            path.append(part)
            where = typing.get_args(where)[0]
        else:
            break
    return tuple(path)


def _section(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    where = _annotation(model, path)
    return where if isinstance(where, type) and issubclass(where, BaseModel) else None


def _annotation(model: type[BaseModel], path: KeyPath) -> Any:
    where: Any = model
    for part in path:
        where = typing.get_args(where)[0] if isinstance(part, int) else where.model_fields[part].annotation
    return where


def _field(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    names = [part for part in path if isinstance(part, str)]
    if not names:
        return None
    if isinstance(path[-1], int):
        return FieldInfo(annotation=_annotation(model, path))
    parent = _section(model, path[:-1])
    return parent.model_fields.get(names[-1]) if parent is not None else None


def _holds_sections(annotation: Any) -> bool:
    args = typing.get_args(annotation)
    return any(isinstance(arg, type) and issubclass(arg, BaseModel) for arg in args)


def _text_only(annotation: Any) -> bool:
    parts = typing.get_args(annotation) or (annotation,)
    return str in parts and all(part in (str, type(None)) for part in parts)


def holds(data: Any, path: KeyPath) -> bool:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = "null" if value is None else f"a {_kind(value)}" if isinstance(value, Mapping | list) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return {dict: "mapping", list: "list", str: "text", int: "number", float: "number"}.get(
        type(value), type(value).__name__
    )

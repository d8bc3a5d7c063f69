"""What the labels say: raw quantization configs to one scheme per module.

All name matching of all tools lives here, each tool by its own rule:

| tool | list | rule |
|---|---|---|
| GPTQ (gptqmodel) | `dynamic` | first match wins; `-:` skips, `+:` or nothing overrides; `re.match` or exact name |
| GPTQ (optimum) | `modules_in_block_to_quantize` | quantized only if one entry is a substring of the name |
| AWQ | `modules_to_not_convert` | substring |
| compressed-tensors | `ignore`, `targets` | exact name, `re:` + `re.match`, class name, in this order of rank |
| AutoRound | `block_name_to_quantize`, `extra_config` | prefix of the name; exact name, else `re.search` |

A label never decides whether a module is quantized: the stored tensors do (`formats.describe`). It gives bits, group
size, sign and zero convention, and where it disagrees with the tensors that is reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from int4moe_ipex.checkpoint.refuse import refuse_method, refuse_unless_plain_int
from int4moe_ipex.errors import FormatError, UnsupportedFormatError

SUPPORTED_BITS = (4, 8)


@dataclass(frozen=True)
class ModuleScheme:
    """What the labels say of one module that they call quantized.

    Attributes:
        bits: 4 or 8.
        group_size: columns per scale; -1 means one group per row.
        symmetric: every zero point is the middle of the range; None when the label is silent.
        strategy: group, channel or tensor.
        source: the label, for messages, e.g. `quantization_config` or `config_groups.group_0`.
    """

    bits: int
    group_size: int
    symmetric: bool | None
    strategy: str = "group"
    source: str = "quantization_config"


class Matcher(Protocol):
    def __call__(self, name: str) -> ModuleScheme | None: ...


@dataclass(frozen=True)
class QuantizationScheme:
    """The quantization config of a checkpoint, understood.

    Attributes:
        method: quant_method as labelled: gptq, awq, compressed-tensors or auto-round.
        layout: how tensors are packed: gptq, awq or compressed-tensors.
        zeros: GPTQ layout only: v1 (stored minus one), v2 (stored as is), or None when the label does not say.
        module: name -> what the labels say of it, None where they say it is not quantized.
        default: what holds for a module of which the labels do not speak.
        warnings: one line each.
    """

    method: str
    layout: str
    zeros: str | None
    module: Matcher
    default: ModuleScheme | None
    warnings: tuple[str, ...] = field(default=())


def parse(quantization: dict[str, Any]) -> QuantizationScheme:
    """Understands a raw quantization config.

    Raises:
        UnsupportedFormatError: the format is known and out of scope; the message says what to do instead.
        FormatError: a key has a value that no tool writes.
    """
    method = str(quantization.get("quant_method") or "").lower()
    refuse_method(method, quantization)
    if method in ("auto-round", "intel/auto-round", "auto_round"):
        return _parse_auto_round(quantization)
    if method == "gptq":
        return _parse_gptq(quantization)
    if method == "awq":
        return _parse_awq(quantization)
    if method == "compressed-tensors":
        return _parse_compressed_tensors(quantization)
    if not method:
        raise FormatError("the quantization config names no quant_method, so its tensors cannot be understood")
    raise UnsupportedFormatError(
        f"quant_method {method!r} is not known; supported are gptq, awq, compressed-tensors and auto-round"
    )


def _integer(config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        if config.get(key) is not None:
            value = config[key]
            if isinstance(value, bool) or not isinstance(value, int):
                raise FormatError(f"quantization config: {key} is {value!r}, not an integer")
            return value
    raise FormatError(f"quantization config: has no {keys[0]}")


def _bits(config: dict[str, Any], *keys: str) -> int:
    bits = _integer(config, *keys)
    if bits not in SUPPORTED_BITS:
        raise UnsupportedFormatError(
            f"{bits}-bit weights are out of scope; take a 4-bit checkpoint (8-bit modules may be mixed in)"
        )
    return bits


def _group_size(config: dict[str, Any], *keys: str) -> int:
    size = _integer(config, *keys)
    if size != -1 and size < 1:
        raise FormatError(f"quantization config: group_size is {size}; it is -1 or at least 1")
    return size


def _optional_bool(config: dict[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise FormatError(f"quantization config: {key} is {value!r}, not true or false")
    return value


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise FormatError(f"quantization config: {where} {text!r} is not a regular expression: {error}") from error


def _override(base: ModuleScheme, config: dict[str, Any], source: str) -> ModuleScheme:
    bits = _bits(config, "bits") if config.get("bits") is not None else base.bits
    group_size = _group_size(config, "group_size") if config.get("group_size") is not None else base.group_size
    symmetric = _optional_bool(config, "sym") if config.get("sym") is not None else base.symmetric
    return replace(base, bits=bits, group_size=group_size, symmetric=symmetric, source=source)


# GPTQ ---------------------------------------------------------------------------------------------------------------


def _parse_gptq(config: dict[str, Any]) -> QuantizationScheme:
    warnings = []
    label = config.get("checkpoint_format") or config.get("format")
    other = config.get("format")
    if label and other and str(label).lower() != str(other).lower():
        warnings.append(f"checkpoint_format is {label!r} but format is {other!r}; the former is used")
    layout = str(label or "gptq").lower()
    refuse_unless_plain_int(config, layout)
    zeros = {"gptq": "v1", "gptq_v2": "v2"}[layout]
    default = ModuleScheme(
        bits=_bits(config, "bits"),
        group_size=_group_size(config, "group_size"),
        symmetric=_optional_bool(config, "sym"),
    )
    match = _gptq_matcher(config, default)
    return QuantizationScheme("gptq", "gptq", zeros, match, default, tuple(warnings))


def _gptq_matcher(config: dict[str, Any], default: ModuleScheme) -> Matcher:
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise FormatError("quantization config: dynamic is not an object of pattern -> overrides")
    rules: list[tuple[str, re.Pattern[str], ModuleScheme | None]] = []
    for key, overrides in dynamic.items():
        skip = key.startswith("-:")
        text = key[2:] if key.startswith(("-:", "+:")) else key
        if not skip and not isinstance(overrides, dict):
            raise FormatError(f"quantization config: dynamic[{key!r}] is {overrides!r}, not an object")
        scheme = None if skip else _override(default, overrides, f"dynamic[{key!r}]")
        rules.append((text, _pattern(text, "dynamic pattern"), scheme))
    only = _flatten(config.get("modules_in_block_to_quantize") or [])

    def match(name: str) -> ModuleScheme | None:
        for text, pattern, scheme in rules:
            if name == text or pattern.match(name):
                return scheme
        if only and not any(entry in name for entry in only):
            return None
        return default

    return match


def _flatten(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entry.strip() for entry in entries.split(",") if entry.strip()]
    if not isinstance(entries, (list, tuple)):
        raise FormatError(f"quantization config: {entries!r} stands where module names are expected")
    return [name for entry in entries for name in _flatten(entry)]


def _names(config: dict[str, Any], key: str) -> list[str]:
    names = config.get(key) or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"quantization config: {key} is {names!r}, not a list of names")
    return names


# AWQ ----------------------------------------------------------------------------------------------------------------


def _parse_awq(config: dict[str, Any]) -> QuantizationScheme:
    layout = str(config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm").lower()
    refuse_unless_plain_int(config, layout)
    zero_point = _optional_bool(config, "zero_point")
    default = ModuleScheme(
        bits=_bits(config, "bits", "w_bit"),
        group_size=_group_size(config, "group_size", "q_group_size"),
        symmetric=None if zero_point is None else not zero_point,
    )
    if default.bits != 4:
        raise UnsupportedFormatError(f"AWQ with {default.bits} bits does not exist as gemm; take a 4-bit checkpoint")
    skipped = _flatten(config.get("modules_to_not_convert") or [])

    def match(name: str) -> ModuleScheme | None:
        return None if any(entry in name for entry in skipped) else default

    return QuantizationScheme("awq", "awq", None, match, default)


# AutoRound ----------------------------------------------------------------------------------------------------------

AUTO_ROUND_PACKING = {
    "auto_round:auto_gptq": ("gptq", "v1"),
    "auto_round:gptq": ("gptq", "v1"),
    "auto_round:gptqmodel": ("gptq", "v2"),
    "auto_round": ("gptq", "v2"),
    "auto_round:auto_awq": ("awq", None),
    "auto_round:awq": ("awq", None),
    "auto_round:llm_compressor": ("compressed-tensors", None),
    # Written before packing_format existed: the zero convention is unknown, so only symmetric files can be read.
    "": ("gptq", None),
    "auto": ("gptq", None),
}


def _parse_auto_round(config: dict[str, Any]) -> QuantizationScheme:
    packing = str(config.get("packing_format") or "").lower()
    refuse_unless_plain_int(config, packing)
    if packing not in AUTO_ROUND_PACKING:
        raise UnsupportedFormatError(
            f"AutoRound packing_format {packing!r} is out of scope; export the model again with format auto_round"
        )
    layout, zeros = AUTO_ROUND_PACKING[packing]
    if layout == "compressed-tensors" and config.get("config_groups"):
        return replace(_parse_compressed_tensors(config), method="auto-round")
    default = ModuleScheme(
        bits=_bits(config, "bits"),
        group_size=_group_size(config, "group_size"),
        symmetric=_optional_bool(config, "sym"),
    )
    match = _auto_round_matcher(config, default)
    return QuantizationScheme("auto-round", layout, zeros, match, default)


def _auto_round_matcher(config: dict[str, Any], default: ModuleScheme) -> Matcher:
    blocks = _flatten(config.get("block_name_to_quantize") or config.get("to_quant_block_names") or [])
    skipped = _flatten(config.get("modules_to_not_convert") or [])
    extra = config.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(value, dict) for value in extra.values()):
        raise FormatError("quantization config: extra_config is not an object of name -> overrides")

    def scheme_of(key: str) -> ModuleScheme | None:
        overrides = extra[key]
        bits = overrides.get("bits")
        if isinstance(bits, int) and bits >= 16:
            return None
        refuse_unless_plain_int({"quant_method": "auto-round", **overrides}, "auto_round")
        return _override(default, overrides, f"extra_config[{key!r}]")

    exact = {key: scheme_of(key) for key, value in extra.items() if value}
    patterns = []
    for key, scheme in exact.items():
        try:
            patterns.append((re.compile(key), scheme))
        except re.error:  # a name that is no pattern; AutoRound passes over it too
            continue

    def match(name: str) -> ModuleScheme | None:
        if name in exact:
            return exact[name]
        for pattern, scheme in patterns:
            if pattern.search(name):
                return scheme
        if blocks and not any(name.startswith(block) for block in blocks):
            return None
        return None if any(entry in name for entry in skipped) else default

    return match


# compressed-tensors -------------------------------------------------------------------------------------------------

PACK_QUANTIZED = "pack-quantized"
STRATEGIES = ("group", "channel", "tensor")


def _parse_compressed_tensors(config: dict[str, Any]) -> QuantizationScheme:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise FormatError("quantization config: compressed-tensors without config_groups")
    refuse_unless_plain_int(config, str(config.get("format") or PACK_QUANTIZED).lower())
    warnings = []
    if config.get("kv_cache_scheme"):
        warnings.append("kv_cache_scheme is ignored: the key-value cache stays in the activations' dtype")
    schemes: list[ModuleScheme] = []
    ranked: list[tuple[int, str, re.Pattern[str] | None, ModuleScheme]] = []
    for group_name, group in groups.items():
        scheme = _ct_group(config, group_name, group)
        if scheme is None:
            continue
        schemes.append(scheme)
        for target in _names(group, "targets"):
            ranked.append(_ct_target(target, scheme))
    ranked.sort(key=lambda entry: (entry[0], entry[1]))
    exact_ignore, ignore = _ct_ignore(_names(config, "ignore"))

    def match(name: str) -> ModuleScheme | None:
        if name in exact_ignore or any(pattern.match(name) for pattern in ignore):
            return None
        for rank, target, pattern, scheme in ranked:
            if rank == CLASS_RANK or name == target or (pattern is not None and pattern.match(name)):
                return scheme
        return None

    default = schemes[0] if len(set(schemes)) == 1 else None
    return QuantizationScheme("compressed-tensors", "compressed-tensors", None, match, default, tuple(warnings))


def _ct_group(config: dict[str, Any], group_name: str, group: Any) -> ModuleScheme | None:
    source = f"config_groups.{group_name}"
    if not isinstance(group, dict):
        raise FormatError(f"quantization config: {source} is not an object")
    weights = group.get("weights")
    layout = str(group.get("format") or config.get("format") or PACK_QUANTIZED).lower()
    refuse_unless_plain_int({"quant_method": "compressed-tensors", **group}, layout, source)
    if weights is None:
        return None
    if not isinstance(weights, dict):
        raise FormatError(f"quantization config: {source}.weights is not an object")
    strategy = str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")).lower()
    if weights.get("type", "int") != "int" or strategy not in STRATEGIES:
        raise UnsupportedFormatError(
            f"{source}: weights of type {weights.get('type')!r} with strategy {strategy!r} are out of scope; "
            "take a checkpoint with 4-bit integer weights in groups, channels or tensors"
        )
    group_size = _group_size(weights, "group_size") if strategy == "group" else -1
    symmetric = _optional_bool(weights, "symmetric")
    # compressed-tensors' own default when the key is absent.
    symmetric = True if symmetric is None else symmetric
    return ModuleScheme(_bits(weights, "num_bits"), group_size, symmetric, strategy, source)


# Exact names outrank regular expressions, which outrank classes; within a rank the order is alphabetical. A target
# with neither dot nor `re:` that starts with a capital is a class; files do not tell classes, so it fits any linear.
EXACT_RANK, PATTERN_RANK, CLASS_RANK = 0, 1, 2


def _ct_target(target: str, scheme: ModuleScheme) -> tuple[int, str, re.Pattern[str] | None, ModuleScheme]:
    if target.startswith("re:"):
        return PATTERN_RANK, target, _pattern(target[3:], "target"), scheme
    if target[:1].isupper() and "." not in target:
        return CLASS_RANK, target, None, scheme
    return EXACT_RANK, target, None, scheme


def _ct_ignore(entries: list[str]) -> tuple[set[str], list[re.Pattern[str]]]:
    patterns = [_pattern(entry[3:], "ignore") for entry in entries if entry.startswith("re:")]
    return {entry for entry in entries if not entry.startswith("re:")}, patterns

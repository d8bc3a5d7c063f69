"""Writes a synthetic INT4 checkpoint: a real model's shapes and tensor names, random codes, sane scales.

The weights mean nothing, but every byte is where the format puts it, activations stay finite and the router
spreads tokens, so that loading, memory and speed are those of the real checkpoint. Tensors are made and
written one shard at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from int4moe_ipex.errors import ConfigError
from int4moe_ipex.models.families import FAMILIES, Family

FORMATS = ("gptq", "awq", "compressed-tensors")
CODE_STD = math.sqrt((16**2 - 1) / 12)  # of a uniform 4-bit code


@dataclass(frozen=True)
class Scheme:
    """How the linears are quantized.

    Attributes:
        format: gptq, awq (gemm) or compressed-tensors (pack-quantized).
        group_size: columns per group, or -1 for one group per row.
        asym: random zero points of 6..9 in place of 8.
        act_order: groups over a random order of the columns, shared by gate and up of one expert.
        head: quantize the language model's head as well.
    """

    format: str = "gptq"
    group_size: int = 128
    asym: bool = False
    act_order: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"unknown format {self.format!r}; known: {', '.join(FORMATS)}")
        if self.group_size != -1 and self.group_size < 1:
            raise ConfigError(f"group_size must be -1 or positive, not {self.group_size}")
        if self.format == "awq" and self.act_order:
            raise ConfigError("the awq format has no act-order")
        if self.format == "awq" and self.head:
            raise ConfigError("awq checkpoints keep the head at 16 bits")

    def quantization_config(self, ignore: list[str]) -> dict:
        """The config.json entry that the format's own tool writes; `ignore` names the linears left dense."""
        if self.format == "gptq":
            return {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": self.group_size,
                "desc_act": self.act_order,
                "sym": not self.asym,
                "checkpoint_format": "gptq",
                "lm_head": self.head,
                "pack_dtype": "int32",
            }
        if self.format == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": ignore,
            }
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": not self.asym,
            "strategy": "channel" if self.group_size == -1 else "group",
            "group_size": None if self.group_size == -1 else self.group_size,
            "actorder": "group" if self.act_order else None,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None},
            },
            "ignore": ignore,
        }


class _Source:
    """Random tensors from one seeded stream."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype

    def words(self, *shape: int) -> torch.Tensor:
        """int32 with every bit random: eight uniform codes each, whatever the packing order."""
        return torch.from_numpy(self.rng.integers(-(2**31), 2**31, shape, dtype=np.int32))

    def scales(self, k: int, gain: float, *shape: int) -> torch.Tensor:
        """float16, such that a row of K weights has norm `gain`."""
        mean = gain / (CODE_STD * math.sqrt(k))
        return torch.from_numpy(self.rng.uniform(0.75 * mean, 1.25 * mean, shape).astype(np.float16))

    def zeros(self, minus: int, *shape: int) -> torch.Tensor:
        """int32 words of eight random zero points 6..9 less `minus`; their order within a word does not matter."""
        words = np.zeros(shape, np.uint32)
        for nibble in range(8):
            words |= self.rng.integers(6 - minus, 10 - minus, shape, dtype=np.uint32) << np.uint32(4 * nibble)
        return torch.from_numpy(words.view(np.int32))

    def normal(self, std: float, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype)
        for rows in tensor.split(4096):  # an embedding in float32 would be the largest thing in memory
            rows.copy_(torch.from_numpy(self.rng.standard_normal(rows.shape, dtype=np.float32)).mul_(std))
        return tensor

    def groups(self, k: int, group_size: int) -> torch.Tensor:
        """int32 [K]: the group of each column, columns in random order."""
        return torch.from_numpy(self.rng.permutation(k).astype(np.int32) // np.int32(group_size))


def _linear(source: _Source, scheme: Scheme, name: str, n: int, k: int, gain: float, g_idx: torch.Tensor | None):
    """Yields (tensor name, tensor) of one quantized linear [N, K]."""
    group = k if scheme.group_size == -1 else scheme.group_size
    if n % 8 or k % 8:
        raise ConfigError(f"{name}: {n} x {k} cannot be packed by eights")
    groups = -(-k // group)
    if scheme.format == "compressed-tensors":
        yield f"{name}.weight_packed", source.words(n, k // 8)
        yield f"{name}.weight_scale", source.scales(k, gain, n, groups).to(source.dtype)
        yield f"{name}.weight_shape", torch.tensor([n, k], dtype=torch.int64)
        if scheme.asym:
            yield f"{name}.weight_zero_point", source.zeros(0, n // 8, groups)
        if g_idx is not None:
            yield f"{name}.weight_g_idx", g_idx
        return
    if scheme.format == "awq":
        yield f"{name}.qweight", source.words(k, n // 8)
        yield f"{name}.qzeros", source.zeros(0, groups, n // 8) if scheme.asym else _filled(0x88888888, groups, n // 8)
        yield f"{name}.scales", source.scales(k, gain, groups, n)
        return
    yield f"{name}.qweight", source.words(k // 8, n)
    yield f"{name}.qzeros", source.zeros(1, groups, n // 8) if scheme.asym else _filled(0x77777777, groups, n // 8)
    yield f"{name}.scales", source.scales(k, gain, groups, n)
    yield f"{name}.g_idx", torch.arange(k, dtype=torch.int32) // group if g_idx is None else g_idx


def _filled(word: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.full(shape, word, np.uint32).view(np.int32))


def _dense_gain(name: str, layers: int) -> float:
    """Row norms keep the residual stream near unit size: what adds to it is divided by sqrt(2 layers)."""
    adds = name.endswith(("o_proj", "out_proj", "down_proj", "w2"))
    return 1 / math.sqrt(2 * layers) if adds else 1.0


def _tensors(
    model: torch.nn.Module, family: Family, scheme: Scheme, source: _Source
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, in the order of the model's modules, under its published name."""
    layers = model.config.num_hidden_layers
    quantized = set(_quantized_linears(model, scheme))

    def order(k: int) -> torch.Tensor | None:
        group = k if scheme.group_size == -1 else scheme.group_size
        return source.groups(k, group) if scheme.act_order else None

    for key, meta in model.state_dict().items():
        module, _, leaf = key.rpartition(".")
        stored = family.checkpoint_names(key)[0]
        if leaf == "gate_up_proj" and meta.dim() == 3:
            num_experts, double, hidden = meta.shape
            intermediate = double // 2
            gate, up, down = family.projections[0]
            for expert in range(num_experts):
                prefix = f"{family.checkpoint_names(module)[0]}.{expert}"
                shared, own = order(hidden), order(intermediate)
                yield from _linear(source, scheme, f"{prefix}.{gate}", intermediate, hidden, 1.0, shared)
                again = None if shared is None else shared.clone()  # safetensors refuses two names for one memory
                yield from _linear(source, scheme, f"{prefix}.{up}", intermediate, hidden, 1.0, again)
                gain = _dense_gain("down_proj", layers)
                yield from _linear(source, scheme, f"{prefix}.{down}", hidden, intermediate, gain, own)
        elif leaf == "down_proj" and meta.dim() == 3:
            continue
        elif leaf == "weight" and module in quantized:
            n, k = meta.shape
            name = stored.removesuffix(".weight")
            yield from _linear(source, scheme, name, n, k, _dense_gain(module, layers), order(k))
        elif meta.dim() == 1:
            yield stored, _vector(model, module, leaf, meta.shape).to(source.dtype)
        else:
            std = 0.02 if "embed" in key else 1 / math.sqrt(meta.shape[-1])
            yield stored, source.normal(std, *meta.shape)


def _vector(model: torch.nn.Module, module: str, leaf: str, shape: torch.Size) -> torch.Tensor:
    """A norm's weight, a bias or a module's own vector as transformers initialises it: some norms are about zero."""
    owner = model.get_submodule(module)
    own = dict(owner.named_parameters(recurse=False))
    if leaf not in own or any(tensor.dim() > 1 for tensor in own.values()):
        return torch.zeros(shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        owner.to_empty(device="cpu", recurse=False)
        model._init_weights(owner)
    return owner.get_parameter(leaf).detach()


def _quantized_linears(model: torch.nn.Module, scheme: Scheme) -> Iterator[str]:
    """The linears outside the routed experts that int4 checkpoints quantize: all but gates, and the head on request."""
    dense = r"(^|\.)(gate|wg|router|shared_expert_gate|in_proj_(ba|b|a)%s)$" % ("" if scheme.head else "|lm_head")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not re.search(dense, name):
            yield name


def _dense_modules(model: torch.nn.Module, family: Family, scheme: Scheme) -> list[str]:
    """Routers, gates and the head where they are not quantized, by their names in the checkpoint."""
    quantized = set(_quantized_linears(model, scheme))
    return [
        family.checkpoint_names(name)[0]
        for name, module in model.named_modules()
        if name not in quantized
        and not isinstance(module, torch.nn.Embedding)
        and getattr(module._parameters.get("weight"), "ndim", 0) == 2
    ]


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level tokenizer without merges; ids beyond the bytes are filler words, so that any id decodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0}
    for token in alphabet[: vocab_size - 1]:
        vocab[token] = len(vocab)
    for index in range(len(vocab), vocab_size):
        vocab[f"Ġw{index}"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": None}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


class _Shards:
    """Collects tensors and writes a file whenever they pass shard_bytes, then the index."""

    def __init__(self, path: Path, shard_bytes: int):
        self.path, self.shard_bytes = path, shard_bytes
        self.pending: dict[str, torch.Tensor] = {}
        self.pending_bytes = self.total = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.pending[name] = tensor.contiguous()
        self.pending_bytes += tensor.nbytes
        if self.pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        save_file(self.pending, self.path / f"part-{len(self.files)}.safetensors", metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.total += self.pending_bytes
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> None:
        self.flush()
        weight_map, count = {}, len(self.files)
        for index, names in enumerate(self.files):
            final = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self.path / f"part-{index}.safetensors").rename(self.path / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_checkpoint(
    path: str | Path,
    config: dict,
    scheme: Scheme,
    *,
    layers: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 256 << 20,
    overwrite: bool = False,
) -> int:
    """Writes config.json, tokenizer and safetensors shards (with an index when there are several).

    Args:
        config: `model_type` and the fields of that model's config, e.g. `shapes.model_config(name)`.
        layers: number of layers in place of the config's; at least one of them must hold experts.
        dtype: of the tensors that are not quantized (and of compressed-tensors' scales).
        shard_bytes: a shard is closed when it holds this many bytes; about twice that is the peak memory.

    Returns:
        Bytes of all tensors.

    Raises:
        ConfigError: the folder holds a model already, or the shape cannot be packed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    if not overwrite and path.exists() and any(path.glob("*.safetensors")):
        raise ConfigError(f"{path} already holds safetensors files")
    fields = dict(config)
    if layers is not None:
        fields["num_hidden_layers"] = layers
        if "first_k_dense_replace" in fields:
            fields["first_k_dense_replace"] = min(fields["first_k_dense_replace"], max(layers - 1, 0))
    model_type = fields.pop("model_type")
    family = FAMILIES[model_type]
    if family.clamped:
        raise ConfigError(f"experts of {model_type} are measured as a layer alone, not written as a checkpoint")
    hf_config = AutoConfig.for_model(family.config_type or model_type, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    path.mkdir(parents=True, exist_ok=True)
    for stale in (*path.glob("*.safetensors"), *path.glob("*.index.json")):
        stale.unlink()
    written = hf_config.to_dict() | {"model_type": model_type, "architectures": [type(model).__name__]}
    written["dtype"] = str(dtype).removeprefix("torch.")
    written["quantization_config"] = scheme.quantization_config(_dense_modules(model, family, scheme))
    shards = _Shards(path, shard_bytes)
    for name, tensor in _tensors(model, family, scheme, _Source(seed, dtype)):
        shards.add(name, tensor)
    shards.close()
    _write_tokenizer(path, hf_config.vocab_size)
    (path / "config.json").write_text(json.dumps(written, indent=2))
    return shards.total

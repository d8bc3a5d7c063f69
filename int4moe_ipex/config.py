"""The configuration of a deployment: one YAML file, read into frozen and strict models.

What wins, from weakest to strongest: built-in defaults, the file (the argument, else `INT4MOE_CONFIG`), environment
variables (`INT4MOE_BACKEND`, `INT4MOE_THREADS_COUNT`, ...), keyword arguments and command-line options.
`int4moe config show --origin` prints where each value came from.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from int4moe_ipex import config_sources as sources
from int4moe_ipex.config_sources import Impossible
from int4moe_ipex.errors import ConfigError

if TYPE_CHECKING:
    from int4moe_ipex.backends.base import RunConfig

BackendName = Literal["auto", "native", "ipex", "onednn", "torch", "reference"]
IsaName = Literal["auto", "scalar", "avx2", "avx2_vnni", "avx512", "amx"]
ComputeName = Literal["w4a16", "w4a8"]
DtypeName = Literal["bfloat16", "float16", "float32"]

WITHOUT_W4A8 = ("torch", "reference")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class Threads(Section):
    """Threads of one process, and where they and the weights' memory live."""

    count: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Threads of the OpenMP pool; auto leaves torch's choice (the cores of the process)."
    )
    cpus: str | None = Field(
        None, description="CPUs that the process may run on, such as 0-31,64-95; null leaves them as they are."
    )
    numa_node: Literal["none"] | Annotated[int, Field(ge=0)] = Field(
        "none", description="Run on the CPUs of this NUMA node and take memory from it; none binds nothing."
    )
    memory: Literal["default", "interleave"] = Field(
        "default", description="interleave spreads memory over all NUMA nodes (one process on several sockets)."
    )

    @model_validator(mode="after")
    def _possible(self) -> Threads:
        if self.cpus is not None:
            try:
                parse_cpus(self.cpus)
            except ValueError as error:
                raise Impossible(str(error), "cpus") from None
        if self.numa_node != "none" and self.cpus is not None:
            raise Impossible("threads.numa_node and threads.cpus both say where to run; give one of them", "cpus")
        if self.numa_node != "none" and self.memory == "interleave":
            raise Impossible("threads.memory interleave contradicts threads.numa_node, which uses one node", "memory")
        return self


class Rule(Section):
    """What differs for the modules that `match` names. Keys that are left out keep the value of the file's top."""

    match: str = Field(description="Glob on the module's name, such as model.layers.*.mlp.experts; * crosses dots.")
    backend: BackendName | None = Field(None, description="Engine for these modules.")
    isa: IsaName | None = Field(None, description="Instruction set for these modules.")
    compute: ComputeName | None = Field(None, description="w4a16 or w4a8 for these modules.")
    min_tokens: int = Field(0, ge=0, description="Applies from this number of tokens per expert (rows, in a linear).")
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Applies up to this number of tokens per expert; null means any."
    )

    @model_validator(mode="after")
    def _possible(self) -> Rule:
        if not self.match.strip():
            raise Impossible("a rule's match is empty and would name no module; use * for all", "match")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise Impossible(
                f"the rule for {self.match} has min_tokens {self.min_tokens} above max_tokens {self.max_tokens}",
                "min_tokens",
            )
        if self.backend is self.isa is self.compute is None:
            raise Impossible(f"the rule for {self.match} changes nothing; give it a backend, an isa or a compute")
        return self

    def covers(self, other: Rule) -> bool:
        """Whether this rule, standing before `other`, leaves nothing to it."""
        last, other_last = (r.max_tokens or float("inf") for r in (self, other))
        tokens = self.min_tokens <= other.min_tokens and last >= other_last
        return tokens and (self.match in ("*", other.match))


class Store(Section):
    """Prepacked weights on disk, written by `int4moe convert`."""

    path: str | None = Field(None, description="Folder of the store; null packs the checkpoint at every start.")
    placement: Literal["mmap", "copy"] = Field(
        "mmap", description="mmap opens at once and shares pages between processes; copy reads into huge pages."
    )


class Generation(Section):
    """Defaults of generate and serve; a request's own values win."""

    max_new_tokens: int = Field(128, ge=1, description="New tokens, at most.")
    do_sample: bool = Field(False, description="false is greedy: the same text every time.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; used with do_sample alone.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the distribution that is sampled from.")
    top_k: int = Field(50, ge=0, description="Tokens that are sampled from; 0 means all.")
    repetition_penalty: float = Field(1.0, gt=0, description="Above 1 discourages tokens that are there already.")
    seed: Annotated[int, Field(ge=0)] | None = Field(None, description="Seed of sampling; null draws a new one.")

    @model_validator(mode="after")
    def _possible(self) -> Generation:
        for name in ("temperature", "top_p"):
            if not self.do_sample and getattr(self, name) != 1.0:
                raise Impossible(f"generation.{name} has no effect while generation.do_sample is false", name)
        return self


class Serve(Section):
    """Bounds of `int4moe serve`."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 means every interface.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    model_name: str | None = Field(None, description="The model's name in answers; null takes the checkpoint folder's.")
    chat_template: str | None = Field(
        None, description="Jinja file with the chat template; null takes the checkpoint's own."
    )
    max_running: int = Field(1, ge=1, le=256, description="Requests that are computed together, token by token.")
    max_queue: int = Field(64, ge=0, description="Requests that wait; one more gets 429.")
    max_context: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Prompt and new tokens together, at most; auto takes the model's own limit."
    )
    drain_seconds: float = Field(
        30.0, ge=0, le=86400, description="Time that requests get to finish after a stop signal."
    )


class OneDnn(Section):
    """The oneDNN library of the onednn backend."""

    lib: str | None = Field(None, description="Path of libdnnl.so; null looks in the environment and the system.")


@dataclass(frozen=True)
class ModuleConfig:
    """What the configuration says about one module, within a range of tokens per expert (rows, in a linear).

    rule is the index of the rule that applies, or None when the top of the file does.
    """

    name: str
    backend: str
    run: RunConfig
    min_tokens: int = 0
    max_tokens: int | None = None
    on_unsupported: str = "error"
    rule: int | None = None

    @property
    def forced(self) -> bool:
        return self.backend != "auto"


class Config(Section):
    """Everything that a deployment can set. `load` is the way to make one."""

    version: Literal[1] = Field(1, description="Version of this file's grammar.")
    backend: BackendName = Field("auto", description="Engine; auto takes the first row of the table that fits.")
    isa: IsaName = Field("auto", description="Instruction set to use; one that this CPU lacks is an error.")
    compute: ComputeName = Field(
        "w4a16", description="w4a16 keeps activations as they are; w4a8 makes them int8 per token: faster, less exact."
    )
    dtype: DtypeName = Field("bfloat16", description="Type of the activations and of all that is not int4.")
    bfloat16_weights: Literal["compact", "plain"] = Field(
        "compact",
        description="compact also keeps large bfloat16 linears, such as heads, in 12 bits, exactly, which few tokens "
        "read faster; plain saves that memory (three quarters of such a weight).",
    )
    on_unsupported: Literal["error", "fallback"] = Field(
        "error", description="What a forced backend, isa or compute does where it cannot run: error, or the next row."
    )
    threads: Threads = Field(default_factory=Threads, description="Threads and NUMA binding.")
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = Field(
        (), description="Exceptions by module name and tokens per expert; the first that matches wins."
    )
    store: Store = Field(default_factory=Store, description="Prepacked store.")
    generation: Generation = Field(default_factory=Generation, description="Generation defaults.")
    serve: Serve = Field(default_factory=Serve, description="Bounds of the server.")
    onednn: OneDnn = Field(default_factory=OneDnn, description="Where oneDNN is.")
    expert_parallel: int = Field(1, ge=1, description="Processes that share the experts; 1 is the only value so far.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.expert_parallel != 1:
            raise Impossible("expert_parallel above 1 is not implemented in this release", "expert_parallel")
        if self.on_unsupported == "error":
            _check_compute(self.backend, self.compute, "compute" if "compute" in self.model_fields_set else "backend")
            for index, rule in enumerate(self.rules):
                _check_compute(rule.backend or self.backend, rule.compute or self.compute, "rules", index)
        for index, rule in enumerate(self.rules):
            before = next((i for i in range(index) if self.rules[i].covers(rule)), None)
            if before is not None:
                raise Impossible(
                    f"rules[{index}] ({rule.match}) can never apply: rules[{before}] "
                    f"({self.rules[before].match}) stands before it and matches the same",
                    "rules",
                    index,
                )
        return self

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Config:
        """Reads a configuration and lays environment variables and keyword arguments over it.

        Args:
            source: a YAML file; the name of one in `configs/` (`avx512`); plain values; a Config, which is taken as
                it is, without a second look at the environment; or None for the file that INT4MOE_CONFIG names,
                else the defaults.
            environ: used in place of os.environ.
            overrides: top-level keys; a section takes a dict (`threads={"count": 8}`), a rule list replaces the
                file's. None means not given.

        Raises:
            ConfigError: each mistake in a sentence naming file and line (or variable, or argument), the key, and the
                nearest key or the values that are allowed.
        """
        environ = os.environ if environ is None else environ
        arguments = sources.from_mapping(overrides, "argument")
        if isinstance(source, Config):
            if not overrides:
                return source
            base = sources.Layer(source.model_dump(exclude_unset=True), "config")
            base.marks = {_path(key): place for key, place in source._origins.items()}
            layers = [base, arguments]
        else:
            if source is None:
                source = environ.get("INT4MOE_CONFIG") or None
            if source is None:
                file = sources.Layer({}, "defaults")
            elif isinstance(source, Mapping):
                file = sources.from_mapping(source, "argument")
            else:
                file = sources.read_yaml(find(source))
            layers = [file, sources.from_environment(cls, environ), arguments]
        data: dict[str, Any] = {}
        for layer in layers:
            data = sources.merge(data, layer.data)
        try:
            config = cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError("\n".join(sources.sentences(error, cls, layers))) from None
        for path in sources.leaves(cls):
            layer = next((layer for layer in reversed(layers) if sources.holds(layer.data, path)), None)
            config._origins[".".join(path)] = layer.where(path) if layer is not None else "default"
        rules = next((layer for layer in reversed(layers) if "rules" in layer.data), None)
        config._origins["rules"] = rules.where(("rules",)) if rules is not None else "default"
        return config

    def origins(self) -> dict[str, str]:
        """Dotted key -> `default`, `FILE:LINE`, an environment variable's name, or `argument KEY`."""
        return dict(self._origins)

    def bands(self, name: str) -> tuple[ModuleConfig, ...]:
        """What holds for module `name` from 0 tokens per expert on: ranges in order, without gap or overlap."""
        matching = [(i, rule) for i, rule in enumerate(self.rules) if fnmatch.fnmatchcase(name, rule.match)]
        starts = {0}
        for _, rule in matching:
            starts.add(rule.min_tokens)
            if rule.max_tokens is not None:
                starts.add(rule.max_tokens + 1)
        edges = sorted(starts)
        found: list[ModuleConfig] = []
        for start, end in zip(edges, [*(e - 1 for e in edges[1:]), None]):
            first = next(
                ((i, r) for i, r in matching if r.min_tokens <= start and (r.max_tokens or start) >= start), None
            )
            if found and found[-1].rule == (first[0] if first else None):
                start = found.pop().min_tokens
            found.append(self._module(name, first, start, end))
        return tuple(found)

    def for_module(self, name: str, tokens: int = 1) -> ModuleConfig:
        """The range of `bands(name)` that holds at `tokens` per expert."""
        return next(b for b in self.bands(name) if b.max_tokens is None or tokens <= b.max_tokens)

    def _module(self, name: str, match: tuple[int, Rule] | None, start: int, end: int | None) -> ModuleConfig:
        import torch

        from int4moe_ipex.backends.base import RunConfig

        index, rule = match if match is not None else (None, None)
        run = RunConfig(
            isa=(rule.isa if rule else None) or self.isa,
            compute=(rule.compute if rule else None) or self.compute,
            dtype=getattr(torch, self.dtype),
        )
        backend = (rule.backend if rule else None) or self.backend
        return ModuleConfig(name, backend, run, start, end, self.on_unsupported, index)


def _check_compute(backend: str, compute: str, *path: str | int) -> None:
    if backend in WITHOUT_W4A8 and compute == "w4a8":
        sentence = f"backend {backend} has no w4a8; use compute w4a16, or backend auto or native"
        raise Impossible(sentence, *path)


def _path(key: str) -> sources.KeyPath:
    return tuple(key.split("."))


MOST_CPUS = 1 << 20  # more than any kernel has


def parse_cpus(text: str) -> set[int]:
    """`0-3,8` as {0, 1, 2, 3, 8}, the notation of Linux's cpulists.

    Raises:
        ValueError: another notation.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or (last and int(last) < int(first)):
            raise ValueError(f"threads.cpus is a list such as 0-31,64-95, not {text!r}")
        if int(last or first) > MOST_CPUS:
            raise ValueError(f"threads.cpus: there is no CPU {last or first}")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def shipped() -> dict[str, Path]:
    """The files of `configs/` by name: beside the package when installed, else in the source tree."""
    here = Path(__file__).resolve().parent
    for folder in (here / "configs", here.parent / "configs"):
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return {}


def find(source: str | Path) -> Path:
    """The file that `source` means: a path, or the bare name of a shipped configuration.

    Raises:
        ConfigError: neither; the message lists the shipped names.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    names = shipped()
    if str(source) in names:
        return names[str(source)]
    raise ConfigError(f"{source}: no such configuration file, nor one of those shipped: {', '.join(names)}")


def json_schema() -> dict[str, Any]:
    """JSON schema of the file, for editors; contradictions between keys are beyond it and found by `load` alone."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "int4moe configuration"}

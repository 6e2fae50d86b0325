"""From a YAML file and `key=value` overrides to a checked `RunConfig`, and back to a file with its hash.

Every problem of a file is reported at once, each with its file, key, line and fix. YAML is read in its plain core form:
`true` and `false` are the only booleans (`kl_guard: off` is the text "off"), `1e-5` is a number, and aliases and tags
are refused.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from writer_rl.configs.errors import InputError
from writer_rl.configs.schema import RunConfig

CONFIG_DIR = Path(__file__).resolve().parent
MAX_CONFIG_BYTES = 1_000_000
_MAX_DEPTH = 8
_FLOAT = re.compile(
    r"[-+]?(?:\d[\d_]*\.\d*|\.\d+)(?:[eE][-+]?\d+)?$|[-+]?\d[\d_]*[eE][-+]?\d+$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


class ConfigError(InputError):
    """All problems of one configuration, one line each.

    Args:
        problems: At least one problem, in the order in which they are printed.
    """

    def __init__(self, problems: Sequence[InputError]) -> None:
        ValueError.__init__(self, "\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
        self.where, self.what, self.fix = problems[0].where, problems[0].what, problems[0].fix


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML's core schema: no yes/no/on/off, no dates, no octal or base-60 numbers."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][\d_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes texts which `_Loader` would read as numbers."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check one run configuration.

    Args:
        path: A YAML file, or the bare name of a packaged one (``demo`` for ``configs/demo.yaml``).
        overrides: ``"section.key=value"`` texts, applied in order; the value is read as YAML.

    Returns:
        The frozen configuration.

    Raises:
        InputError: The file cannot be read or holds problems; the message lists all of them.

    Example:
        >>> load_config("demo", ["grpo.beta=0.05"]).grpo.beta
        0.05
    """
    source = resolve_config_path(path)
    reading = _Reading(name=str(path) if Path(path) == source else source.name)
    content = reading.parse_file(_read_text(source))
    for override in overrides:
        reading.apply_override(content, override)
    config: RunConfig | None = None
    try:  # JSON keeps strict typing (no "16" for 16) while lists still become tuples
        config = RunConfig.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        reading.add_validation_errors(error)
    if reading.problems or config is None:
        raise ConfigError(reading.sorted_problems())
    return config


def resolve_config_path(path: str | Path) -> Path:
    """Find the file behind a path or the bare name of a packaged configuration.

    Args:
        path: What the user typed.

    Returns:
        An existing regular file.

    Raises:
        InputError: There is no such file; names the nearest one.
    """
    given = Path(path)
    packaged = sorted(file.stem for file in CONFIG_DIR.glob("*.yaml"))
    bare = len(given.parts) == 1 and given.suffix not in (".yaml", ".yml")
    if given.is_file():
        return given
    if bare and f"{given}" in packaged:
        return CONFIG_DIR / f"{given}.yaml"
    if given.is_dir():
        raise InputError(str(path), "this is a directory", "name the YAML file inside it")
    if bare:
        near = difflib.get_close_matches(str(path), packaged, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(
            str(path) or "configuration",
            "there is no such file and no packaged configuration of that name",
            f"{hint}packaged: {', '.join(packaged) or 'none'}; or give the path of a YAML file",
        )
    siblings = [file.name for file in given.parent.glob("*.y*ml")] if given.parent.is_dir() else []
    near = difflib.get_close_matches(given.name, siblings, n=1)
    raise InputError(str(path), "no such file", f"did you mean {given.parent / near[0]}?" if near else "check the path")


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the resolved values, the same whatever file, order or overrides they came from.

    Args:
        config: A checked configuration.

    Returns:
        64 hexadecimal digits.
    """
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def dump_resolved(config: RunConfig, directory: str | Path) -> str:
    """Write every value of a configuration to ``<directory>/config.yaml``, from which `load_config` makes an equal one.

    Args:
        config: A checked configuration.
        directory: Folder of the run; made if absent. The file appears whole or not at all.

    Returns:
        The configuration's hash, which is also the file's first line.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    digest = config_hash(config)
    body = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    staged = folder / f".config.yaml.{os.getpid()}.tmp"
    staged.write_text(f"# resolved configuration, sha256 {digest}\n{body}", encoding="utf-8")
    os.replace(staged, folder / "config.yaml")
    return digest


def known_keys() -> dict[str, bool]:
    """Every dotted name a configuration may hold.

    Returns:
        Dotted name → True if it is a section (holds further keys), False if it is a value.
    """
    return dict(_walk_schema(RunConfig, ""))


def _walk_schema(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, bool]]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        section = isinstance(kind, type) and issubclass(kind, BaseModel)
        yield f"{prefix}{name}", section
        if section:
            yield from _walk_schema(typing.cast(type[BaseModel], kind), f"{prefix}{name}.")


def _read_text(source: Path) -> str:
    try:
        raw = source.read_bytes()
    except OSError as error:
        raise InputError(str(source), f"cannot be read ({error.strerror})", "check its permissions") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise InputError(str(source), f"{len(raw)} bytes is no configuration", "name a YAML file of this program")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(
            f"{source}: line {line}", f"byte 0x{raw[error.start]:02x} is not UTF-8", "save the file as UTF-8"
        ) from None


@dataclass
class _Reading:
    """One reading of a configuration: where each key came from, and what is wrong so far."""

    name: str
    problems: list[InputError] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    overridden: dict[str, str] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)
    known: dict[str, bool] = field(default_factory=known_keys)

    def parse_file(self, text: str) -> dict[str, object]:
        """Mapping of the file's known keys; problems that leave other keys readable are noted, others raise."""
        try:
            loader = _Loader(text)
            root = loader.get_single_node()
            if root is None:
                raise InputError(
                    self.name, "the file is empty", "write at least `name: my-run`; every other key has a default"
                )
            if not isinstance(root, yaml.MappingNode):
                raise InputError(
                    f"{self.name}: line {root.start_mark.line + 1}",
                    f"the top of the file is {_node_kind(root)}",
                    "write `key: value` lines, for example `name: my-run`",
                )
            return self._mapping(loader, root, "", set())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.name}: line {mark.line + 1}, column {mark.column + 1}" if mark else self.name
            raise InputError(where, f"not valid YAML ({error.problem})", _yaml_fix(str(error.problem))) from None
        except yaml.YAMLError as error:  # a control character
            raise InputError(self.name, f"not valid YAML ({str(error).splitlines()[0]})", "remove it") from None
        except RecursionError:
            raise InputError(self.name, "nested too deeply", "a configuration has at most three levels") from None

    def apply_override(self, content: dict[str, object], override: str) -> None:
        """Set one ``a.b=c`` in `content`, or note why it cannot be set."""
        where = f"override {override!r}"
        dotted, equals, text = override.partition("=")
        dotted = dotted.strip()
        if not equals or not dotted:
            fix = "write key=value, for example grpo.num_updates=5"
            self.problems.append(InputError(where, "is not of the form key=value", fix))
            return
        if dotted not in self.known:
            self.problems.append(InputError(where, f"unknown key {dotted!r}", self._suggest(dotted)))
            return
        try:
            loader = _Loader(text)
            node = loader.get_single_node() if text.strip() else yaml.ScalarNode("tag:yaml.org,2002:str", "")
            if node is None:  # nothing but a comment
                node = yaml.ScalarNode("tag:yaml.org,2002:str", text)
        except (yaml.YAMLError, RecursionError) as error:
            what = getattr(error, "problem", None) or str(error).splitlines()[0]
            self.problems.append(InputError(where, f"the value is not valid YAML ({what})", "put the value in quotes"))
            return
        self.overridden[dotted] = override
        value = self._value(loader, node, dotted, set())
        *parents, last = dotted.split(".")
        target = content
        for parent in parents:
            child = target.get(parent)
            if not isinstance(child, dict):
                child = target[parent] = {}
            target = child
        target[last] = value

    def add_validation_errors(self, error: ValidationError) -> None:
        """Translate pydantic's errors; the branches of one union count as one problem."""
        grouped: dict[str, list[typing.Any]] = {}
        for item in error.errors(include_url=False):
            grouped.setdefault(self._dotted(item["loc"]).split("[")[0], []).append(item)
        for base, items in grouped.items():
            if base not in self.noted:
                what, fix = _explain(items)
                self.problems.append(InputError(self._where(self._dotted(items[0]["loc"]), about=what), what, fix))

    def sorted_problems(self) -> list[InputError]:
        """Problems of the file by line, then those of overrides."""

        def line(problem: InputError) -> float:
            found = re.search(r"\bline (\d+)", problem.where)
            return float(found.group(1)) if found else math.inf

        return sorted(self.problems, key=line)

    def _mapping(self, loader: _Loader, node: yaml.MappingNode, prefix: str, seen: set[int]) -> dict[str, object]:
        content: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key, str):
                where = f"{self.name}: line {line}"
                self.problems.append(InputError(where, f"a key is {_node_kind(key_node)}", "use a plain name as key"))
                continue
            dotted = f"{prefix}{key}"
            if dotted not in self.known:
                override = self.overridden.get(prefix[:-1])
                where = f"override {override!r}" if override else f"{self.name}: {dotted} (line {line})"
                what = f"unknown key {dotted!r}" if override else "unknown key"
                self.problems.append(InputError(where, what, self._suggest(dotted)))
                continue
            if key in content:
                where = f"{self.name}: {dotted} (line {line})"
                what = f"given twice, first on line {self.lines.get(dotted, line)}"
                self.problems.append(InputError(where, what, "keep one of the two"))
                continue
            if prefix[:-1] not in self.overridden:
                self.lines[dotted] = line
            content[key] = self._value(loader, value_node, dotted, seen)
        return content

    def _value(self, loader: _Loader, node: yaml.Node, dotted: str, seen: set[int]) -> object:
        if id(node) in seen:
            self._note(dotted, "refers to another value by a YAML alias", "write the value out")
            return None
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode) and self.known.get(dotted):
            return self._mapping(loader, node, f"{dotted}.", seen)
        if isinstance(node, yaml.SequenceNode):
            if dotted.count("[") >= _MAX_DEPTH:
                self._note(dotted, "is nested too deeply", "give a flat list")
                return None
            return [self._value(loader, child, f"{dotted}[{i}]", seen) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return {"mapping": len(node.value)}  # refused by its field's type, whatever it holds
        if self.known.get(dotted) and node.tag.endswith(":null"):
            return {}  # a section whose keys are all commented out
        if node.tag not in {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")}:
            self._note(dotted, f"carries the YAML tag {node.tag!r}", "remove the tag")
            return None
        try:
            value = loader.construct_object(node)
        except (ValueError, yaml.YAMLError):
            self._note(dotted, f"cannot be read as a value: {node.value!r}", "put it in quotes")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self._note(dotted, f"is {node.value}", "give a finite number")
            return None
        return value

    def _note(self, dotted: str, what: str, fix: str) -> None:
        self.noted.add(dotted.split("[")[0])
        self.problems.append(InputError(self._where(dotted), what, fix))

    def _dotted(self, location: Sequence[str | int]) -> str:
        """Dotted name of a pydantic location, without the names of union branches."""
        dotted = ""
        for part in location:
            if isinstance(part, int):
                dotted += f"[{part}]"
            elif (candidate := f"{dotted}.{part}" if dotted else part) in self.known:
                dotted = candidate
        return dotted

    def _where(self, dotted: str, about: str = "") -> str:
        """Source and position of a key; a cross-field check takes the line of the first key that its text names."""
        base = dotted.split("[")[0]
        if base in self.overridden:
            return f"override {self.overridden[base]!r}"
        where = f"{self.name}: {dotted}" if dotted else self.name
        prefix = f"{base}." if base else ""
        named = [
            self.lines[key] for word in re.findall(r"[a-z_][\w.]*\w", about) if (key := prefix + word) in self.lines
        ]
        line = next(iter(named), self.lines.get(base))
        if line is not None:
            where += f" (line {line})"
        inside = [text for key, text in self.overridden.items() if key.startswith(prefix)]
        if inside and (not base or self.known.get(base)):
            where += f" (with {', '.join(inside)})"
        return where

    def _suggest(self, dotted: str) -> str:
        section, _, leaf = dotted.rpartition(".")
        if self.known.get(section) is False:
            return f"{section} takes a single value; write {section}=VALUE"
        values = [key for key, is_section in self.known.items() if not is_section]
        near = [key for key in self.known if key.rpartition(".")[2] == leaf][:3]
        near = near or difflib.get_close_matches(dotted, values, n=1, cutoff=0.75)
        if not near:
            by_leaf = {key.rpartition(".")[2]: key for key in reversed(self.known)}
            near = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
        if near:
            return f"did you mean {' or '.join(near)}?"
        keys = [key for key in self.known if key.rpartition(".")[0] == section]
        keys = keys or [key for key in self.known if "." not in key]
        return f"known here: {', '.join(keys)}"


def _node_kind(node: yaml.Node) -> str:
    return {"MappingNode": "a mapping", "SequenceNode": "a list"}.get(
        type(node).__name__, f"the single value {node.value!r}"
    )


def _yaml_fix(problem: str) -> str:
    if "\\t" in problem or "cannot start any token" in problem:
        return "indent with spaces, and quote a value that starts with a special character"
    if "another document" in problem:
        return "keep one document per file"
    if "alias" in problem or "anchor" in problem:
        return "write the value out instead of using * and &"
    return "check indentation, colons, brackets and quotes on this line and the one above"


_WANTED = {
    "int_type": "give a whole number",
    "int_from_float": "give a whole number",
    "float_type": "give a number",
    "bool_type": "give true or false",
    "string_type": "give a text, in quotes if it looks like a number",
    "tuple_type": "give a list, for example [1, 2]",
    "missing": "give every element of the list",
    "too_long": "give fewer elements",
    "too_short": "give more elements",
    "string_pattern_mismatch": "use only letters, digits, dot, underscore and dash",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "of at most"),
}


def _explain(items: Sequence[typing.Any]) -> tuple[str, str]:
    """What is wrong and what to do, for the errors of one key (several if its type is a union)."""
    first, kinds = items[0], {item["type"]: item for item in items}
    if "value_error" in kinds:
        what, _, fix = str(kinds["value_error"]["ctx"]["error"]).rpartition("; ")
        return what or fix, fix if what else "change one of the values named"
    shown = f"is {_shorten(first['input'])}" if first["type"] != "missing" else "has too few elements"
    fixes = []
    for kind, item in kinds.items():
        if kind == "literal_error":
            choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
            near = difflib.get_close_matches(str(item["input"]), choices, n=1)
            hint = f"did you mean {near[0]}? " if near and len(choices) > 1 else ""
            fixes.append(f"{hint}use {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}")
        elif kind in _BOUNDS:
            key, words = _BOUNDS[kind]
            fixes.append(f"give a value {words} {item['ctx'][key]:g}")
        elif kind in ("model_type", "model_attributes_type", "dict_type"):
            fixes.append("write its keys indented below it")
        else:
            fixes.append(_WANTED.get(kind, str(item["msg"])))
    return shown, ", or ".join(dict.fromkeys(fixes))


def _shorten(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

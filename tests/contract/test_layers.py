"""The house rules a machine can check: layers, torch-free rooms, packaging, every packaged configuration."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from writer_rl.configs.load import CONFIG_DIR, load_config

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("configs", "data", "rewards", "rollouts", "trainer")
HEAVY = ("accelerate", "datasets", "deepspeed", "peft", "torch", "transformers", "trl", "vllm")


def python_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_roots(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add("." if node.level else str(node.module).split(".")[0])
    return roots


def test_import_linter_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 3 kept, 0 broken" in " ".join(done.stdout.split())


def test_configs_import_only_the_standard_library_pydantic_and_yaml() -> None:
    allowed = set(sys.stdlib_module_names) | {"pydantic", "yaml", "writer_rl"}
    for path in python_files("configs"):
        assert imported_roots(path) <= allowed, path.relative_to(ROOT)


@pytest.mark.parametrize("room", ROOMS)
def test_no_bare_or_relative_imports_and_silent_packages(room: str) -> None:
    for path in python_files(room):
        assert not imported_roots(path) & {".", *ROOMS}, f"{path.relative_to(ROOT)} imports outside the namespace"
        if path.name == "__init__.py":
            assert not path.read_text(encoding="utf-8").strip(), f"{path.relative_to(ROOT)} must be empty"


def test_torch_free_rooms_and_the_command_line_load_nothing_heavy() -> None:
    """In a fresh interpreter, whatever this one has loaded already."""
    names = [
        ".".join(("writer_rl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for room in ("configs", "data", "rewards")
        for path in python_files(room)
    ]
    names += ["writer_rl.trainer.main", "writer_rl.trainer.cli", "writer_rl.trainer.score"]
    code = f"""
import importlib, json, sys
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps(sorted({{module.split(".")[0] for module in sys.modules}} & set({HEAVY!r}))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_every_folder_with_code_is_packaged_and_typed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {
        ".".join(("writer_rl", *path.parent.relative_to(ROOT).parts)) for room in ROOMS for path in python_files(room)
    }
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == {f"writer_rl.{room}": room for room in ROOMS}
    for room in ROOMS:
        link = ROOT / ".typing" / "writer_rl" / room
        assert link.is_symlink()
        assert link.resolve() == ROOT / room
    spec = importlib.util.find_spec("writer_rl")
    assert spec is not None
    assert spec.origin is None, "writer_rl must stay a namespace without __init__.py"


def test_code_and_notes_are_not_ignored_by_git() -> None:
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert not {"data", "data/", "/data/", "checkpoints", "checkpoints/", "/checkpoints/"} & set(lines)
    assert "!/checkpoints/README.md" in lines


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_packaged_configuration_loads(path: Path) -> None:
    assert load_config(path) == load_config(path.stem)


@pytest.mark.parametrize("name", ["cpu", "ddp", "zero2", "zero3"])
def test_every_launcher_file_loads(name: str) -> None:
    settings = yaml.safe_load((CONFIG_DIR / "accelerate" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert settings["num_processes"] >= 1
    if name.startswith("zero"):
        stage = json.loads((CONFIG_DIR / "deepspeed" / f"{name}.json").read_text(encoding="utf-8"))
        assert stage["zero_optimization"]["stage"] == int(name[-1])
        assert settings["deepspeed_config"]["deepspeed_config_file"].endswith(f"configs/deepspeed/{name}.json")


@pytest.mark.parametrize("name", ["cpu", "gpu", "dev"])
def test_locks_pin_every_package_once(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 and "+" not in pin and " " not in pin for pin in pins)
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))

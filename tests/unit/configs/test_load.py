"""Broken configurations: each is refused with its file, position and fix, all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from writer_rl.configs.errors import InputError
from writer_rl.configs.load import (
    ConfigError,
    config_hash,
    dump_resolved,
    known_keys,
    load_config,
    resolve_config_path,
)
from writer_rl.configs.schema import RunConfig

# text, what the position must hold, what the fix must hold
BROKEN = {
    "unknown key": ("grpo:\n  betta: 0.1\n", "grpo.betta (line 2)", "did you mean grpo.beta?"),
    "key of another section": (
        "learning_rate: 1e-5\n",
        "learning_rate (line 1)",
        "sft.learning_rate or grpo.learning_rate",
    ),
    "nothing near": ("zzz: 1\n", "zzz (line 1)", "known here: name, output_dir"),
    "text for a number": ("name: a\nseed: '3'\n", "seed (line 2)", "whole number"),
    "yes for a boolean": ("model: {autocast: yes}\n", "model.autocast (line 1)", "true or false"),
    "true for a number": ("seed: true\n", "seed (line 1)", "whole number"),
    "fraction for a count": ("seed: 1.5\n", "seed (line 1)", "whole number"),
    "octal": ("seed: 012\n", "seed (line 1)", "whole number"),
    "number for a text": ("name: 17\n", "name (line 1)", "a text"),
    "value for a section": ("name: a\nreward: 3\n", "reward (line 2)", "indented"),
    "section for a value": ("seed: {a: 1}\n", "seed (line 1)", "whole number"),
    "below its range": ("seed: -1\n", "seed (line 1)", "at least 0"),
    "above its range": ("grpo:\n  clip_low: 2\n", "grpo.clip_low (line 2)", "below 1"),
    "no such choice": ("grpo:\n\n  loss: token_mea\n", "grpo.loss (line 3)", "did you mean token_mean?"),
    "pattern": ("name: a b/c\n", "name (line 1)", "only letters"),
    "pair too short": ("data: {simulation: {members: [5]}}\n", "data.simulation.members[1] (line 1)", "every element"),
    "pair too long": ("grpo: {adam_betas: [0.9, 0.9, 0.9]}\n", "grpo.adam_betas (line 1)", "fewer"),
    "union": ("model: {lora: {target_modules: 5}}\n", "model.lora.target_modules (line 1)", "all-linear"),
    "not a number": ("reward: {valid_weight: .nan}\n", "reward.valid_weight (line 1)", "finite"),
    "null": ("name: a\nseed:\n", "seed (line 2)", "whole number"),
    "cross-field in a section": (
        "data:\n  simulation:\n    messages: [2, 3]\n    matters: [1, 3]\n",
        "data.simulation (line 4)",
        "lower matters",
    ),
    "cross-field at the top": ("name: a\nsampler:\n  max_model_len: 200\n", "(line 3)", "raise max_model_len"),
    "files without paths": ("data: {source: files}\n", "data (line 1)", "give both paths"),
    "group of one": ("grpo: {group_size: 1}\n", "grpo (line 1)", "at least 2"),
    "packaged model": ("model: {path: 'package:gpt'}\n", "(line 1)", "package:smollm2-135m"),
    "duplicate key": ("seed: 1\nname: a\nseed: 2\n", "seed (line 3)", "keep one"),
    "duplicate key below": ("model:\n  lora:\n    r: 1\n    r: 2\n", "model.lora.r (line 4)", "keep one"),
    "open bracket": ("name: [a\n", "line 2, column 1", "brackets"),
    "tab": ("model:\n\tpath: a\n", "line 2, column 1", "spaces"),
    "two documents": ("name: a\n---\nname: b\n", "line 2", "one document"),
    "alias": ("name: &a x\noutput_dir: *a\n", "output_dir (line 2)", "write the value out"),
    "unknown alias": ("name: *a\n", "line 1", "write the value out"),
    "tag": ("name: !!python/object/apply:os.system [id]\n", "name", "text"),
    "tagged scalar": ("name: !!python/name:os.system x\n", "name (line 1)", "remove the tag"),
    "merge key": ("<<: {seed: 1}\n", "<< (line 1)", "known here"),
    "list as key": ("? [a]\n: 1\n", "line 1", "plain name"),
    "control character": ("name: \x01\n", "config.yaml", "remove it"),
    "deep nesting": ("name: " + "[" * 5000, "config.yaml", "three levels"),
    "empty": ("", "config.yaml", "name: my-run"),
    "comments alone": ("# nothing\n", "config.yaml", "name: my-run"),
    "list at the top": ("- a\n", "line 1", "key: value"),
    "text at the top": ("hello\n", "line 1", "key: value"),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_names_file_position_and_fix(tmp_path: Path, case: str) -> None:
    text, position, fix = BROKEN[case]
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert position in message
    assert fix in message
    assert len(message.splitlines()) == 1, message


def test_every_problem_is_reported_in_the_order_of_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: x\ngrpo:\n  bete: 1\n  clip_low: 3\n  epochs: 0\nname: a\nname: b\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["nonsense", "sft.epochs=-1"])
    lines = str(caught.value).splitlines()
    assert [
        key in line for key, line in zip(("seed", "bete", "clip_low", "grpo.epochs", "name"), lines, strict=False)
    ] == [True] * 5
    assert "override 'nonsense'" in lines[5]
    assert "override 'sft.epochs=-1'" in lines[6]
    assert len(lines) == len(caught.value.problems) == 7


def test_bytes_that_are_not_utf8_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"name: a\n# caf\xe9\n")
    with pytest.raises(InputError, match="line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"):
        load_config(path)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    write(tmp_path, "name: a\n")
    with pytest.raises(InputError, match="this is a directory; name the YAML file"):
        load_config(tmp_path)
    with pytest.raises(InputError, match=r"no such file; did you mean .*config\.yaml\?"):
        load_config(tmp_path / "confg.yaml")
    with pytest.raises(InputError, match="no such file; check the path"):
        load_config(tmp_path / "absent" / "config.yaml")
    with pytest.raises(InputError, match="no packaged configuration of that name"):
        load_config("certainly-not-packaged")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * 1_000_001)
    with pytest.raises(InputError, match="is no configuration"):
        load_config(big)


OVERRIDES = {
    "no equals sign": ("seed", "write key=value"),
    "no key": ("=3", "write key=value"),
    "unknown": ("grpo.bete=3", "did you mean grpo.beta?"),
    "unknown section": ("grop.beta=3", "did you mean grpo.beta?"),
    "below a value": ("seed.x=3", "seed takes a single value"),
    "wrong type": ("seed=abc", "whole number"),
    "wrong range": ("grpo.clip_low=1.0", "below 1"),
    "bad YAML": ("name=a: b: c", "in quotes"),
    "section by value": ("grpo=3", "indented"),
    "unknown key in a mapping": ("data.simulation={sed: 3}", "did you mean data.simulation.seed?"),
    "empty name": ("name=", "only letters"),
    "cross-field": ("sampler.max_model_len=200", "raise max_model_len"),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_broken_override_is_named(tmp_path: Path, case: str) -> None:
    override, fix = OVERRIDES[case]
    with pytest.raises(InputError) as caught:
        load_config(write(tmp_path, "name: a\n"), [override])
    message = str(caught.value)
    assert override in message
    assert fix in message
    assert len(message.splitlines()) == 1, message


def test_values_keep_their_meaning(tmp_path: Path) -> None:
    text = """
name: '1e5'
output_dir: 2026-11-30
grpo:
  learning_rate: 1e-5
  kl_guard: off
  adam_betas: [0.9, 0.95]
  beta: 0
sft:  # every key below is commented out
#  epochs: 3
data: {max_segments: 1_000}
model: {lora: {target_modules: [q_proj, v_proj]}}
"""
    config = load_config(write(tmp_path, text))
    assert config.name == "1e5"
    assert config.output_dir == "2026-11-30"
    assert config.grpo.learning_rate == 1e-5
    assert config.grpo.kl_guard == "off"
    assert config.grpo.adam_betas == (0.9, 0.95)
    assert config.grpo.beta == 0.0
    assert config.sft == RunConfig().sft
    assert config.data.max_segments == 1000
    assert config.model.lora.target_modules == ("q_proj", "v_proj")


def test_overrides_apply_in_order_and_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\ngrpo: {beta: 0.5, epochs: 3}\n")
    config = load_config(
        path, ["seed=2", "seed=3", "grpo.beta=0", "model.lora.r=4", "data.train_traces=", "sft.epochs=1e1"]
    )
    assert (config.seed, config.grpo.beta, config.grpo.epochs, config.model.lora.r) == (3, 0.0, 3, 4)
    assert config.data.train_traces == ""
    assert config.sft.epochs == 10.0


def test_an_override_mends_what_the_file_has_wrong(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "seed: -1\n"), ["seed=5"]).seed == 5


def test_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes("\ufeffname: a\r\nseed: 7\r\n".encode())
    assert load_config(path).seed == 7


def test_dump_loads_to_the_same_configuration_and_hash(tmp_path: Path) -> None:
    path = write(tmp_path, "name: '1e5'\noutput_dir: 'off'\ngrpo: {learning_rate: 1e-7, kl_guard: off}\n")
    config = load_config(path)
    digest = dump_resolved(config, tmp_path / "run")
    written = tmp_path / "run" / "config.yaml"
    assert load_config(written) == config
    assert config_hash(load_config(written)) == digest == config_hash(config)
    assert digest in written.read_text(encoding="utf-8").splitlines()[0]
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_hash_depends_on_values_alone(tmp_path: Path) -> None:
    one = load_config(write(tmp_path, "name: a\nseed: 1\n"))
    other = load_config(write(tmp_path, "seed: 0\n"), ["name=a", "seed=1"])
    assert config_hash(one) == config_hash(other)
    assert config_hash(one) != config_hash(load_config(tmp_path / "config.yaml", ["name=a", "seed=2"]))


def test_known_keys_hold_every_level() -> None:
    keys = known_keys()
    assert all(keys[section] for section in ("grpo", "data.simulation", "reward.qa"))
    assert keys["grpo.beta"] is False
    assert keys["model.lora.target_modules"] is False


@pytest.mark.parametrize("name", ["demo", "qwen2.5-3b", "qwen2.5-3b-paper"])
def test_packaged_configurations_are_found_by_bare_name(name: str) -> None:
    assert resolve_config_path(name).name == f"{name}.yaml"
    assert load_config(name).name

#!/usr/bin/env bash
# One door to everything: installs what is missing on first use, then runs the command.
#   ./launch.sh demo          see `./launch.sh help`
# Environment:
#   WRITER_RL_VENV         where the virtual environment lives (default: .venv beside this file)
#   WRITER_RL_PYTHON       interpreter to build it with (default: the first of python3.11, python3.12, python3 that fits)
#   WRITER_RL_STACK        cpu or gpu (default: gpu if nvidia-smi finds a device)
#   WRITER_RL_TORCH_INDEX  package index for torch alone, for example https://download.pytorch.org/whl/cpu
set -Eeuo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
root=${self%/*}
venv=${WRITER_RL_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python
stamp=$venv/writer-rl.stamp
log=$venv/setup.log
torch_cpu_index=https://download.pytorch.org/whl/cpu
need_mib=6000

commands=(demo simulate import sft grpo evaluate score report export bench)

usage() {
  cat <<'TEXT'
usage: ./launch.sh COMMAND [ARGUMENTS]

  demo       simulate, SFT, GRPO, evaluate and report in one go, on a small model
  test       lint, types, layers and tests; `test --fast` leaves out integration; further words go to pytest
  setup      install what is pinned in requirements/ into .venv (the other commands do this by themselves)

  simulate   write simulated group chats with true memories, traces and questions
  import     convert a foreign data set into canonical dialogue files
  sft        fine-tune the Writer on teacher traces
  grpo       train the Writer by reinforcement learning with sampled rollouts
  evaluate   compare base, SFT and RL Writers on held-out dialogues, one budget
  score      score predicted memories against reference memories, without any model
  report     draw reward curves and result tables of a run
  export     write a trained Writer as a self-contained model directory
  bench      measure sampling, training and synchronisation speed on this machine

`./launch.sh COMMAND --help` describes a command. Several ranks on one machine, for sft and grpo:
  ./launch.sh grpo --accelerate zero2 --processes 8 CONFIG      (cpu, ddp, zero2, zero3, or a launcher file)
TEXT
}

say() { printf '%s\n' "$*" >&2; }
die() { # what, fix
  say "launch.sh: $1"
  say "  fix: $2"
  exit "${3:-1}"
}

# ---------------------------------------------------------------- setup

lock_hash() { # of everything that decides what is installed; no Python is started, so that `score` stays quick
  { printf '%s\n' "$root" "$venv" "$1"; cat -- "$root/requirements/$1.txt" "$root/requirements/dev.txt" "$root/pyproject.toml"; } |
    sha256sum | cut -d' ' -f1
}

stamped_stack() { # prints the stack of a complete, current environment; fails otherwise
  local stack hash rest
  [[ -x $python && -r $stamp ]] || return 1
  read -r stack hash rest <"$stamp" || return 1
  [[ $stack == cpu || $stack == gpu ]] && [[ $hash == "$(lock_hash "$stack")" ]] || return 1
  printf '%s' "$stack"
}

detect_stack() {
  case ${WRITER_RL_STACK:-} in
    cpu | gpu) printf '%s' "$WRITER_RL_STACK" ;;
    '') if command -v nvidia-smi >/dev/null && timeout 30 nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null; then
      printf gpu
    else
      printf cpu
    fi ;;
    *) die "WRITER_RL_STACK is '$WRITER_RL_STACK'" "set it to cpu or gpu, or unset it" 2 ;;
  esac
}

find_python() {
  local candidate seen=()
  for candidate in ${WRITER_RL_PYTHON:+"$WRITER_RL_PYTHON"} python3.11 python3.12 python3 python; do
    [[ -z ${WRITER_RL_PYTHON:-} || $candidate == "$WRITER_RL_PYTHON" ]] || break
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$candidate lacks the venv module" "install it (Debian and Ubuntu: apt install $(basename "$candidate")-venv)"
      command -v -- "$candidate"
      return
    fi
    seen+=("$candidate: $("$candidate" --version 2>&1 | head -n 1 || true)")
  done
  say "${seen[@]/#/$'\n'  }"
  die "no Python 3.11 or 3.12 found" "install Python 3.11, or set WRITER_RL_PYTHON to its path"
}

step_count=5
step_pid=''
interrupted() {
  [[ -z $step_pid ]] || kill -- "-$step_pid" 2>/dev/null || true
  say ""
  say "setup interrupted; run the same command again, it goes on from here"
  exit 130
}

run_step() { # number, text, number of packages (0: unknown), command…; the command's output goes to the log
  local number=$1 text=$2 total=$3 started=$SECONDS last=$SECONDS line count pid status=0
  shift 3
  [[ -t 2 ]] || say "  $number/$step_count $text …"
  printf '\n== %s ==\n' "$text" >>"$log"
  local from
  from=$(wc -l <"$log")
  set -m # an own process group, so that an interrupt can end pip with its children
  "$@" >>"$log" 2>&1 </dev/null &
  pid=$!
  set +m
  step_pid=$pid
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if [[ -t 2 ]] || ((SECONDS - last >= 15)); then
      last=$SECONDS
      line=$((SECONDS - started))s
      if ((total)); then
        count=$(tail -n "+$from" "$log" | grep -cE '^(Collecting|Requirement already|Processing) ' || true)
        if ((count >= total)); then line="installing files, $line"; else line="package $count of $total, $line"; fi
      fi
      if [[ -t 2 ]]; then printf '\r\033[K  %s/%s %s … %s' "$number" "$step_count" "$text" "$line" >&2; else say "      $line"; fi
    fi
  done
  wait "$pid" || status=$?
  step_pid=''
  [[ ! -t 2 ]] || printf '\r\033[K' >&2
  ((status == 0)) || return "$status"
  say "  $number/$step_count $text: done in $((SECONDS - started))s"
}

fail_step() {
  say ""
  tail -n 15 -- "$log" | sed 's/^/    /' >&2
  die "setup failed at: $1 (whole log: $log)" "$2; then run the same command again, it goes on from here"
}

pip_install() { "$python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@"; }

install_lock() { # stack; everything but torch and what builds against it
  grep -vE '^(torch|deepspeed)==' "$root/requirements/$1.txt" >"$venv/lock.txt"
  pip_install --no-deps -r "$venv/lock.txt" -r "$root/requirements/dev.txt"
}

install_torch() { # stack
  local pin
  pin=$(grep -E '^torch==' "$root/requirements/$1.txt")
  if "$python" -c "import sys, torch; sys.exit('torch==' + torch.__version__.split('+')[0] != '$pin')" 2>/dev/null; then
    echo "$pin is there"
  elif [[ -n ${WRITER_RL_TORCH_INDEX:-} ]]; then
    pip_install --no-deps --force-reinstall --index-url "$WRITER_RL_TORCH_INDEX" "$pin" || return
  elif [[ $1 == gpu ]] || pip_install -q --dry-run --ignore-installed --no-deps --report - "$pin" | grep -F '+cpu"' >/dev/null; then
    pip_install --no-deps --force-reinstall "$pin" || return
  else # the default index serves the CUDA build, whose libraries are not part of the CPU stack
    pip_install --no-deps --force-reinstall --index-url "$torch_cpu_index" "$pin" ||
      pip_install --no-deps --force-reinstall "$pin" || return
  fi
  "$python" -c 'import torch' || return
  if pin=$(grep -E '^deepspeed==' "$root/requirements/$1.txt"); then # a source package: its build imports torch
    DS_BUILD_OPS=0 DS_ACCELERATOR=${1/gpu/cuda} pip_install --no-deps --no-build-isolation "$pin"
  fi
}

check_imports() { # stack
  local modules='torch, transformers, trl, peft, accelerate, datasets, writer_rl.trainer.main'
  [[ $1 == cpu ]] && modules+=', vllm'
  DS_ACCELERATOR=${1/gpu/cuda} "$python" -c "import $modules"
}

setup() { # leaves a complete environment and its stamp, or the old stamp removed and an error
  local stack total base free
  stack=$(detect_stack)
  if [[ $(stamped_stack || true) == "$stack" ]]; then return; fi
  mkdir -p -- "$(dirname -- "$venv")"
  if command -v flock >/dev/null; then
    exec 9>"$venv.lock"
    flock -n 9 || { say "another launch is installing; waiting for it …" && flock 9; }
    if [[ $(stamped_stack || true) == "$stack" ]]; then exec 9>&- && return; fi
  fi
  trap interrupted INT TERM

  if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A -- "$venv") ]]; then
    die "$venv exists and is no virtual environment" "move it away, or set WRITER_RL_VENV to another place"
  fi
  rm -f -- "$stamp"
  if [[ -e $venv ]] && ! "$python" -m pip --version >/dev/null 2>&1; then
    say "the environment in $venv is broken; building it anew"
    rm -rf -- "$venv"
  elif [[ -e $venv/writer-rl.stack && $(<"$venv/writer-rl.stack") != "$stack" ]]; then # both stacks own the module vllm
    say "switching to the $stack stack; building $venv anew"
    rm -rf -- "$venv"
  fi
  base=$(find_python)
  if [[ ! -e $python ]]; then
    free=$(df -Pm -- "$(dirname -- "$venv")" | awk 'NR == 2 {print $4}')
    ((free >= need_mib)) ||
      die "only $free MiB free beside $venv, about $need_mib are needed" "free some space, or set WRITER_RL_VENV to another disk"
  fi
  mkdir -p -- "$venv"
  : >"$log"
  total=$(cat -- "$root/requirements/$stack.txt" "$root/requirements/dev.txt" | grep -cE '^[A-Za-z0-9]')
  total=$((total - 2)) # torch and deepspeed have their own step
  say "setting up the $stack stack, $total packages, in $venv (once; a few minutes)"
  local network="check the network, or PIP_INDEX_URL if you use a mirror"

  if [[ ! -x $python ]]; then
    run_step 1 "virtual environment ($("$base" --version))" 0 "$base" -m venv "$venv" ||
      fail_step "virtual environment" "see the log"
  else
    say "  1/$step_count virtual environment: there already"
  fi
  printf '%s\n' "$stack" >"$venv/writer-rl.stack"
  run_step 2 "pinned packages" "$total" install_lock "$stack" || fail_step "pinned packages" "$network"
  run_step 3 "torch" 0 install_torch "$stack" ||
    fail_step "torch" "$network; WRITER_RL_TORCH_INDEX names another index for torch"
  run_step 4 "writer-rl itself" 0 pip_install --no-deps --no-build-isolation -e "$root" || fail_step "writer-rl itself" "see the log"
  run_step 5 "import check" 0 check_imports "$stack" || fail_step "import check" "see the log"
  printf '%s %s %s\n' "$stack" "$(lock_hash "$stack")" "$("$python" --version)" >"$stamp.tmp"
  mv -f -- "$stamp.tmp" "$stamp"
  trap - INT TERM
  exec 9>&-
}

# Every other command: use the environment as it is if it is current, whatever the devices say; install only if it is not.
ensure_setup() { stamped_stack >/dev/null || setup; }

environment() {
  export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
  export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 MPLBACKEND=Agg
  [[ $(stamped_stack) == gpu ]] || export DS_ACCELERATOR=cpu
}

# ---------------------------------------------------------------- commands

stage() { # name, command…; the check's own output, then one line with its time
  local name=$1 started=$SECONDS
  shift
  if "$@"; then
    say "ok      $name ($((SECONDS - started))s)"
  else
    say "FAILED  $name ($((SECONDS - started))s)"
    failed+=("$name")
  fi
}

run_tests() {
  local failed=() paths=() fast=0 status=0 name words=()
  for name in "$@"; do
    if [[ $name == --fast ]]; then fast=1; elif [[ $name != -- ]]; then words+=("$name"); fi
  done
  cd -- "$root"
  local folders=(tests)
  ((fast)) && folders=(tests/unit tests/properties tests/reference tests/contract)
  for name in "${folders[@]}"; do
    if [[ -d $name ]]; then paths+=("$name"); fi
  done
  local bin=$venv/bin
  stage "ruff check" "$bin/ruff" check --quiet .
  stage "ruff format" "$bin/ruff" format --quiet --check .
  stage "mypy" "$bin/mypy" --no-error-summary
  stage "import-linter" quietly "$bin/lint-imports"
  say "pytest  ${paths[*]}"
  "$python" -m pytest "${paths[@]}" "${words[@]}" || status=$?
  if ((${#failed[@]})); then
    say "launch.sh: failed before pytest: ${failed[*]}"
    ((status)) || status=1
  fi
  exit "$status"
}

quietly() { # a command's output only if it fails
  local output
  output=$("$@" 2>&1) || { printf '%s\n' "$output" && return 1; }
}

run_module() { # command, arguments…
  local command=$1 launcher='' processes='' rest=()
  shift
  while (($#)); do
    case $1 in
      --accelerate | --processes)
        [[ $command == sft || $command == grpo ]] || die "$1 is for sft and grpo" "leave it out" 2
        (($# >= 2)) || die "$1 wants a value" "for example: --accelerate zero2 --processes 8" 2
        if [[ $1 == --accelerate ]]; then launcher=$2; else processes=$2; fi
        shift 2
        ;;
      *) rest+=("$1") && shift ;;
    esac
  done
  [[ -z $processes || $processes =~ ^[1-9][0-9]*$ ]] || die "--processes is '$processes'" "give a whole number of ranks" 2
  [[ -z $processes || -n $launcher ]] || die "--processes without --accelerate" "add --accelerate cpu, ddp, zero2 or zero3" 2
  if [[ -z $launcher ]]; then
    exec "$python" -m writer_rl.trainer "$command" "${rest[@]}"
  elif [[ $launcher == cpu ]]; then # accelerate's own launcher starts a single process on CPU
    export ACCELERATE_USE_CPU=true
    exec "$python" -m torch.distributed.run --standalone --nproc_per_node "${processes:-2}" -m writer_rl.trainer "$command" "${rest[@]}"
  fi
  local file=$launcher known="$root/configs/accelerate/$launcher.yaml"
  [[ -f $file ]] || file=$known
  [[ -f $file ]] || die "no launcher file '$launcher'" "use cpu, ddp, zero2, zero3, or the path of an accelerate configuration" 2
  local options=(--config_file "$file")
  [[ -z $processes ]] || options+=(--num_processes "$processes")
  if [[ $file == "$known" && $launcher == zero* ]]; then
    options+=(--deepspeed_config_file "$root/configs/deepspeed/$launcher.json")
  fi
  exec "$python" -m accelerate.commands.launch "${options[@]}" -m writer_rl.trainer "$command" "${rest[@]}"
}

command=${1:-}
(($# == 0)) || shift
case $command in
  -h | --help | help) usage && exit ;;
  '') usage >&2 && exit 2 ;;
  setup)
    (($# == 0)) || die "setup takes no arguments" "run ./launch.sh setup" 2
    setup
    read -r stack _ version <"$stamp"
    say "ready: $stack stack, $version, in $venv"
    ;;
  test)
    ensure_setup
    environment
    run_tests "$@"
    ;;
  *)
    for known in "${commands[@]}"; do
      if [[ $command == "$known" ]]; then
        ensure_setup
        environment
        run_module "$command" "$@"
      fi
    done
    die "unknown command '$command'" "one of: demo test setup ${commands[*]:1} help" 2
    ;;
esac

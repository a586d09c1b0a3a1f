#!/usr/bin/env bash
# Makes the virtual environment of `make setup`. With an NVIDIA GPU and a torch that sees it, that torch is used; without
# one, a CPU build is installed first, so that nothing pulls gigabytes of CUDA.
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
CPU_WHEELS=https://download.pytorch.org/whl/cpu

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$PYTHON" --version) is too old: Python 3.11 or newer is needed (make PYTHON=python3.12 ...)" >&2
  exit 2
}
pinned=$(grep '^torch==' constraints.txt)
gpu=$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null || echo no)

if [ "$gpu" = True ]; then
  [ -d "$VENV" ] || "$PYTHON" -m venv --system-site-packages "$VENV"
  constraints=$(mktemp)
  grep -v -E '^(torch|triton)==' constraints.txt > "$constraints"
elif command -v nvidia-smi >/dev/null; then
  echo "error: there is an NVIDIA GPU, but no torch that sees it in $("$PYTHON" -c 'import sys; print(sys.executable)')." >&2
  echo "Install the torch of your CUDA there first (https://pytorch.org), or name another python: make PYTHON=..." >&2
  exit 2
else
  [ -d "$VENV" ] || "$PYTHON" -m venv "$VENV"
  constraints=constraints.txt
  if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
    case $(uname -s) in
      Linux) "$VENV/bin/pip" install -q "$pinned+cpu" 2>/dev/null || "$VENV/bin/pip" install -q "$pinned" --index-url "$CPU_WHEELS" ;;
      *) "$VENV/bin/pip" install -q "$pinned" ;;
    esac
  fi
fi
"$VENV/bin/pip" install -q -c "$constraints" -e '.[dev]'
"$VENV/bin/python" -c 'import torch; print(f"ready: torch {torch.__version__}")'

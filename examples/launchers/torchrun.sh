#!/usr/bin/env bash
# Train on several machines with torchrun. Run the same command on every machine, in any order:
#
#   MACHINES=2 FIRST=10.0.0.1 examples/launchers/torchrun.sh examples/gpt.py --schedule zbv -m 16 --checkpoints /shared/run
#
# The arguments are those of `penstock train`. docs/launchers.md explains the settings.
set -euo pipefail

: "${FIRST:?set FIRST to the IP address of one of the machines, the same on all}"
MACHINES=${MACHINES:-2}
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)} # per machine
PORT=${PORT:-29500}
RUN=${RUN:-penstock}
RESTARTS=${RESTARTS:-3}

# This machine's address in the network that FIRST is in, and the network interface that has it.
ADDRESS=$(ip -4 -oneline route get "$FIRST" | sed -n 's/.* src \([0-9.]*\).*/\1/p')
INTERFACE=$(ip -4 -oneline address show to "$ADDRESS" | awk '{print $2; exit}')

# Without these, torch uses the address that the machine's own name resolves to: often the loopback, or another network.
export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
[[ $ADDRESS == "$FIRST" ]] && IS_HOST=true || IS_HOST=false

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun \
  --nnodes "$MACHINES" \
  --nproc-per-node "$PROCESSES" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$FIRST:$PORT" \
  --rdzv-conf "is_host=$IS_HOST" \
  --rdzv-id "$RUN" \
  --local-addr "$ADDRESS" \
  --max-restarts "$RESTARTS" \
  -m penstock train "$@"

#!/bin/bash
# A prolog (Prolog= in slurm.conf, with PrologFlags=Alloc): drain a node that `stepscope probe` calls unfit.
#
# The job starts in every other case: if the check is missing, fails, or takes longer than 90 seconds. A node that is
# busy is not unfit. PEERS is a folder that all nodes share; without it a node is compared with its own past only.
# PrologEpilogTimeout, if it is set, must be longer than that: when it is over, Slurm drains the node itself.
# Slurm gives a prolog no search path: set PROBE to the full path of the command if it is not in one of these folders.
PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin:/opt/stepscope/bin
export PATH
PROBE=${STEPSCOPE_PROBE:-stepscope}
PEERS=${STEPSCOPE_PROBE_PEERS:-}
SCRATCH=${STEPSCOPE_PROBE_DISK:-/tmp}

command -v "$PROBE" > /dev/null || exit 0
# In the foreground: it stays in the process group that Slurm kills if the prolog takes longer than PrologEpilogTimeout.
text=$(HOME=${HOME:-/root} timeout --foreground --kill-after=5 90 "$PROBE" probe --quick --disk "$SCRATCH" \
    ${PEERS:+--peers "$PEERS"} 2> /dev/null)
if [ $? -eq 3 ]; then
    reason=$(printf '%s' "$text" | head -n 1 | cut -c 1-200)
    scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="stepscope probe: $reason"
    # Slurm requeues a batch job, held unless SchedulerParameters has nohold_on_prolog_fail; srun and salloc fail.
    exit 1
fi
exit 0
